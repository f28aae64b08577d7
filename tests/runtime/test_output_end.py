"""What is read of a command's output after its end."""

from __future__ import annotations

import asyncio
import os

from polar.runtime.output import Output, drained


async def test_output_that_another_process_reads_away_is_not_waited_for() -> None:
    """`cat /dev/stdout &` takes some of what its own shell wrote, and holds the pipe open."""
    out = Output("stdout", None, 1000)
    left = os.dup(out.writing)
    thief = os.open(f"/proc/self/fd/{left}", os.O_RDONLY)
    try:
        out.begin()
        os.write(left, b"x" * 1000)
        draining = asyncio.create_task(drained(out))
        asyncio.get_running_loop().call_soon(os.read, thief, 1000)  # after the task has begun, before the loop reads
        async with asyncio.timeout(60):
            await draining
        assert out.total == 0
    finally:
        out.close()
        os.close(left)
        os.close(thief)
