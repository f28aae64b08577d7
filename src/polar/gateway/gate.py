"""Pause, drain or interrupt, resume: while weights change, no call is in the engine. Also where the policy version is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from polar.errors import EngineOverloaded

T = TypeVar("T")


class Gate:
    """Every engine call passes through `call()` or `through()`. `pause` closes the gate and waits until nobody is inside."""

    def __init__(self, *, max_wait_s: float = 600.0) -> None:
        self.policy_version: str | None = None
        """The trainer's counter as last told; an engine that reports its own wins over it."""
        self.inflight = 0
        self.waiting = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._max_wait_s = max_wait_s
        self._closing = False
        self._inside: set[asyncio.Task[Any]] = set()
        self._interrupted: set[asyncio.Task[Any]] = set()

    @property
    def paused(self) -> bool:
        return not self._open.is_set()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Waits while paused (the client gets pings meanwhile), then counts as in flight."""
        if self.paused:
            await self._opened()
        if self._closing:
            raise EngineOverloaded("the gateway is shutting down; try again", retry_after="5")
        self.inflight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.inflight -= 1
            if not self.inflight:
                self._idle.set()

    async def through(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The outcome of `work`, which runs inside; anew, from its beginning and after the pause, each time that it is interrupted.

        A caller that is cancelled when `work` has just come to its end gets the outcome: what was sampled is there, and has to be kept.
        """
        while True:
            async with self.call():
                task = asyncio.create_task(work())
                self._inside.add(task)
                try:
                    return await task
                except asyncio.CancelledError:
                    own = asyncio.current_task()
                    cancelled = own is not None and own.cancelling()
                    if own is not None and cancelled and task.done() and not task.cancelled():
                        own.uncancel()
                        return task.result()
                    if task not in self._interrupted or cancelled:
                        raise
                finally:
                    self._inside.discard(task)
                    self._interrupted.discard(task)

    def interrupt(self) -> int:
        """Cancels what is inside by `through`, whose callers wait for the gate to open and then begin again; how many there were."""
        chosen = {task for task in self._inside if not task.done()}
        self._interrupted |= chosen
        for task in chosen:
            task.cancel()
        return len(chosen)

    def interrupting(self) -> bool:
        """Whether the work that asks is being interrupted."""
        return asyncio.current_task() in self._interrupted

    async def _opened(self) -> None:
        self.waiting += 1
        try:
            async with asyncio.timeout(self._max_wait_s):
                while self.paused:  # again after each wake-up: it may have been paused anew in between
                    await self._open.wait()
        except TimeoutError:
            raise EngineOverloaded("the gateway has been paused for too long; resume it, then try again", retry_after="30") from None
        finally:
            self.waiting -= 1

    async def pause(self, timeout_s: float) -> bool:
        """Closes the gate; True once nothing is in flight, False if `timeout_s` ran out first (it stays closed)."""
        self._open.clear()
        return await self.drained(timeout_s)

    def resume(self) -> None:
        self._open.set()

    async def shut(self, timeout_s: float) -> bool:
        """For shutdown: refuses new and waiting calls, then waits for those in flight as `pause` does."""
        self._closing = True
        self._open.set()
        return await self.drained(timeout_s)

    async def drained(self, timeout_s: float) -> bool:
        """True once nothing is in flight, False if `timeout_s` ran out first."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:  # at once for a time of 0
            return not self.inflight
        return True
