"""Many sessions that wait for one installation keep nothing else of the node waiting."""

from __future__ import annotations

import asyncio
import fcntl
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polar.harness.codex import Codex
from polar.harness.placement import Placement

NPM = """#!/bin/sh
while [ "$1" != "--prefix" ]; do shift; done
mkdir -p "$2/node_modules/thing/bin" && touch "$2/node_modules/thing/bin/run"
"""


class Thing(Codex):
    name, version, package, program_path = "thing", "1.0", "thing", "thing/bin/run"


async def test_an_installation_that_is_waited_for_takes_no_shared_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("node", "#!/bin/sh\necho v24.1.0\n"), ("npm", NPM)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path / "cache"))
    lock = tmp_path / "cache" / "harness" / "thing" / ".1.0.lock"
    lock.parent.mkdir(parents=True)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    placements = [Placement(Thing(), "mount") for _ in range(3)]
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as another process that is at it
        waiting = [asyncio.create_task(one.install(lambda line: None)) for one in placements]
        await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(lambda: "done") == "done"
        assert not any(task.done() for task in waiting)
    async with asyncio.timeout(60):
        await asyncio.gather(*waiting)
    assert [mount.target for one in placements for mount in one.mounts()] == ["/opt/polar/thing"] * 3
