"""The bell that wakes an answer's writer."""

import asyncio

from polar.gateway.bell import Bell


async def test_a_ring_while_nobody_waits_is_not_lost() -> None:
    bell = Bell()
    bell.ring()
    bell.ring()
    assert await bell.wait(10)
    assert not await bell.wait(0.01)


async def test_a_ring_wakes_who_waits() -> None:
    bell = Bell()
    asyncio.get_running_loop().call_later(0.01, bell.ring)
    assert await asyncio.wait_for(bell.wait(30), 5)


async def test_one_who_stops_waiting_leaves_no_timer_behind() -> None:
    bell = Bell()
    waiting = asyncio.create_task(bell.wait(0.02))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0.05)
    bell.ring()
    assert await bell.wait(10)
