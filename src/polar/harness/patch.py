"""What an agent changed: the work folder against the state in which it was handed over, as a patch.

The start state is kept in a git directory of Polar's own outside the work folder, so that nothing depends on the agent's `.git`: it may
commit, rewrite history, or have no repository at all. Only the sandbox's own git runs, inside it. Knows no harness.

What counts as a file is what git says: what `.gitignore` leaves, together with whatever the agent's own repository tracks in spite of
it, and whatever was there at the start. Repositories inside the folder are taken as plain files. The bytes are those on disk: no filter,
line ending or encoding that `.gitattributes` asks for is applied. Files beyond `MAX_FILE_BYTES` are left out, with a warning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polar.errors import UnsafePath
from polar.runtime.base import ExecResult, Runtime

MAX_FILE_BYTES = 10_000_000
MAX_PATCH_BYTES = 64_000_000
_TIMEOUT_S = 180.0
_MAX_LIST_BYTES = 64_000_000
_MAX_NESTED = 100
_ATTRIBUTES = "* -text !filter -ident !working-tree-encoding !diff !merge"
_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_NO_REPLACE_OBJECTS": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "LC_ALL": "C",
}
_SETTINGS = ("core.fileMode=true", "core.fsmonitor=false", "core.untrackedCache=false", "core.symlinks=true", "core.quotePath=true")
_DIFF = "-r -p --binary --full-index --no-renames --no-ext-diff --no-textconv"
_INIT = f"""
set -e
rm -rf "$POLAR_GIT"
git init --quiet --bare "$POLAR_GIT"
mkdir -p "$POLAR_GIT/info"
printf '%s\\n' '{_ATTRIBUTES}' > "$POLAR_GIT/info/attributes"
if [ -f .git/info/exclude ]; then cat .git/info/exclude >> "$POLAR_GIT/info/exclude"; fi
"""

_ONE_BY_ONE = """
xargs -0 -n 100 /bin/sh -c '
  git update-index --add --remove --replace -- "$@" 2>/dev/null && exit 0
  failed=0
  for name; do git update-index --add --remove --replace -- "$name" || failed=1; done
  exit $failed
' sh
"""


class _Failed(Exception):
    """A step of git failed; the text is for the warning."""


@dataclass(slots=True)
class WorkFolder:
    """A sandbox's work folder: `record` its state once, take the `patch` against it as often as wanted. `git_dir` is a path inside."""

    runtime: Runtime
    git_dir: str
    tree: str | None = None
    """The start state's tree id, kept here where the agent cannot change it; `None`: not recorded."""
    _skipped: set[str] = field(default_factory=set)

    async def record(self) -> str | None:
        """Takes the start state. Returns a warning where there will be no patch. Raises `SandboxError`."""
        self.tree = None
        found = await self.runtime.exec(["git", "--version"], timeout_s=30)
        if not found.ok:
            return "there is no git in the sandbox: no patch can be taken"
        try:
            self._ok(await self._run(_INIT, env={"POLAR_GIT": self.git_dir}), "git init")
            _, self._skipped = await self._update(modified=False)
            self.tree = await self._write_tree()
        except _Failed as error:
            return f"the start state of {self.runtime.workdir} could not be recorded, so there is no patch: {error}"
        return None

    async def patch(self, target: Path) -> tuple[bytes | None, list[str]]:
        """The patch, also written to `target`, and warnings. Empty where nothing changed, `None` where it cannot be told.

        Raises `SandboxError` only where the sandbox itself fails: whatever the agent left is answered with a warning.
        """
        if self.tree is None:
            return None, []
        try:
            self._ok(await self.runtime.exec(["rm", "-f", f"{self.git_dir}/index.lock"], timeout_s=30), "rm")
            warnings, _ = await self._update(modified=True)
            after = await self._write_tree()
            inside = f"{self.git_dir}/polar.patch"
            line = f'git diff-tree {_DIFF} {self.tree} {after} > "$POLAR_PATCH"'
            self._ok(await self._run(line, env={**self._own(), "POLAR_PATCH": inside}), "git diff-tree")
            return await self._fetch(inside, target), warnings
        except _Failed as error:
            return None, [f"no patch: {error}"]
        except UnsafePath as error:
            return None, [f"no patch: it is larger than {MAX_PATCH_BYTES} bytes, or was tampered with ({error})"]
        except FileNotFoundError:
            return None, ["no patch: it was removed while it was fetched"]

    async def _fetch(self, inside: str, target: Path) -> bytes:
        def cleared() -> None:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)

        await asyncio.to_thread(cleared)
        await self.runtime.download(inside, target, max_bytes=MAX_PATCH_BYTES)
        return await asyncio.to_thread(target.read_bytes)

    async def _update(self, *, modified: bool) -> tuple[list[str], set[str]]:
        """Brings the index up to date. Returns warnings and the names of the files that are too large."""
        names = await self._names(modified=modified)
        huge = await self._huge()
        wanted = await asyncio.to_thread(lambda: _joined(sorted(names - huge)))
        added = ["update-index", "-z", "--add", "--remove", "--replace", "--stdin"]
        done = await self._git(added, stdin=wanted)
        warnings = []
        if not done.ok:
            warnings = await self._one_by_one(wanted)
        left_out = sorted((huge & names) - self._skipped)
        if left_out:
            shown = ", ".join(left_out[:5]) + (f" and {len(left_out) - 5} more" if len(left_out) > 5 else "")
            warnings.append(f"left out of the patch, each larger than {MAX_FILE_BYTES} bytes: {shown}")
        return warnings, huge

    async def _one_by_one(self, names: bytes) -> list[str]:
        """For the case that git refuses one of them (unreadable, neither file nor link): all others are still taken. `names` as
        `_joined` makes them."""
        done = await self._run(_ONE_BY_ONE, env=self._own(), stdin=names)
        return [f"some files could not be read for the patch: {done.tail(300)}"] if not done.ok else []

    async def _names(self, *, modified: bool) -> set[str]:
        kinds = ["-o", "-m", "-d"] if modified else ["-o"]
        listed = await self._list(["ls-files", "-z", *kinds, "--exclude-standard"])
        names = await self._with_nested(listed)
        forced = await self.runtime.exec(
            ["git", "-c", "safe.directory=*", "-c", "core.fsmonitor=false", "ls-files", "-z", "-c", "-i", "--exclude-standard"],
            cwd=self.runtime.workdir,
            env=_ENVIRONMENT,
            timeout_s=_TIMEOUT_S,
            keep_bytes=_MAX_LIST_BYTES,
        )
        return names | (await asyncio.to_thread(_split, forced.stdout) if forced.ok and not forced.truncated else set())

    async def _with_nested(self, listed: set[str]) -> set[str]:
        """A repository inside the folder is listed as one name with a slash at its end; its files take its place."""
        names = {name for name in listed if not name.endswith("/")}
        waiting = [name for name in listed if name.endswith("/")]
        for _ in range(_MAX_NESTED):
            if not waiting:
                return names
            folder = waiting.pop()
            at = f"{self.runtime.workdir}/{folder}"
            env = {"GIT_DIR": self.git_dir, "GIT_WORK_TREE": at, "GIT_INDEX_FILE": f"{self.git_dir}/no-index"}
            inner = await self._list(["ls-files", "-z", "-o", "--exclude-standard"], env=env, cwd=at)
            for name in inner - {"./", ""}:
                (waiting.append if name.endswith("/") else names.add)(folder + name)
        raise _Failed(f"there are more than {_MAX_NESTED} repositories inside the work folder")

    async def _huge(self) -> set[str]:
        line = f"find . -name .git -prune -o -type f -size +{MAX_FILE_BYTES}c -print0"
        found = await self._run(line, env={}, keep_bytes=_MAX_LIST_BYTES)
        # folders that cannot be read make it fail; the rest counts
        return {name.removeprefix("./") for name in await asyncio.to_thread(_split, found.stdout)}

    async def _write_tree(self) -> str:
        tree = self._ok(await self._git(["write-tree"]), "git write-tree").text.strip()
        if not tree.isalnum():
            raise _Failed(f"git write-tree said {tree[:100]!r}")
        return tree

    async def _list(self, arguments: list[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None) -> set[str]:
        done = self._ok(await self._git(arguments, env=env, cwd=cwd, keep_bytes=_MAX_LIST_BYTES), f"git {arguments[0]}")
        if done.truncated:
            raise _Failed("there are too many files")
        return await asyncio.to_thread(_split, done.stdout)  # there may be millions, and others share the event loop

    async def _git(
        self,
        arguments: list[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        keep_bytes: int = 100_000,
    ) -> ExecResult:
        settings = [word for setting in _SETTINGS for word in ("-c", setting)]
        return await self.runtime.exec(
            ["git", *settings, *arguments],
            cwd=cwd or self.runtime.workdir,
            env={**_ENVIRONMENT, **(self._own() if env is None else env)},
            stdin=stdin,
            timeout_s=_TIMEOUT_S,
            keep_bytes=keep_bytes,
        )

    async def _run(self, line: str, *, env: Mapping[str, str], stdin: bytes | None = None, keep_bytes: int = 100_000) -> ExecResult:
        merged = {**_ENVIRONMENT, **env}
        return await self.runtime.exec(
            ["/bin/sh", "-c", line], cwd=self.runtime.workdir, env=merged, stdin=stdin, timeout_s=_TIMEOUT_S, keep_bytes=keep_bytes
        )

    def _own(self) -> dict[str, str]:
        return {"GIT_DIR": self.git_dir, "GIT_WORK_TREE": self.runtime.workdir}

    @staticmethod
    def _ok(done: ExecResult, what: str) -> ExecResult:
        if done.timed_out:
            raise _Failed(f"{what} took more than {_TIMEOUT_S:.0f} s")
        if not done.ok:
            raise _Failed(f"{what} failed ({done.exit_code}): {done.tail(300)}")
        return done


def _split(output: bytes) -> set[str]:
    return {name.decode("utf-8", "surrogateescape") for name in output.split(b"\0") if name}


def _joined(names: Iterable[str]) -> bytes:
    return b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in names)
