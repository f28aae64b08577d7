"""Long steps one a cycle of the event loop, in order; nobody is forgotten."""

import asyncio
import random

from polar.gateway.turnstile import LONG, Turnstile


async def test_short_steps_and_a_lone_long_one_pass_at_once() -> None:
    turnstile = Turnstile()
    for size in (0, LONG - 1, LONG):
        step = turnstile.step(size)
        try:
            step.send(None)
        except StopIteration:
            continue
        raise AssertionError(f"a step of {size} had to wait")


async def test_long_steps_are_taken_one_a_cycle_in_their_order() -> None:
    turnstile = Turnstile()
    cycle = 0
    taken: list[tuple[int, int]] = []

    async def call(number: int) -> None:
        await turnstile.step(LONG)
        taken.append((cycle, number))

    calls = [asyncio.create_task(call(number)) for number in range(10)]
    while not all(task.done() for task in calls):
        cycle += 1
        await asyncio.sleep(0)
    assert [number for _, number in taken] == list(range(10))
    assert len({at for at, _ in taken}) == 10


async def test_a_short_step_does_not_wait_for_long_ones() -> None:
    turnstile = Turnstile()
    long = [asyncio.create_task(turnstile.step(LONG)) for _ in range(10)]
    await asyncio.sleep(0)
    await turnstile.step(1)
    assert sum(task.done() for task in long) <= 2
    await asyncio.gather(*long)


async def test_callers_that_are_cancelled_hold_up_nobody() -> None:
    dice = random.Random(5)
    for _ in range(200):
        turnstile = Turnstile()
        calls = [asyncio.create_task(turnstile.step(LONG)) for _ in range(8)]
        for _ in range(dice.randint(0, 6)):
            await asyncio.sleep(0)
            dice.choice(calls).cancel()
        await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await asyncio.wait_for(turnstile.step(LONG), 5)
