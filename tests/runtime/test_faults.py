"""Sandboxes under seeded trouble: commands, copies, cancellations, killed keepers and stops at any moment. Nothing is left: no process, no
folder, no descriptor; and nothing is raised but what the interface says."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from sandboxes import Sandboxes

from polar.errors import SandboxError, UnsafePath
from polar.runtime import Runtime, processes
from polar.runtime.kept import Kept

EXPECTED = (SandboxError, UnsafePath, FileNotFoundError, asyncio.CancelledError)


def action(runtime: Runtime, chance: random.Random) -> Coroutine[Any, Any, object]:
    kind = chance.randrange(7)
    if kind == 0:
        return runtime.exec("sleep 5 & setsid sleep 6 & echo x", timeout_s=chance.choice([None, 0.01, 0.1]))
    if kind == 1:
        return runtime.exec("yes | head -c 3000000", timeout_s=chance.choice([None, 0.05]))
    if kind == 2:
        return runtime.write("f", os.urandom(chance.choice([10, 2_000_000])))
    if kind == 3:
        return runtime.read("f")
    if kind == 4:
        return runtime.end_processes()
    if kind == 5:
        return runtime.exec(["cat"], stdin=os.urandom(200_000))
    return runtime.exec("sleep 100")


async def life(sandboxes: Sandboxes, chance: random.Random) -> list[object]:
    """One sandbox with its troubles; gives how its actions ended."""
    runtime = await sandboxes.make()
    tasks = [asyncio.create_task(action(runtime, chance)) for _ in range(chance.randrange(1, 8))]
    await asyncio.sleep(chance.random() * 0.4)
    for task in tasks:
        if chance.random() < 0.5:
            task.cancel()
    if chance.random() < 0.3 and isinstance(runtime, Kept):
        os.kill(runtime.line.keeper_pid, 9)
    await asyncio.sleep(chance.random() * 0.2)
    await runtime.stop()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    sandboxes.owner.remove(runtime.place.id)
    return list(ended)


@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_is_left_after_any_trouble(sandboxes: Sandboxes, seed: int) -> None:
    if sandboxes.name not in ("local", "plain", "bubblewrap"):
        pytest.skip("another room's")
    await life(sandboxes, random.Random(seed))
    before = len(os.listdir("/proc/self/fd"))
    for group in range(3):
        lives = await asyncio.gather(*(life(sandboxes, random.Random(1000 * seed + 10 * group + number)) for number in range(4)))
        wrong = [one for ended in lives for one in ended if isinstance(one, BaseException) and not isinstance(one, EXPECTED)]
        assert wrong == []
    await asyncio.sleep(0.1)
    assert len(os.listdir("/proc/self/fd")) <= before
    assert processes.find(owner_prefix=sandboxes.owner.id) == []
    assert os.listdir(sandboxes.owner.folder) == ["alive.lock"]
