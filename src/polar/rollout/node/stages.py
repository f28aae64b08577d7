"""Stages: how many attempts may be where at once, and who is next. Knows no attempt's content.

A stage is a number of places. An attempt takes the next stage's place before it gives up its own, so a full stage holds back the one
before it, up to the intake, which then refuses dispatches (they wait at the service). Nothing is ever dropped.

    intake (queue) -> init (workers) -> ready (places) -> run (workers) -> post (queue, workers)
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from polar.rollout.config import NodeConfig
from polar.rollout.models import NodeMetrics


class Slots:
    """Places, given to the highest priority first, then in order of asking. A waiter that is cancelled never holds one."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a stage needs at least one place")
        self.capacity = capacity
        self.used = 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._asked = 0

    @property
    def waiting(self) -> int:
        return sum(not future.done() for _, _, future in self._waiting)

    @property
    def free(self) -> int:
        return max(0, self.capacity - self.used)

    async def take(self, priority: int = 0) -> None:
        """Waits for a place. To be paired with one `give_back`."""
        if self.used < self.capacity and not self.waiting:
            self.used += 1
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asked += 1
        heapq.heappush(self._waiting, (-priority, self._asked, future))
        try:
            await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():  # it was given one at the same moment
                self.give_back()
            else:
                future.cancel()
            raise

    def try_take(self) -> bool:
        """A place if one is free at once."""
        if self.used >= self.capacity or self.waiting:
            return False
        self.used += 1
        return True

    def give_back(self) -> None:
        """Frees a place; the next in line has it at once."""
        while self._waiting:
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                return
        self.used -= 1

    @asynccontextmanager
    async def held(self, priority: int = 0) -> AsyncIterator[None]:
        await self.take(priority)
        try:
            yield
        finally:
            self.give_back()


@dataclass(slots=True)
class Held:
    """The places that one attempt holds, so that whatever happens to it, all are given back once."""

    slots: list[Slots] = field(default_factory=list)

    async def move(self, into: Slots, priority: int) -> None:
        """Takes a place of the next stage, then gives up those held before."""
        await into.take(priority)
        before, self.slots = self.slots, [into]
        for one in before:
            one.give_back()

    def release(self) -> None:
        before, self.slots = self.slots, []
        for one in before:
            one.give_back()


class Stages:
    """A node's stages, as its configuration sizes them."""

    def __init__(self, config: NodeConfig) -> None:
        init, run, post = config.max_init_workers, config.max_run_workers, config.max_postrun_workers
        self.queue_limit = 2 * init if config.max_queue is None else config.max_queue
        ready = run if config.max_ready is None else config.max_ready
        self.init = Slots(init)
        self.ready = Slots(ready) if ready else None
        """`None`: a prepared sandbox keeps its init worker while it waits."""
        self.run = Slots(run)
        self.queued = Slots(2 * post)
        """Ended runs that wait for a post-run worker; when it is full, runs keep their worker."""
        self.post = Slots(post)
        self.warm = Slots(run + post)
        """Sandboxes of evaluators that are made while agents run."""

    def full(self, registered: int) -> bool:
        """Whether one more attempt would have nowhere to wait; `registered` are those accepted and not yet in init."""
        return registered >= self.queue_limit + self.init.free

    def metrics(self) -> NodeMetrics:
        return NodeMetrics(
            init_queue_depth=self.init.waiting,
            init_inflight=self.init.used,
            ready_depth=self.run.waiting,
            run_inflight=self.run.used,
            postrun_queue_depth=self.post.waiting,
            postrun_inflight=self.post.used,
        )
