"""Sandboxes that a keeper process of Polar's own holds: what `local` and `bubblewrap` have in common. Knows no namespace.

Files are copied by a process inside, with the rights that programs have there, so that no link or swapped folder makes the copy touch what
they could not touch themselves; what comes out is written by `polar.runtime.transfer`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import stat
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polar.errors import SandboxError, UnsafePath
from polar.keeper.commands import NOT_FOUND, REFUSED
from polar.runtime import processes, shell, transfer
from polar.runtime.base import OWNER_VARIABLE, SANDBOX_VARIABLE, ExecResult, OnOutput, Place, Runtime
from polar.runtime.line import Line, memory
from polar.runtime.nursery import PATH
from polar.runtime.output import Output, drained
from polar.runtime.owner import remove_tree
from polar.runtime.spec import RuntimeSpec

_STORAGE_LOOK_S = 2.0
_DEEPEST = 500
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Kept(Runtime):
    """A sandbox with a keeper. A backend says what it is made of: `configuration`, `environment`, `rights`."""

    def __init__(self, spec: RuntimeSpec, place: Place) -> None:
        super().__init__(spec, place)
        self._line: Line | None = None
        self._storage: asyncio.Task[None] | None = None
        self._full = False
        self._copies = 0
        """Under way."""
        self.pid: int | None = None
        """A process in the sandbox's namespaces, as this machine numbers it."""

    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """What the keeper makes; makes the folders that it names. Blocks."""

    @property
    def contained(self) -> bool:
        """Whether the kernel ends everything inside with the keeper: a process namespace of its own."""
        return True

    def environment(self) -> dict[str, str]:
        """What every command's environment begins with, before `spec.env`."""
        return {"PATH": PATH, "HOME": self.home, "LANG": "C.UTF-8", "TMPDIR": "/tmp", **self.marks()}

    def rights(self, user: str | None) -> dict[str, int]:
        """`uid` and `gid` for a command of that user; nothing for the sandbox's own."""
        return {}

    def marks(self) -> dict[str, str]:
        return {SANDBOX_VARIABLE: self.place.id, OWNER_VARIABLE: self.place.owner}

    @property
    def line(self) -> Line:
        """Raises `SandboxError` before `start` and after `stop`."""
        if self._line is None:
            raise SandboxError(f"the sandbox {self.place.id} is not running")
        return self._line

    async def start(self) -> None:
        try:
            config = await asyncio.to_thread(self.configuration)
        except OSError as error:
            raise SandboxError(f"the folders of the sandbox {self.place.id} could not be made: {error}") from error
        config["marks"] = self.marks()
        self._line, self.pid = await Line.open(self.place.id, config, self.place.folder / "keeper.log")
        if self.spec.storage_mb is not None:
            self._storage = asyncio.create_task(self._watch_storage(self.spec.storage_mb << 20))

    async def stop(self) -> None:
        if self._storage is not None:
            self._storage.cancel()
            self._storage = None
        crashed = False
        if self._line is not None:
            line, self._line = self._line, None
            crashed = line.broken
            await line.close()
        if self.contained and not crashed:
            return  # the keeper ends last; but where it was killed, the kernel may still be ending what was inside
        left = await asyncio.to_thread(processes.end, sandbox=self.place.id, folder=self.place.folder)
        if left:
            raise SandboxError(f"processes of the sandbox {self.place.id} do not end: {', '.join(map(str, left))}")

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        keep_bytes: int = 1_000_000,
        user: str | None = None,
    ) -> ExecResult:
        body = {
            "argv": shell.arguments(command),
            "cwd": self._inside(cwd or "."),
            "env": {**self.environment(), **self.spec.env, **(env or {})},
            **self.rights(user or self.spec.user),
        }
        out, err = Output("stdout", on_output, keep_bytes), Output("stderr", on_output, keep_bytes)
        source = memory(stdin) if stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        begun = time.monotonic()

        def sent() -> None:
            out.begin()
            err.begin()

        try:
            code, timed_out = await self.line.run(body, [source, out.writing, err.writing], timeout_s=timeout_s, sent=sent)
            await drained(out, err)
        finally:
            os.close(source)
            out.close()
            err.close()
        if self._full and code == 137:
            err.note(f"polar: the sandbox's {self.spec.storage_mb} MB are used up, its processes were ended\n".encode())
        return ExecResult(code, out.kept(), err.kept(), time.monotonic() - begun, timed_out, out.truncated or err.truncated)

    async def end_processes(self) -> None:
        await self.line.clear()

    async def upload(self, source: Path, target: str) -> None:
        reading, writing = os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        code, said = await self._copy("unpack", target, [reading, nowhere], lambda: _pack(source, writing), writing)
        if code:
            raise SandboxError(f"{source} could not be copied to {target}: {said or f'the copy ended with {code}'}")

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        reading, writing = os.pipe()
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        staged = self.place.folder / f"coming-{secrets.token_hex(4)}"
        try:
            code, said = await self._copy("pack", source, [nothing, writing], lambda: _extract(reading, staged, max_bytes), reading)
            if code == NOT_FOUND:
                raise FileNotFoundError(source)
            if code == REFUSED:
                raise UnsafePath(said)
            if code:
                raise SandboxError(f"{source} could not be copied out: {said or f'the copy ended with {code}'}")
            await asyncio.to_thread(_move, staged, target)
        finally:
            await asyncio.to_thread(remove_tree, staged)

    async def _copy(self, call: str, path: str, fds: list[int], work: Callable[[], None], end: int) -> tuple[int, str]:
        """Runs the half of a copy that is inside, with those standard streams, beside `work`, which owns the pipe's other `end`. Gives the
        inner half's exit code and words. What `work` itself refuses goes first; that its pipe broke means that the inner half failed."""
        errors = Output("stderr", None, 4000)
        open_here = [*fds]

        def handed_over() -> None:
            while open_here:
                os.close(open_here.pop())

        def sent() -> None:
            errors.begin()
            handed_over()

        async def inside(line: Line) -> tuple[int, bool]:
            try:
                return await line.run(body, [*fds, errors.writing], sent=sent)
            finally:
                handed_over()  # even if it was never sent: `work` must not wait for nobody

        body = {"call": call, "path": self._inside(path), "argv": [], "env": {}, "cwd": "/"}
        inner: asyncio.Task[tuple[int, bool]] | None = None
        self._copies += 1
        try:
            try:
                inner = asyncio.create_task(inside(self.line))
            except SandboxError:
                os.close(end)
                raise
            refused: UnsafePath | None = None
            try:
                await transfer.in_thread(work)
            except UnsafePath as error:
                refused = error
            except BrokenPipeError:
                pass  # the inner half says why
            code, _ = await inner
            await drained(errors)
            if refused is not None and code not in (NOT_FOUND, REFUSED):
                raise refused
            return code, errors.text()
        finally:
            self._copies -= 1
            if inner is not None and not inner.done():
                inner.cancel()
                with contextlib.suppress(asyncio.CancelledError, SandboxError):
                    await inner
            handed_over()
            errors.close()

    def _inside(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workdir}/{path}" if path not in ("", ".") else self.workdir

    async def _watch_storage(self, limit: int) -> None:
        pause_s = _STORAGE_LOOK_S
        while True:
            await asyncio.sleep(pause_s)
            begun = time.monotonic()
            self._full = await asyncio.to_thread(used, self.place.folder) > limit
            pause_s = max(_STORAGE_LOOK_S, 4 * (time.monotonic() - begun))  # many files take long to count
            if self._full and not self._copies:  # a copy is our own, and whether it is cut would be chance
                with contextlib.suppress(SandboxError):
                    await self.end_processes()


def _pack(source: Path, writing: int) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "wb") as stream:
        transfer.pack(source, stream)


def _extract(reading: int, target: Path, max_bytes: int) -> None:
    with os.fdopen(reading, "rb") as stream:
        transfer.extract(stream, target, max_bytes=max_bytes)


def _move(staged: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target} stands already")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(staged, target)


def used(folder: Path) -> int:
    """Bytes on disk of a folder whose programs run on. A file with several names counts once for each. Goes by descriptors, not by paths,
    which may be longer than the kernel takes; folders deeper than `_DEEPEST` are more than any limit, since they cannot be measured."""
    total = 0
    above: list[tuple[int, list[str]]] = []
    try:
        with contextlib.suppress(OSError):
            above.append((os.open(folder, _FOLDER), [""]))
            above[0][1][:] = os.listdir(above[0][0])
        while above:
            here, names = above[-1]
            if not names:
                os.close(above.pop()[0])
                continue
            name = names.pop()
            with contextlib.suppress(OSError):  # gone meanwhile
                info = os.lstat(name, dir_fd=here)
                total += info.st_blocks * 512
                if stat.S_ISDIR(info.st_mode):
                    if len(above) >= _DEEPEST:
                        return sys.maxsize
                    above.append((os.open(name, _FOLDER, dir_fd=here), []))
                    above[-1][1].extend(os.listdir(above[-1][0]))
    finally:
        for fd, _ in above:
            os.close(fd)
    return total
