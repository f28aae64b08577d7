"""Callbacks: results brought to the URL that the task named, at least once, until it takes them or `callback_retry` gives up.

Each is a row written in the transaction that ended what it tells, so a crash between the two is impossible. `delivery_id` (in the body and
as `X-Polar-Delivery`) is the same for every try. A 2xx answer takes it; anything else, silence too, is tried again. A repetition says the
same, but that `result_paths` may be there by then: files that a full disk refused are written later, and hold no callback up.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from sqlalchemy import Connection, Row, func, select, update

from polar.rollout.config import Retry
from polar.rollout.database import Database, Transaction, unpacked
from polar.rollout.reading import task_body
from polar.rollout.tables import deliveries, results, tasks

log = logging.getLogger("polar.rollout")

ANSWER_S = 30.0
AT_ONCE = 16
PER_HOST = 8
LOOKED_AT = 512
"""Due deliveries that are looked at for those with room at their receivers."""


class Callbacks:
    """The deliveries in motion. `ready(task)` is awaited before a task's result goes out: its files are to be there."""

    def __init__(self, database: Database, retry: Retry, ready: Callable[[int], Awaitable[None]]) -> None:
        self.wake = asyncio.Event()
        self._database = database
        self._retry = retry
        self._ready = ready
        self._busy: dict[str, str] = {}
        """Under way: the host of each."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Delivers until it is cancelled."""
        connector = aiohttp.TCPConnector(limit=AT_ONCE, limit_per_host=PER_HOST)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S), connector=connector) as self._http:
            try:
                while True:
                    self.wake.clear()
                    now = self._database.clock()
                    await self._begin(now)
                    upcoming = await self._database.read(lambda connection: _next(connection, now))  # noqa: B023
                    wait_s = None if upcoming is None else max(0.05, upcoming - self._database.clock())
                    try:
                        await asyncio.wait_for(self.wake.wait(), wait_s)
                    except TimeoutError:
                        pass
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _begin(self, now: float) -> None:
        """Starts what is due, as far as there is room: at most `PER_HOST` to one receiver, so that a silent one holds up no other."""
        room = AT_ONCE - len(self._busy)
        if room <= 0:
            return
        busy = dict(self._busy)
        for row in await self._database.read(lambda connection: _due(connection, room, now, busy)):
            self._busy[row.id] = _host(row.url)
            task = asyncio.create_task(self._deliver(row))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a callback failed inside the service; it is tried again", exc_info=error)

    async def _deliver(self, row: Row[Any]) -> None:
        try:
            if row.session is None:
                await self._ready(row.task)
            body = await self._database.read(lambda connection: _body(connection, row))
            why = "what it was about is gone" if body is None else await self._post(row, body)
            await self._database.write(lambda tx: _noted(tx, row, why, self._retry))
        except Exception:
            await asyncio.sleep(1.0)  # the database is in trouble: not at once again
            raise
        finally:
            self._busy.pop(row.id, None)

    async def _post(self, row: Row[Any], body: bytes) -> str | None:
        """Why it was not taken, if it was not."""
        assert self._http is not None
        headers = {
            "content-type": "application/json",
            "x-polar-delivery": row.id,
            "x-polar-event": "session.finished" if row.session else "task.finished",
        }
        try:
            async with self._http.post(row.url, data=body, headers=headers, allow_redirects=False) as answer:
                if 200 <= answer.status < 300:
                    return None
                if "location" in answer.headers:  # followed, the POST would become a GET without a body, and its 200 no receipt
                    return f"{answer.status}: it redirects to {answer.headers['location'][:300]}; name that URL in the task"
                return f"{answer.status}: {(await answer.content.read(300)).decode('utf-8', 'replace')}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return str(error) or type(error).__name__


def _due(connection: Connection, room: int, now: float, busy: Mapping[str, str]) -> list[Row[Any]]:
    """What to begin with: `room` at most, and no more to one host than `PER_HOST` with what is `busy` (host by delivery)."""
    place = func.row_number().over(partition_by=deliveries.c.url, order_by=deliveries.c.next_try).label("place")
    due = select(deliveries, place).where(deliveries.c.state == "due", deliveries.c.next_try <= now)
    if busy:
        due = due.where(deliveries.c.id.not_in(sorted(busy)))
    first = due.subquery()
    hosts = Counter(busy.values())
    chosen: list[Row[Any]] = []
    for row in connection.execute(select(first).where(first.c.place <= PER_HOST).order_by(first.c.next_try).limit(LOOKED_AT)):
        host = _host(row.url)
        if hosts[host] < PER_HOST and len(chosen) < room:
            hosts[host] += 1
            chosen.append(row)
    return chosen


def _next(connection: Connection, now: float) -> float | None:
    """When the next one becomes due. What is due at `now` is under way, or waits for one that is, whose end wakes the loop."""
    query = select(func.min(deliveries.c.next_try)).where(deliveries.c.state == "due", deliveries.c.next_try > now)
    found: float | None = connection.execute(query).scalar()
    return found


def _host(url: str) -> str:
    try:
        return urlsplit(url).netloc
    except ValueError:  # one that an earlier version let in: posting to it says what is wrong
        return url


def _body(connection: Connection, row: Row[Any]) -> bytes | None:
    if row.session is not None:
        packed = connection.execute(select(results.c.body).where(results.c.session == row.session)).scalar()
        return None if packed is None else unpacked(packed)
    task = connection.execute(select(tasks).where(tasks.c.id == row.task)).first()
    return None if task is None else task_body(connection, task, delivery_id=row.id)


def _noted(tx: Transaction, row: Row[Any], why: str | None, retry: Retry) -> None:
    here = update(deliveries).where(deliveries.c.id == row.id)
    if why is None:
        tx.connection.execute(here.values(state="done", tries=row.tries + 1, error=None))
        return
    wait_s = min(retry.longest_seconds, retry.first_seconds * 2 ** min(row.tries, 30)) * random.uniform(0.5, 1.0)
    over = tx.now + wait_s > row.created + retry.give_up_seconds
    state = "given_up" if over else "due"
    tx.connection.execute(here.values(state=state, tries=row.tries + 1, next_try=tx.now + wait_s, error=why.encode("utf-8", "replace")))
    if over or row.tries == 0:
        name = tx.connection.execute(select(tasks.c.name).where(tasks.c.id == row.task)).scalar()
        tx.emit("callback.failed", name, row.session, delivery_id=row.id, url=row.url, error=why, tries=row.tries + 1, given_up=over)


def redeliver(tx: Transaction, name: str) -> int:
    """Callbacks of a task that were given up are due again. Returns how many."""
    own = select(tasks.c.id).where(tasks.c.name == name).scalar_subquery()
    again = update(deliveries).where(deliveries.c.task.in_(own), deliveries.c.state == "given_up")
    tx.wake.add("deliver")
    return tx.connection.execute(again.values(state="due", next_try=tx.now, created=tx.now)).rowcount
