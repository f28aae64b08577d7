"""A sandbox whose start is cancelled while its keeper is being made."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from polar.runtime import Owner, Place, RuntimeSpec, create, line
from polar.runtime.bubblewrap import BubblewrapRuntime
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


async def test_the_internet_of_a_sandbox_whose_start_is_cancelled_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = await BubblewrapRuntime.unavailable()
    if why is not None or shutil.which("slirp4netns") is None:
        pytest.skip(why or "slirp4netns is not installed")
    begun, go_on = threading.Event(), threading.Event()
    connect = BubblewrapRuntime._connect
    made: list[subprocess.Popen[bytes]] = []

    def slow(self: BubblewrapRuntime, pid: int) -> subprocess.Popen[bytes]:
        made.append(connect(self, pid))
        begun.set()
        go_on.wait(60)
        return made[0]

    monkeypatch.setattr(BubblewrapRuntime, "_connect", slow)
    owner = Owner.open(tmp_path / "owner")
    spec = RuntimeSpec(backend="bubblewrap", network="bridge")
    runtime = create(spec, Place("box", owner.id, owner.sandbox("box"), ("127.0.0.1", 9)))
    starting = asyncio.create_task(runtime.start())
    await asyncio.to_thread(begun.wait, 60)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await runtime.stop()
    go_on.set()
    assert await asyncio.to_thread(made[0].wait, 60) == -9
    owner.close()
