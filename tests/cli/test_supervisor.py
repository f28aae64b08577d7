"""Workers of `polar gateway --workers N`: one that cannot start is said at once, one that has served is always started again."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from polar.cli import supervisor
from polar.errors import ConfigError
from polar.gateway.config import GatewayConfig

RUNS = """
import sys, time
from pathlib import Path
runs = Path(sys.argv[1])
made = len(runs.read_text()) if runs.exists() else 0
runs.write_text("x" * (made + 1))
time.sleep(0 if made < 3 else 600)
"""


def command(folder: Path) -> list[str]:
    """A worker whose first three runs end at once."""
    return [sys.executable, "-c", RUNS, str(folder / "runs")]


async def test_a_worker_that_cannot_start_is_a_wrong_setting(tmp_path: Path) -> None:
    told: list[str] = []
    with pytest.raises(ConfigError, match="worker 1 ended with code 0 as soon as it started"):
        await supervisor._keep(1, command(tmp_path), dict(os.environ), asyncio.Event(), asyncio.Event(), told.append)
    assert told == []


async def test_a_worker_that_has_served_is_started_again_however_often_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_S", 0.01)
    up, stop = asyncio.Event(), asyncio.Event()
    up.set()
    told: list[str] = []
    keeping = asyncio.create_task(supervisor._keep(1, command(tmp_path), dict(os.environ), up, stop, told.append))
    try:
        async with asyncio.timeout(60):
            while not (tmp_path / "runs").exists() or len((tmp_path / "runs").read_text()) < 4:
                assert not keeping.done()
                await asyncio.sleep(0.02)
    finally:
        stop.set()
        await keeping
    assert told == ["worker 1 ended with code 0; starting it again"] * 3


async def test_a_worker_that_the_machine_cannot_start_now_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_S", 0.01)
    real, refused = asyncio.create_subprocess_exec, 0

    async def fork(*command: str, **options: Any) -> asyncio.subprocess.Process:
        nonlocal refused
        refused += 1
        if refused <= 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return await real(*command, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fork)
    up, stop = asyncio.Event(), asyncio.Event()
    with pytest.raises(ConfigError, match=r"worker 1 could not be started \(Resource"):
        await supervisor._keep(1, command(tmp_path), dict(os.environ), up, stop, lambda line: None)
    up.set()
    keeping = asyncio.create_task(supervisor._keep(1, command(tmp_path), dict(os.environ), up, stop, lambda line: None))
    try:
        async with asyncio.timeout(60):
            while not (tmp_path / "runs").exists():
                assert not keeping.done()
                await asyncio.sleep(0.02)
    finally:
        stop.set()
        await keeping


async def test_a_worker_that_ends_while_others_still_come_up_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It had answered, so that nobody looks at it again before all are up."""
    config = GatewayConfig.model_validate(
        {"port": 0, "workers": 2, "engine_wait_s": 0, "engines": {"default": {"urls": ["http://127.0.0.1:9"]}}}
    )
    ups: list[asyncio.Event] = []
    seen: list[bool] = []

    async def keep(index: int, command: list[str], environment: object, up: asyncio.Event, stop: asyncio.Event, progress: object) -> None:
        ups.append(up)
        await stop.wait()

    async def until_ready(index: int, admin: object, keeper: object) -> None:
        await asyncio.sleep(0)
        seen.append(ups[0].is_set())

    async def ready(admin: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(supervisor, "_keep", keep)
    monkeypatch.setattr(supervisor, "_until_ready", until_ready)
    async with asyncio.timeout(60):
        await supervisor.supervise(config, ready, lambda line: None)
    assert seen == [False, True]
