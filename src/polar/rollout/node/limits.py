"""Time: how long a part may take, and how long it took. Knows no part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from polar.errors import PolarError
from polar.rollout.models import Timing


class Late(Exception):
    """A part's budget was over; `error` says which."""

    def __init__(self, error: PolarError) -> None:
        super().__init__(str(error))
        self.error = error


@asynccontextmanager
async def within(budget_s: float, error: Callable[[], PolarError]) -> AsyncIterator[None]:
    """Cancels the block when the budget is over, and raises `Late`. A `TimeoutError` of the block's own goes through."""
    try:
        async with asyncio.timeout(budget_s) as budget:
            yield
    except TimeoutError as cause:
        if not budget.expired():
            raise
        raise Late(error()) from cause


@contextmanager
def timed(timing: Timing, name: str) -> Iterator[None]:
    """Notes in `timing.name` how long the block took, however it ended."""
    began = time.perf_counter()
    try:
        yield
    finally:
        setattr(timing, name, ms_since(began))


def ms_since(began: float) -> float:
    """`began` is of `time.perf_counter`."""
    return 1000 * (time.perf_counter() - began)
