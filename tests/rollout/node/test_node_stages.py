"""Places: never more holders than places, the highest priority first, and nothing is lost with a waiter that leaves."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.rollout.config import NodeConfig
from polar.rollout.node.stages import Held, Slots, Stages


async def test_waiters_go_by_priority_then_in_order() -> None:
    slots = Slots(1)
    await slots.take()
    order: list[str] = []

    async def worker(name: str, priority: int) -> None:
        async with slots.held(priority):
            order.append(name)

    tasks = [asyncio.create_task(worker(name, priority)) for name, priority in [("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)]]
    await asyncio.sleep(0)
    slots.give_back()
    await asyncio.gather(*tasks)
    assert order == ["b", "d", "a", "c", "e"]
    assert slots.used == 0


async def test_an_attempt_keeps_its_place_until_the_next_stage_has_one() -> None:
    first, second = Slots(1), Slots(1)
    await second.take()
    held = Held()
    await held.move(first, 0)
    moving = asyncio.create_task(held.move(second, 0))
    await asyncio.sleep(0)
    assert (first.used, second.waiting) == (1, 1)
    second.give_back()
    await moving
    assert (first.used, second.used) == (0, 1)
    held.release()
    held.release()
    assert second.used == 0


def test_a_stage_without_places_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one place"):
        Slots(0)


def test_the_intake_is_bounded() -> None:
    stages = Stages(NodeConfig(id="n", max_init_workers=2, max_queue=3))
    assert [stages.full(waiting) for waiting in (0, 4, 5)] == [False, False, True]


@given(
    capacity=st.integers(1, 3),
    moves=st.lists(st.tuples(st.sampled_from(["come", "leave", "quit"]), st.integers(-2, 2), st.integers(0, 30)), max_size=60),
)
def test_places_are_conserved(capacity: int, moves: list[tuple[str, int, int]]) -> None:
    async def play() -> None:
        slots = Slots(capacity)
        waiting: list[asyncio.Task[None]] = []
        holding: list[asyncio.Task[None]] = []
        for move, priority, which in moves:
            if move == "come":
                waiting.append(asyncio.create_task(slots.take(priority)))
            elif move == "leave" and holding:
                holding.pop(which % len(holding))
                slots.give_back()
            elif move == "quit" and waiting:
                waiting.pop(which % len(waiting)).cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            holding += [task for task in waiting if task.done() and not task.cancelled()]
            waiting = [task for task in waiting if not task.done()]
            assert len(holding) == slots.used <= capacity
            assert slots.waiting == len(waiting)
            assert not waiting or slots.used == capacity
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(play())
