"""A sandbox for these tests that really runs commands: the fake's files, this machine's programs. It isolates nothing."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from polar.runtime import ExecResult, Place, RuntimeSpec
from polar.runtime.base import OnOutput
from polar.testing.runtime import FakeRuntime

PATH = "/usr/local/bin:/usr/bin:/bin"


class RealCommands(FakeRuntime):
    """`FakeRuntime`, whose paths inside are those on this machine, and whose commands are processes."""

    backend = "real-commands"

    @property
    def workdir(self) -> str:
        return self.spec.workdir or str(self.place.folder / "inside" / "work")

    @property
    def home(self) -> str:
        return str(self.place.folder / "inside" / "home")

    def path(self, inside: str) -> Path:
        return Path(self.workdir) / inside

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
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        started = time.monotonic()
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                cwd=self.path(cwd or self.workdir),
                env={"PATH": PATH, **self.spec.env, **(env or {})},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except FileNotFoundError:
            return ExecResult(127, b"", f"{shlex.quote(words[0])}: not found".encode(), 0.0)
        except PermissionError:
            return ExecResult(126, b"", f"{words[0]}: permission denied".encode(), 0.0)
        kept = {"stdout": b"", "stderr": b""}

        async def read(name: str, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(65536):
                kept[name] = (kept[name] + data)[-keep_bytes:]
                if on_output is not None:
                    on_output("stdout" if name == "stdout" else "stderr", data)

        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        timed_out = False
        try:
            async with asyncio.timeout(timeout_s):
                readers = asyncio.gather(read("stdout", process.stdout), read("stderr", process.stderr))
                try:
                    process.stdin.write(stdin or b"")
                    await process.stdin.drain()
                    process.stdin.close()
                except (BrokenPipeError, ConnectionResetError):
                    pass  # it does not read
                await readers
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        code = 124 if timed_out else process.returncode or 0
        code = 128 - code if code < 0 else code
        return ExecResult(code, kept["stdout"], kept["stderr"], time.monotonic() - started, timed_out)


def sandbox(folder: Path, **spec: object) -> RealCommands:
    """One in `folder`, not started."""
    folder.mkdir(parents=True, exist_ok=True)
    return RealCommands(RuntimeSpec.model_validate({"backend": "fake", **spec}), Place("box", "owner", folder))
