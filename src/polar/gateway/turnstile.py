"""Fairness on the event loop: long steps of many calls that arrive at once are taken one a cycle, so that a short call in between waits
for one of them at a time, not for all."""

from __future__ import annotations

import asyncio
from collections import deque

LONG = 48_000
"""Bytes of a body, or characters of a conversation, from which a step on it takes about a millisecond."""


class Turnstile:
    """`await turnstile.step(size)` before a step that does not wait. Short steps, and a long one that has the cycle for itself, pass at
    once; the others wait in the order of their arrival. Belongs to one event loop."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def step(self, size: int) -> None:
        if size < LONG:
            return
        loop = asyncio.get_running_loop()
        if self._taken:
            turn = loop.create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was its turn: the next one's, then
                    self._next()
                raise
        self._taken = True
        loop.call_soon(self._next)

    def _next(self) -> None:
        """One cycle later: the place goes to the next who waits, or is free."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._taken = False
