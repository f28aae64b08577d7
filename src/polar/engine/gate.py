"""Which generations of an engine server run: held while it is paused, counted while they run, ended early when told so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MODES = ("abort", "wait", "keep")


class Gate:
    """`active`: generations that run. `aborts`: how often they were told to end; one that began at a lower count is to."""

    def __init__(self) -> None:
        self.active = 0
        self.aborts = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @asynccontextmanager
    async def passed(self) -> AsyncIterator[None]:
        """Waits while paused, then counts as running."""
        await self._open.wait()
        self.active += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def pause(self, mode: str) -> None:
        """Holds new ones; ends those that run with `abort`, waits for them with `wait`, lets them go on with `keep` (`MODES`)."""
        self._open.clear()
        self.aborts += mode == "abort"
        if mode != "keep":
            await self._idle.wait()

    def resume(self) -> None:
        self._open.set()
