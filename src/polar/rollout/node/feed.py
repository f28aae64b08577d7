"""What happens on a node, for those who watch it: one bounded queue a watcher; a slow one loses the oldest, never the node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

from polar.chat import JsonObject

KEPT = 1_000


class Feed:
    def __init__(self) -> None:
        self._watchers: set[asyncio.Queue[JsonObject]] = set()

    def publish(self, event: JsonObject) -> None:
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(event)

    @contextmanager
    def watched(self) -> Iterator[asyncio.Queue[JsonObject]]:
        queue: asyncio.Queue[JsonObject] = asyncio.Queue(KEPT)
        self._watchers.add(queue)
        try:
            yield queue
        finally:
            self._watchers.discard(queue)

    async def follow(self, ping_s: float) -> AsyncIterator[JsonObject | None]:
        """Events as they come; `None` where there was none for `ping_s`."""
        with self.watched() as queue:
            while True:
                try:
                    yield await asyncio.wait_for(queue.get(), ping_s)
                except TimeoutError:
                    yield None
