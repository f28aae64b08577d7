"""What an agent can leave in its work folder that changes how it is graded, and how each of it is undone before grading.

The rule is one: a file that steers the tests rather than the program under test counts only if the task brought it. The task's own state
is what the evaluator's fresh sandbox holds before anything of the agent's comes in (`Trusted.take`); after it came in, every file of the
guarded names is put back to that, or removed (`Trusted.restore`). Links do not help: what is put back replaces them, and is never written
through them.

What no guard in the work folder can stop is code under test that forges the output of the very process that tests it. Evaluators that read
outputs check what can be checked (`polar.evaluator.parsers`); the detector reports it.
"""

from __future__ import annotations

import asyncio
import configparser
import fnmatch
import shlex
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from polar.errors import EvaluatorError, UnsafePath
from polar.evaluator.budget import Budget
from polar.evaluator.history import History, hide_history
from polar.runtime.base import Runtime

__all__ = ["ALWAYS", "PARTLY", "PYTEST", "STAND_INS", "UNSEARCHED", "History", "Trusted", "guarded", "hide_history", "replace"]

ALWAYS: tuple[str, ...] = (
    "sitecustomize.*",
    "usercustomize.*",
    "./pytest.*",
    "./pytest/__init__.*",
    "./_pytest/__init__.*",
    "./pluggy.*",
    "./pluggy/__init__.*",
    "./unittest.*",
    "./unittest/__init__.*",
    "./*.egg-info/entry_points.txt",
    "./*.dist-info/entry_points.txt",
)
"""Guarded in every work folder that is carried over: what Python imports unasked, what stands in for the test runner where the folder is
on its path, and plug-ins that pytest loads from there. `__pycache__` goes too: a compiled file may outvote its source."""

PYTEST: tuple[str, ...] = (
    *ALWAYS,
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "tox.ini",
    "setup.cfg",
    "pyproject.toml",
    ".coveragerc",
    "*.pth",
)
"""Guarded where a repository's own test suite grades. Of `tox.ini`, `setup.cfg` and `pyproject.toml` only changes to pytest's sections
count: the rest is the agent's business."""

STAND_INS: tuple[str, ...] = tuple(
    f"./{name}{rest}"
    for name in ("_pytest", "py", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "colorama", "_distutils_hack")
    for rest in (".*", "/__init__.*")
)
"""Guarded everywhere, too, where the task has none of that name: what pytest imports before any test. Unlike the others these may be a
repository's own program, and then they are the agent's to change."""

UNSEARCHED = ("node_modules", ".git")
"""Folders that are not searched for guarded names."""

_SECTIONS: Mapping[str, tuple[str, ...]] = {"tox.ini": ("pytest",), "setup.cfg": ("tool:pytest",), "pyproject.toml": ("tool", "pytest")}
PARTLY = frozenset(_SECTIONS)
"""Files of which only the sections that pytest reads are guarded."""
_MAX_FILE = 4 << 20
_LISTED_BYTES = 8 << 20
_FLOOD = 1000
"""Guarded files that the task did not bring. Beyond that many nobody looks at each: all go. They are a way to make grading take too long,
or to lose the one that matters among the rest."""
_MOST_COMPARED = 100
_ARGUMENT_BYTES = 64 << 10


def guarded(path: str, patterns: Iterable[str]) -> bool:
    """Whether a relative path has one of the guarded names: a pattern without a slash is a name anywhere, one with a slash a whole path
    (`*` takes slashes too), one that starts with `./` a path from the top, part by part."""
    return any(_fits(path, pattern) for pattern in patterns)


def _fits(path: str, pattern: str) -> bool:
    parts = path.split("/")
    if pattern.startswith("./"):
        wanted = pattern[2:].split("/")
        return len(parts) == len(wanted) and all(fnmatch.fnmatchcase(*pair) for pair in zip(parts, wanted, strict=True))
    return fnmatch.fnmatchcase(path if "/" in pattern else parts[-1], pattern)


@dataclass(frozen=True, slots=True)
class Trusted:
    """The guarded files of a folder as the task brought them: relative path to content."""

    folder: str
    patterns: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)

    @classmethod
    async def take(cls, runtime: Runtime, folder: str, patterns: Sequence[str], *, budget: Budget) -> Trusted:
        """Reads them from a fresh sandbox. Raises `EvaluatorError` where it cannot."""
        files = {}
        patterns = (*patterns, *STAND_INS)
        found, whole = await _find(runtime, folder, patterns, budget)
        if not whole:
            raise EvaluatorError(f"the task's own files of guarded names in {folder} are more than can be listed")
        for path in found:
            try:
                files[path] = await runtime.read(f"{folder}/{path}", max_bytes=_MAX_FILE)
            except (FileNotFoundError, UnsafePath):
                continue
        return cls(folder, tuple(patterns), files)

    async def restore(self, runtime: Runtime, *, budget: Budget, keep: Sequence[str] = ()) -> tuple[str, ...]:
        """Undoes what the agent did to guarded files, those of the patterns `keep` left out; the paths that it had added, changed or
        removed."""
        present, whole = await _find(runtime, self.folder, self.patterns, budget, keep)
        flood: tuple[str, ...] = ()
        if not whole or len(present) > len(self.files) + _FLOOD or not all(map(_is_text, present)):
            await _run(runtime, self.folder, f"{_search(self.patterns, keep)} -exec rm -f -- {{}} +", (), budget)
            flood, present = ("too many files of guarded names, or some that cannot be named: all went",), []
        undone = [path for path in self.files if path not in present and not guarded(path, keep)]
        compared = 0
        for path in present:
            trusted = self.files.get(path)
            if trusted is None and (PurePosixPath(path).name not in PARTLY or compared >= _MOST_COMPARED):
                undone.append(path)
            elif trusted is None or not guarded(path, STAND_INS):
                compared += trusted is None
                if not await asyncio.to_thread(_same, path, trusted, await self._now(runtime, path)):
                    undone.append(path)
        await replace(runtime, self.folder, {path: self.files.get(path) for path in undone}, budget=budget)
        await _run(runtime, self.folder, _FORGET, (), budget)
        return (*flood, *sorted(undone))

    async def _now(self, runtime: Runtime, path: str) -> bytes:
        try:
            return await runtime.read(f"{self.folder}/{path}", max_bytes=_MAX_FILE)
        except (FileNotFoundError, UnsafePath):
            return b"\0 not a plain file"


async def replace(runtime: Runtime, folder: str, files: Mapping[str, bytes | None], *, budget: Budget) -> None:
    """Puts trusted content at these relative paths (`None`: nothing), whatever is there: a link or a file in the place of a folder on
    the way is removed, never followed. Raises `EvaluatorError`."""
    if not files:
        return
    for path in files:
        if path.startswith("/") or ".." in PurePosixPath(path).parts or not PurePosixPath(path).parts:
            raise EvaluatorError(f"the trusted file {path!r} is not inside the work folder")
    for some in _batches(sorted(files)):
        await _run(runtime, folder, _CLEAR, some, budget)
    for path, content in files.items():
        if content is not None:
            await runtime.write(f"{folder}/{path}", content, mode=0o755 if content.startswith(b"#!") else 0o644)


_CLEAR = r"""
for path in "$@"; do
    at=.
    rest=$path
    while [ "$rest" != "${rest#*/}" ]; do
        at=$at/${rest%%/*}
        rest=${rest#*/}
        if [ -L "$at" ] || { [ -e "$at" ] && [ ! -d "$at" ]; }; then rm -f -- "$at"; fi
    done
    rm -rf -- "./$path"
done
"""
_FORGET = r"""find . -name .git -prune -o -type d -name __pycache__ -prune -exec rm -rf -- {} +"""


async def _find(
    runtime: Runtime, folder: str, patterns: Sequence[str], budget: Budget, without: Sequence[str] = ()
) -> tuple[list[str], bool]:
    """Relative paths of everything but folders that has a guarded name and none of those `without`, hidden ones and links too; and
    whether these are all, for there may be more than can be listed."""
    if not patterns:
        return [], True
    out, whole = await _told(runtime, folder, f"{_search(patterns, without)} -print0", (), budget)

    def listed() -> list[str]:
        found = (path.decode(errors="surrogateescape").removeprefix("./") for path in out.split(b"\0") if path)
        return sorted(path for path in found if guarded(path, patterns) and not guarded(path, without))

    return await asyncio.to_thread(listed), whole  # there may be a million, and others share the event loop


def _search(patterns: Sequence[str], without: Sequence[str] = ()) -> str:
    """The beginning of a `find` line: at least all of these names (`*` takes slashes in some of them that `guarded` would not have)."""
    prune = " -o ".join(f"-name {name}" for name in UNSEARCHED)
    line = rf"find . \( {prune} \) -prune -o ! -type d \( {_tests(patterns)} \)"
    return rf"{line} ! \( {_tests(without)} \)" if without else line


def _tests(patterns: Sequence[str]) -> str:
    return " -o ".join(
        f"-path {shlex.quote('./' + pattern.removeprefix('./'))}" if "/" in pattern else f"-name {shlex.quote(pattern)}"
        for pattern in patterns
    )


def _is_text(path: str) -> bool:
    """Whether a command line can name it in every sandbox: a container's travels as JSON, in which bytes that are no text are lost."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return False
    return True


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    """As many of them at once as a command line takes."""
    some: list[str] = []
    room = _ARGUMENT_BYTES
    for path in paths:
        size = len(path.encode(errors="surrogateescape")) + 1
        if some and size > room:
            yield some
            some, room = [], _ARGUMENT_BYTES
        some.append(path)
        room -= size
    if some:
        yield some


async def _run(runtime: Runtime, folder: str, script: str, arguments: Sequence[str], budget: Budget) -> None:
    await _told(runtime, folder, script, arguments, budget)


async def _told(runtime: Runtime, folder: str, script: str, arguments: Sequence[str], budget: Budget) -> tuple[bytes, bool]:
    """What the script printed, and whether that is all of it."""
    done = await runtime.exec(
        ["sh", "-c", f'cd -- "$1" || exit 1; shift\n{script}', "sh", folder, *arguments],
        timeout_s=min(120.0, budget.left()),
        keep_bytes=_LISTED_BYTES,
    )
    if not done.ok:
        why = "it took too long" if done.timed_out else done.tail()
        raise EvaluatorError(f"the work folder {folder} could not be made fit for grading: {why}")
    return done.stdout, not done.truncated


def _same(path: str, trusted: bytes | None, now: bytes) -> bool:
    """Whether the agent left this guarded file as it was, as far as tests are concerned."""
    if trusted == now:
        return True
    name = PurePosixPath(path).name
    if name not in _SECTIONS:
        return False
    try:
        return bool(_section(name, trusted or b"") == _section(name, now))
    except (ValueError, configparser.Error, RecursionError):
        return False


def _section(name: str, content: bytes) -> Any:
    """What this file tells pytest. Raises `ValueError` or `configparser.Error` where it cannot be read."""
    text = content.decode()
    if name == "pyproject.toml":
        tool = tomllib.loads(text).get("tool", {})
        return tool.get("pytest") if isinstance(tool, dict) else tool
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(text)
    return [sorted(parser.items(section)) for section in _SECTIONS[name] if parser.has_section(section)]
