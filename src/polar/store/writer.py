"""Group commit: one thread that turns concurrent writes into few transactions. Knows no table.

Works are taken in the order of their submission. Everything that waits when the thread becomes free goes into one transaction, so the
more writers there are, the fewer syncs each of them costs; a lone writer never waits for company. A work's future resolves after
the commit has returned, that is after the sync (law 4). Heavy works (first turns with long prompts) let lighter ones go first and are
committed a few at a time, so that nobody's small write waits for the packing of many.

When the database itself fails (full, locked for longer than its busy time, unreachable), every work of the batch fails with
`StoreError`, `trouble` says why, and the connection is made anew. While there is trouble the thread tries a small write once a second, so
the store recovers by itself. When one work is at fault (a duplicate), the others of its batch are written without it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError

from polar.errors import StoreError

T = TypeVar("T")

BATCH = 256
"""Works in one transaction at most."""
PROBE_S = 1.0
"""Between two tries of a store in trouble."""
HEAVY_BATCH = 2
"""Heavy works in one transaction at most."""
LINGER_S = 1.0
"""For how long writes that nobody waits for are gathered."""


class Work(ABC):
    """Something to write. `heavy` works take milliseconds to pack."""

    heavy = False

    @abstractmethod
    def write(self, connection: Connection) -> Any:
        """Writes, inside the batch's transaction; the result resolves the future. May be called again in a later transaction."""

    def committed(self) -> None:  # noqa: B027
        """Called on the writer's thread when the transaction is on disk, before the future resolves. Must not raise."""

    def failed(self) -> None:  # noqa: B027
        """Called on the writer's thread when the work has been given up. Must not raise."""


class Job:
    """A work with the future that waits for it, on the future's own event loop."""

    __slots__ = ("future", "loop", "work")

    def __init__(self, work: Work, future: asyncio.Future[Any] | None) -> None:
        self.work = work
        self.future = future
        self.loop = None if future is None else future.get_loop()


class Writer:
    """`prepare(connection, works)` runs first in each transaction, for what a batch's works want done together."""

    def __init__(
        self,
        engine: Engine,
        prepare: Callable[[Connection, Sequence[Work]], None],
        probe: Callable[[Connection], None],
    ) -> None:
        self.trouble: str | None = None
        self._engine = engine
        self._prepare = prepare
        self._probe = probe
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._posted: deque[Job] = deque()
        self._posted_since = 0.0
        self._submitting = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="polar-store", daemon=True)
        self._thread.start()

    async def submit(self, work: Work) -> Any:
        """Waits until `work` is on disk; returns what its `write` returned. Cancelling the caller does not undo the write."""
        future = asyncio.get_running_loop().create_future()
        self._put(Job(work, future))
        return await future

    def post(self, work: Work) -> None:
        """Writes `work` in good time; nobody waits, a failure is only seen in `trouble`. A store that is closed gives it up.

        The thread is not woken: it looks for such works whenever it is awake, which is at least once in `LINGER_S`.
        """
        with self._submitting:
            if not self._closed:
                if not self._posted:
                    self._posted_since = time.monotonic()
                self._posted.append(Job(work, None))
                return
        work.failed()

    def close(self) -> None:
        """Writes what was submitted, then ends the thread. Blocks; a second call returns at once."""
        with self._submitting:
            if not self._closed:
                self._closed = True
                self._queue.put(None)
        self._thread.join()

    def _put(self, job: Job) -> None:
        with self._submitting:
            if self._closed:
                raise StoreError("the store is closed")
            self._queue.put(job)

    # --- on the writer's own thread ---

    def _run(self) -> None:
        more = True
        heavy: deque[Job] = deque()
        while more or heavy:
            jobs, more = self._take(wait=not heavy) if more else ([], False)
            heavy.extend(job for job in jobs if job.work.heavy)
            light = [job for job in jobs if not job.work.heavy]
            if light:
                self._write(light)
            if heavy:
                self._write([heavy.popleft() for _ in range(min(HEAVY_BATCH, len(heavy)))])
            elif not light and more:
                self._try_again()

    def _take(self, *, wait: bool) -> tuple[list[Job], bool]:
        """The next batch, and whether there will be another. Empty, after waiting: a store in trouble is due for a try."""
        jobs: list[Job] = []
        due = time.monotonic() + PROBE_S
        while not jobs:
            try:
                job = self._queue.get(timeout=LINGER_S if wait else 0.0)
                while job is not None:
                    jobs.append(job)
                    if len(jobs) == BATCH:
                        break
                    job = self._queue.get_nowait()
                else:  # closing: what was gathered goes along
                    return [*jobs, *self._gathered()], False
            except queue.Empty:
                pass
            now = time.monotonic()
            if self._posted and now - self._posted_since >= LINGER_S:
                jobs += self._gathered()
            if not wait or (self.trouble and now >= due):
                break
        return jobs, True

    def _gathered(self) -> list[Job]:
        """The works that nobody waits for."""
        with self._submitting:
            jobs = list(self._posted)
            self._posted.clear()
        return jobs

    def _write(self, jobs: list[Job]) -> None:
        works = [job.work for job in jobs]
        try:
            results = self._transact(lambda connection: self._write_all(connection, works))
        except Exception as error:
            if _is_trouble(error):
                self._in_trouble(error)
                failure = StoreError(f"the completion store failed: {self.trouble}")
                self._resolve([(job, None, failure) for job in jobs])
            elif len(jobs) > 1:
                for job in jobs:
                    self._write([job])
            else:
                self._resolve([(jobs[0], None, error)])
        else:
            self.trouble = None
            for work in works:
                work.committed()
            self._resolve([(job, result, None) for job, result in zip(jobs, results, strict=True)])

    def _write_all(self, connection: Connection, works: Sequence[Work]) -> list[Any]:
        self._prepare(connection, works)
        return [work.write(connection) for work in works]

    def _try_again(self) -> None:
        try:
            self._transact(self._probe)
        except Exception as error:  # whatever it was, the next try is in a second
            self._in_trouble(error)
        else:
            self.trouble = None

    def _transact(self, body: Callable[[Connection], T]) -> T:
        """Returns what `body` returned, once it is committed."""
        with self._engine.connect() as connection:
            try:
                with connection.begin():
                    return body(connection)
            except DBAPIError as error:
                if _is_trouble(error):  # after a failed write or sync its state is in doubt: it is not used again
                    connection.invalidate()
                raise

    def _in_trouble(self, error: Exception) -> None:
        self.trouble = " ".join(str(getattr(error, "orig", None) or error).split())

    @staticmethod
    def _resolve(outcomes: list[tuple[Job, Any, BaseException | None]]) -> None:
        """Wakes the callers, each event loop once."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, BaseException | None]]] = {}
        for job, result, error in outcomes:
            if error is not None:
                job.work.failed()
            if job.future is not None and job.loop is not None:
                loops.setdefault(job.loop, []).append((job.future, result, error))
        for loop, settled in loops.items():
            with suppress(RuntimeError):  # its loop has ended: the caller is gone, the write stands
                loop.call_soon_threadsafe(_settle, settled)


def _is_trouble(error: Exception) -> bool:
    """Whether the database is at fault, not what it was asked to write."""
    return isinstance(error, DBAPIError) and not isinstance(error, IntegrityError | DataError | ProgrammingError)


def _settle(settled: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in settled:
        if future.done():  # its caller was cancelled
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
