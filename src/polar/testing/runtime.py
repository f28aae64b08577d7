"""A sandbox for tests: files are real, in a folder; commands are what a script says; start, stop and the rest fail when told to.

Importing this module registers it as backend `fake`. What a command does comes from `FakeRuntime.script` (set it on the class, or on a
subclass with another `backend`); failures from the spec, so that a task's JSON can plant them: `kwargs={"fail": {"start": "no room"}}`.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import ClassVar

from polar.errors import SandboxError, UnsafePath
from polar.runtime.base import ExecResult, OnOutput, Place, Runtime, register
from polar.runtime.spec import RuntimeSpec


@dataclass(frozen=True, slots=True)
class Command:
    """A command that a test's script answers. `runtime.path(...)` gives the files around it."""

    runtime: FakeRuntime
    command: str | Sequence[str]
    cwd: str
    env: Mapping[str, str]
    stdin: bytes | None
    timeout_s: float | None
    user: str | None

    @property
    def line(self) -> str:
        """The command as one line, for matching."""
        return self.command if isinstance(self.command, str) else " ".join(self.command)


@dataclass(frozen=True, slots=True)
class Answer:
    """How a scripted command ends."""

    exit_code: int = 0
    stdout: bytes = b""
    stderr: bytes = b""


Script = Callable[[Command], "Answer | int | Awaitable[Answer | int]"]
"""Gives the answer, or an exit code, at once or awaited (so it may sleep, and be cut off by the command's timeout)."""


def succeed(command: Command) -> Answer:
    """The script that every command starts with: exit code 0, no output."""
    return Answer()


@dataclass
class Counts:
    """How often each thing was done, for assertions."""

    started: int = 0
    stopped: int = 0
    ended: int = 0
    commands: list[Command] = field(default_factory=list)


@register
class FakeRuntime(Runtime):
    """Paths inside map to `place.folder/inside/...`; `place.folder/running` exists from start to stop."""

    backend = "fake"
    script: ClassVar[Script] = staticmethod(succeed)

    def __init__(self, spec: RuntimeSpec, place: Place) -> None:
        super().__init__(spec, place)
        self.counts = Counts()

    @classmethod
    async def unavailable(cls) -> str | None:
        return None

    @property
    def workdir(self) -> str:
        return self.spec.workdir or "/workspace"

    @property
    def home(self) -> str:
        return "/home/agent"

    @property
    def gateway_url(self) -> str:
        host, port = self.place.gateway or ("127.0.0.1", 1)
        return f"http://{host}:{port}"

    @property
    def running(self) -> bool:
        return (self.place.folder / "running").exists()

    def path(self, inside: str) -> Path:
        """Where a path inside lies on this machine. Raises `UnsafePath` where `..` would leave the sandbox."""
        pure = PurePosixPath(self.workdir) / inside
        if ".." in pure.parts:
            raise UnsafePath(f"the path {inside!r} has a '..'")
        return self.place.folder / "inside" / pure.relative_to("/")

    async def start(self) -> None:
        self._may("start")
        for folder in (self.workdir, self.home):
            self.path(folder).mkdir(parents=True, exist_ok=True)
        (self.place.folder / "running").touch()
        self.counts.started += 1

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
        self._may("exec")
        if not self.running:
            raise SandboxError(f"the sandbox {self.place.id} is not running")
        asked = Command(self, command, cwd or self.workdir, {**self.spec.env, **(env or {})}, stdin, timeout_s, user)
        self.counts.commands.append(asked)
        begun = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                said = type(self).script(asked)
                answer = await said if inspect.isawaitable(said) else said
        except TimeoutError:
            return ExecResult(124, b"", b"", time.monotonic() - begun, timed_out=True)
        answer = Answer(answer) if isinstance(answer, int) else answer
        if on_output is not None:
            for stream, data in (("stdout", answer.stdout), ("stderr", answer.stderr)):
                if data:
                    on_output("stdout" if stream == "stdout" else "stderr", data)
        truncated = max(len(answer.stdout), len(answer.stderr)) > keep_bytes
        out, err = (data[-keep_bytes:] if keep_bytes else b"" for data in (answer.stdout, answer.stderr))
        return ExecResult(answer.exit_code, out, err, time.monotonic() - begun, truncated=truncated)

    async def upload(self, source: Path, target: str) -> None:
        self._may("upload")
        self._copy_in(source, self.path(target))

    def _copy_in(self, source: Path, to: Path) -> None:
        to.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, to, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy2(source, to)

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        self._may("download")
        at = self.path(source)
        if at.is_symlink():
            raise UnsafePath(f"{source} is a link")
        if not at.exists():
            raise FileNotFoundError(source)
        files = [at] if at.is_file() else [one for one in at.rglob("*") if one.is_file() and not one.is_symlink()]
        if sum(one.stat().st_size for one in files) > max_bytes:
            raise UnsafePath(f"{source} is larger than {max_bytes} bytes")
        target.parent.mkdir(parents=True, exist_ok=True)
        if at.is_dir():
            shutil.copytree(at, target, symlinks=True)
        else:
            shutil.copy2(at, target)

    async def end_processes(self) -> None:
        self.counts.ended += 1

    async def stop(self) -> None:
        self.counts.stopped += 1
        (self.place.folder / "running").unlink(missing_ok=True)
        self._may("stop")
        shutil.rmtree(self.place.folder / "inside", ignore_errors=True)

    def _may(self, action: str) -> None:
        """Raises the failure that the spec plants for this action."""
        planted = self.spec.kwargs.get("fail", {})
        if action in planted:
            raise SandboxError(f"planted: {planted[action]}")
