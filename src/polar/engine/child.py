"""`polar engine` as a child process, for commands that bring their own model. Knows no gateway."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from polar.errors import EngineUnavailable
from polar.gateway.serve import bind

START_S = 180.0


@asynccontextmanager
async def running_engine(model: str, folder: Path) -> AsyncIterator[str]:
    """`polar engine MODEL` on a free port; yields its URL once it answers. Its output is in `folder/engine.log`.

    It ends with this process, even if that is killed, and not by a Ctrl-C, which a terminal sends to all: who uses it may have something to
    finish. Raises `EngineUnavailable` with the end of that log where it does not come up.
    """
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    sock.close()
    url = f"http://127.0.0.1:{port}"
    log = folder / "engine.log"
    command = [sys.executable, "-c", "from polar.cli import main; main()", "engine", model, "--port", str(port), "--child"]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT, start_new_session=True
        )
    try:
        if not await _answers(url, process):
            raise EngineUnavailable(f"polar engine {model} did not come up; {log} ends with:\n{await asyncio.to_thread(_tail, log)}")
        yield url
    finally:
        await _stop(process)


async def _answers(url: str, process: asyncio.subprocess.Process) -> bool:
    """Waits until the engine is healthy; false if it ended or took too long."""
    deadline = time.monotonic() + START_S
    async with aiohttp.ClientSession() as client:
        while time.monotonic() < deadline and process.returncode is None:
            try:
                async with client.get(f"{url}/health", timeout=aiohttp.ClientTimeout(total=2)) as answer:
                    if answer.status == 200:
                        return True
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.1)
    return False


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), 10)
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1000:]
