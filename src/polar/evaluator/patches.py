"""Git patches as hostile input: which files one touches, what of it may be applied, and applying it. Knows no tests and no reward.

A patch that an agent made is cut into its files; those that would leave the folder, reach into `.git` or touch what the task protects
are dropped before git sees them. `git apply` is tried byte for byte, then as the repository's attributes have it (a patch made elsewhere
has its line ends as they are committed), then with looser matching, then `patch` with fuzz; each of them applies all or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from polar.errors import EvaluatorError
from polar.evaluator.budget import Budget
from polar.evaluator.commands import GIT_ENV
from polar.runtime.base import ExecResult, Runtime

_HEADER = re.compile(rb"^diff --git (.*)$")
_NAMED = re.compile(rb"^(--- |\+\+\+ |rename from |rename to |copy from |copy to )(.*)$")
_LINK = re.compile(rb"^(?:new file mode|new mode|index [0-9a-f]+\.\.[0-9a-f]+) 120000\s*$")


@dataclass(frozen=True, slots=True)
class Section:
    """One file of a patch: the paths that it names (before and after, without `a/` and `b/`), and its text. `link`: it makes a symbolic
    link."""

    paths: tuple[str, ...]
    text: bytes
    link: bool = False


@dataclass(frozen=True, slots=True)
class Applied:
    """`ok`: the patch is in. `how`: the command that did it, or the last one's complaint."""

    ok: bool
    how: str
    dropped: tuple[str, ...] = field(default=())


def sections(patch: bytes) -> list[Section]:
    """The files of a git patch, in order; text before the first one is left out.

    `b"".join(section.text ...)` is the patch from its first `diff --git` line on. Hunks are counted, so that content which looks like a
    header is none.
    """
    found: list[Section] = []
    lines: list[bytes] = []
    paths: list[str] = []
    link = False
    remaining = (0, 0)

    def close() -> None:
        if lines:
            found.append(Section(tuple(dict.fromkeys(paths)), b"".join(lines), link))

    for line in _lines(patch):
        bare = line.rstrip(b"\r\n")
        if remaining != (0, 0) and bare[:1] in (b" ", b"+", b"-", b"\\", b""):
            old, new = remaining
            remaining = (max(0, old - (bare[:1] in (b" ", b"-", b""))), max(0, new - (bare[:1] in (b" ", b"+", b""))))
            lines.append(line)
            continue
        remaining = (0, 0)
        if header := _HEADER.match(bare):
            close()
            lines, paths, link = [line], list(_both(header.group(1))), False
            continue
        if not lines:
            continue
        lines.append(line)
        if hunk := re.match(rb"^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", bare):
            remaining = (int(hunk.group(1) or 1), int(hunk.group(2) or 1))
        elif _LINK.match(bare):
            link = True
        elif named := _NAMED.match(bare):
            path = _name(named.group(2), strip=named.group(1) in (b"--- ", b"+++ "))
            if path is not None:
                paths.append(path)
    close()
    return found


def touched(patch: bytes) -> tuple[str, ...]:
    """All paths that it names, each once."""
    return tuple(dict.fromkeys(path for section in sections(patch) for path in section.paths))


def unsafe(path: str) -> bool:
    """Whether a path would leave the folder or reach into git's own."""
    parts = PurePosixPath(path).parts
    return not parts or path.startswith("/") or ".." in parts or any(part.lower() == ".git" for part in parts) or "\0" in path


def filtered(patch: bytes, drop: Callable[[str], bool], keep_clear: Sequence[str] = ()) -> tuple[bytes, tuple[str, ...]]:
    """The patch without files that are `unsafe`, that `drop` names, or that would put a link above a path of `keep_clear`; and the paths
    that went."""
    kept: list[bytes] = []
    gone: list[str] = []
    above = {str(parent) for path in keep_clear for parent in PurePosixPath(path).parents} - {"."}
    for section in sections(patch):
        bad = not section.paths or any(unsafe(path) or drop(path) for path in section.paths)
        if bad or (section.link and any(path in above for path in section.paths)):
            gone.extend(section.paths or ("(no name)",))
        else:
            kept.append(section.text)
    return b"".join(kept), tuple(gone)


_PLAIN = "git apply --binary --whitespace=nowarn"
_AS_WRITTEN = f"""
at=$(mktemp -d) || exit 127
git init -q --bare "$at/git" && mkdir -p "$at/git/info" &&
    printf '%s\\n' '* -text -ident !filter !working-tree-encoding' > "$at/git/info/attributes" &&
    GIT_DIR=$at/git GIT_WORK_TREE=$PWD {_PLAIN}"""
"""Byte for byte: the repository's own attributes and settings would convert line ends, expand `$Id$` and run filters, in what was recorded
without any of that (`polar.harness.patch`)."""
_ATTEMPTS = (
    _PLAIN,
    "git apply --binary --whitespace=nowarn --recount --ignore-space-change --inaccurate-eof",
    "git apply --binary --whitespace=nowarn -C1",
)


async def apply(runtime: Runtime, patch: bytes, folder: str, *, budget: Budget, limit_s: float = 60.0) -> Applied:
    """Applies a patch (already `filtered`) in `folder`, relative to it. A patch that does not fit is no error; `EvaluatorError` where
    there was not the time to try."""
    if not patch.strip():
        return Applied(True, "empty")
    if not patch.endswith(b"\n"):
        patch += b"\n"
    file = f"{runtime.home}/evaluator/patch.diff"
    await runtime.write(file, patch)
    # The ceiling keeps git from taking a repository further up for the folder's own: it would skip every file, and call that success.
    env = {**GIT_ENV, "GIT_CEILING_DIRECTORIES": str(PurePosixPath(folder).parent)}
    said = "neither git nor patch is in the sandbox"

    async def run(line: str) -> ExecResult:
        allowance = budget.allowance(limit_s)
        done = await runtime.exec(line, cwd=folder, env=env, timeout_s=allowance.seconds)
        if done.timed_out and not allowance.fair:
            raise EvaluatorError(f"only {allowance.seconds:.1f} s of the evaluation were left for applying a patch, which took longer")
        return done

    exact = await run(f"{_AS_WRITTEN} '{file}'\ncode=$?; rm -rf \"$at\"; exit $code")
    if exact.ok:
        return Applied(True, _PLAIN)
    for attempt in _ATTEMPTS:
        done = await run(f"{attempt} '{file}'")
        if done.ok:
            return Applied(True, attempt)
        if done.exit_code != 127:
            said = f"{attempt}: {done.tail()}"
    loose = "patch --batch --forward --fuzz=5 -p1 --no-backup-if-mismatch --reject-file=- -i"
    dry = await run(f"{loose} '{file}' --dry-run")
    if dry.ok:
        done = await run(f"{loose} '{file}'")
        if done.ok:
            return Applied(True, "patch --fuzz=5")
        said = f"patch: {done.tail()}"
    return Applied(False, said)


def _lines(patch: bytes) -> list[bytes]:
    """Lines with their ends, by line feed alone: a lone carriage return is content."""
    *whole, last = patch.split(b"\n")
    return [line + b"\n" for line in whole] + ([last] if last else [])


def _both(rest: bytes) -> tuple[str, ...]:
    """The two names of a `diff --git` line; nothing where they cannot be told apart (the lines after it then say)."""
    if rest.startswith(b'"') or rest.endswith(b'"'):
        names = [_name(match) for match in re.findall(rb'"(?:\\.|[^"\\])*"|\S+', rest)]
        return tuple(name for name in names if name is not None)
    half = (len(rest) - 1) // 2
    if len(rest) % 2 and rest[half : half + 1] == b" " and rest[2:half] == rest[half + 3 :]:
        name = _name(rest[:half])
        return () if name is None else (name,)
    if rest.count(b" ") == 1:
        return tuple(name for name in map(_name, rest.split(b" ")) if name is not None)
    return ()


def _name(raw: bytes, *, strip: bool = True) -> str | None:
    """A path as git wrote it, unquoted and without `a/` or `b/`; `None` for /dev/null."""
    raw = raw.split(b"\t")[0].rstrip(b"\r\n") if not raw.startswith(b'"') else raw.rstrip()
    if raw.startswith(b'"') and raw.endswith(b'"') and len(raw) > 1:
        raw = _unquoted(raw[1:-1])
    if raw == b"/dev/null":
        return None
    if strip and raw[:2] in (b"a/", b"b/"):
        raw = raw[2:]
    return raw.decode(errors="surrogateescape")


_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v", b'"': b'"', b"\\": b"\\"}


def _unquoted(raw: bytes) -> bytes:
    """Git's C-style quoting undone."""

    def one(match: re.Match[bytes]) -> bytes:
        code = match.group(1)
        return bytes([int(code, 8) & 0xFF]) if code.isdigit() else _ESCAPES.get(code, code)

    return re.sub(rb"\\([0-7]{3}|.)", one, raw)
