"""A node's process, kept running by the service that it belongs to."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from polar.rollout import stack
from polar.rollout.stack import Child


async def test_a_node_that_the_machine_cannot_start_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "FIRST_RESTART_S", 0.01)
    said: list[str] = []
    child = Child("node-1", tmp_path / "settings", tmp_path / "log", said.append)
    child._command = [sys.executable, "-c", "import time; time.sleep(600)"]
    start, tries = asyncio.create_subprocess_exec, 0

    async def starts(*command: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await start(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", starts)
    child.start()
    try:
        async with asyncio.timeout(60):
            while child.pid is None:  # noqa: ASYNC110 - it sets no event
                await asyncio.sleep(0.01)
    finally:
        await child.stop()
    assert tries == 2
    assert said == [f"node node-1 could not be started (Resource temporarily unavailable); it is started again, see {tmp_path / 'log'}"]
