"""Fairness on the event loop: long steps of many calls that arrive at once are taken one a cycle, so that a short call in between waits
for one of them at a time, not for all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

LONG = 48_000
"""Bytes of a body, or characters of a conversation, from which a step on it takes about a millisecond."""


class Turnstile:
    """`async with turnstile.step(size):` around a step that does not wait. Short ones pass at once."""

    def __init__(self) -> None:
        self._one = asyncio.Semaphore(1)

    @asynccontextmanager
    async def step(self, size: int) -> AsyncIterator[None]:
        if size < LONG:
            yield
            return
        async with self._one:
            yield
            await asyncio.sleep(0)
