"""A program of this machine that stands for a command elsewhere: run, followed, ended. Knows no sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

from polar.errors import SandboxError
from polar.runtime.base import Stream
from polar.runtime.tail import Tail

DRAIN_S = 0.3
"""How long output is still read after the program's end where something that it left behind holds its stdout."""


async def run(
    argv: Sequence[str], *, env: Mapping[str, str], tail: Tail, stdin: bytes | None = None, timeout_s: float | None = None
) -> int | None:
    """Its exit code (128 + n for a signal n), `None` when its time ran out. It is no more running when this returns or is cancelled;
    what it started elsewhere may be. Raises `SandboxError` where it cannot be run."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env=dict(env),
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{argv[0]} cannot be run: {error}") from error
    assert process.stdout is not None
    assert process.stderr is not None
    reading = [
        asyncio.ensure_future(_read(process.stdout, "stdout", tail)),
        asyncio.ensure_future(_read(process.stderr, "stderr", tail)),
    ]
    feeding = asyncio.ensure_future(_feed(process, stdin or b""))
    try:
        async with asyncio.timeout(timeout_s) as limit:
            code = await process.wait()
        done, _ = await asyncio.wait(reading, timeout=DRAIN_S)
        for one in done:
            one.result()
    except TimeoutError:
        if not limit.expired():
            raise
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for task in (feeding, *reading):
            task.cancel()
        await asyncio.shield(process.wait())
    return code if code >= 0 else 128 - code


async def _read(reader: asyncio.StreamReader, stream: Stream, tail: Tail) -> None:
    while data := await reader.read(1 << 16):
        tail.add(stream, data)


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    if process.stdin is None:
        return
    with contextlib.suppress(ConnectionError):  # it may end without reading all of it
        process.stdin.write(stdin)
        await process.stdin.drain()
        process.stdin.close()
