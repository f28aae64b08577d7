"""Wakes the one coroutine that waits for several things at once, without a task for each of them. Knows none of them."""

from __future__ import annotations

import asyncio


class Bell:
    """Whatever has happened calls `ring`; a ring while nobody waits is not lost. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._rung = False

    def ring(self) -> None:
        self._rung = True
        self._wake()

    async def wait(self, timeout_s: float) -> bool:
        """True once it has rung since the last time, False if `timeout_s` is over first."""
        if not self._rung:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, self._wake)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        rung, self._rung = self._rung, False
        return rung

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
