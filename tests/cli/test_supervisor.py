"""Workers of `polar gateway --workers N`: one that cannot start is said at once, one that has served is always started again."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from polar.cli import supervisor
from polar.errors import ConfigError

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
