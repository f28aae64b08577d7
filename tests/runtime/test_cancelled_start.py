"""A sandbox whose start is cancelled while its keeper is being made."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest

from polar.runtime import Owner, Place, RuntimeSpec, create, line
from polar.runtime.nursery import nursery


async def test_the_keeper_gets_its_own_descriptor_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor was closed under the thread that hands it over: by then its number may be that of any other file."""
    begun, go_on = threading.Event(), threading.Event()
    handed: list[bool] = []
    keepers: list[int] = []

    class Slow:
        def keeper(self, control: socket.socket, log: Path) -> tuple[int, int]:
            begun.set()
            go_on.wait(60)
            handed.append(control.fileno() >= 0)
            pid, process = nursery().keeper(control, log)
            keepers.append(pid)
            return pid, process

    monkeypatch.setattr(line, "nursery", Slow)
    owner = Owner.open(tmp_path / "owner")
    runtime = create(RuntimeSpec(backend="local", network="none"), Place("box", owner.id, owner.sandbox("box")))
    starting = asyncio.create_task(runtime.start())
    await asyncio.to_thread(begun.wait, 60)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    go_on.set()

    def gone() -> bool:
        return bool(keepers) and not Path(f"/proc/{keepers[0]}").exists()

    async with asyncio.timeout(60):
        while not await asyncio.to_thread(gone):  # noqa: ASYNC110 - another process sets no event
            await asyncio.sleep(0.02)
    assert handed == [True]
    await runtime.stop()
    owner.close()
