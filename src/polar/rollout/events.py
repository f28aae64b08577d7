"""The event stream: what `polar.rollout.database` numbered, to any number of listeners, each from where it left off."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import orjson
from sqlalchemy import Connection, func, select

from polar.chat import JsonObject
from polar.jsonline import one_line
from polar.rollout.database import Database, unpacked
from polar.rollout.tables import events

PAGE = 500
PING_S = 15.0


class Feed:
    """Wakes listeners when there is something new."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._listeners: set[asyncio.Event] = set()
        self._closed = False

    def wake(self) -> None:
        for listener in self._listeners:
            listener.set()

    def close(self) -> None:
        """Ends every listener's stream; each resumes elsewhere by its last id."""
        self._closed = True
        self.wake()

    async def wakes(self, ping_s: float = PING_S) -> AsyncIterator[bool]:
        """Yields at once, then True each time there is something new, False each `ping_s` without; ends when the service does."""
        news = asyncio.Event()
        self._listeners.add(news)
        try:
            fresh = True
            while not self._closed:
                yield fresh
                try:
                    await asyncio.wait_for(news.wait(), ping_s)
                    fresh = True
                except TimeoutError:
                    fresh = False
                news.clear()
        finally:
            self._listeners.discard(news)

    async def lines(self, after: int | None, task: str | None, session: str | None, ping_s: float = PING_S) -> AsyncIterator[bytes]:
        """Server-sent events after that number (`None`: from now on). A comment each `ping_s`; `event: gap` where what was asked for has
        been forgotten by retention, or is of another database, whose numbers this one has not come to: then all of its own follow."""
        first, last = await self._database.read(_bounds)
        if after is None:
            after = last
        elif after > last or after + 1 < first:
            yield b"event: gap\ndata: " + orjson.dumps({"first": first}) + b"\n\n"
            after = first - 1
        yield b": polar\n\n"
        position, said = after, time.monotonic()
        async for fresh in self.wakes(ping_s):
            while fresh:
                since = position
                rows, position = await self._database.read(lambda connection: page(connection, since, task, session))  # noqa: B023
                if rows:
                    said = time.monotonic()
                    yield b"".join(_frame(row) for row in rows)
                if position == since or self._closed:
                    break
            if not fresh or time.monotonic() - said >= ping_s:  # news of others only: this listener has heard nothing
                said = time.monotonic()
                yield b": ping\n\n"


def page(connection: Connection, after: int, task: str | None = None, session: str | None = None) -> tuple[list[JsonObject], int]:
    """Events after that number, and how far one has read."""
    last = connection.execute(select(func.max(events.c.seq))).scalar() or 0
    query = select(events).where(events.c.seq > after, events.c.seq <= last)
    if task is not None:
        query = query.where(events.c.task == task)
    if session is not None:
        query = query.where(events.c.session == session)
    rows = connection.execute(query.order_by(events.c.seq).limit(PAGE)).all()
    found: list[JsonObject] = [
        {
            "seq": row.seq,
            "time": row.time,
            "type": row.type,
            "task_id": row.task,
            "session_id": row.session,
            "data": orjson.loads(unpacked(row.data)),
        }
        for row in rows
    ]
    return found, int(rows[-1].seq) if len(rows) == PAGE else max(after, int(last))


def _bounds(connection: Connection) -> tuple[int, int]:
    first, last = connection.execute(select(func.min(events.c.seq), func.max(events.c.seq))).one()
    return int(first or 1), int(last or 0)


def _frame(event: JsonObject) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (event["seq"], event["type"].encode(), one_line(orjson.dumps(event)))
