"""The service's database: one thread that writes, in group commits, and a few that read. Knows the tables, not what changes mean.

A change is a function of a `Transaction`; it may be run again after a rollback, so it touches nothing but the database. All changes go
through one thread, one after another: what a change has read cannot change under it. A change's events get their numbers inside
its transaction, hence no gaps, and an event is visible exactly when what it tells is.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import orjson
import zstandard
from sqlalchemy import Connection, Engine, func, insert, select, text, update

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.rollout import tables
from polar.store.connect import open_engines, sqlite_path
from polar.store.migrations import Migration, open_schema
from polar.store.writer import Work, Writer

T = TypeVar("T")

MIGRATIONS: tuple[Migration, ...] = ()
"""`MIGRATIONS[n]` leads from version n to n + 1; each spells out its own SQL."""
READERS = 4
_ONE_SERVICE = 0x506F6C62
"""PostgreSQL's advisory lock of the one service on a database."""


def open_rollout_schema(connection: Connection) -> int:
    """As `polar.store.migrations.open_schema`, for this database."""
    return open_schema(
        connection,
        MIGRATIONS,
        tables=tables.metadata,
        marks=frozenset({"tasks", "attempts", "deliveries"}),
        kind="the database of a rollout service",
    )


def packed(value: Any) -> bytes:
    """JSON, compressed where that pays."""
    return compressed(orjson.dumps(value))


def compressed(raw: bytes) -> bytes:
    return b"\x01" + zstandard.compress(raw, 3) if len(raw) > 256 else b"\x00" + raw


def unpacked(body: bytes) -> bytes:
    """The JSON text."""
    return zstandard.decompress(body[1:]) if body[:1] == b"\x01" else bytes(body[1:])


_LAST_EVENT = select(func.max(tables.events.c.seq))


class Transaction:
    """What a change works with: the connection, one moment (`now`, Unix seconds) for all of it, its events, and who is to be woken
    once it is on disk (`schedule`, `cancel`, `deliver`, `save`; listeners to events are woken by themselves)."""

    def __init__(self, connection: Connection, now: float) -> None:
        self.connection = connection
        self.now = now
        self.wake: set[str] = set()
        self._events: list[JsonObject] = []

    def emit(self, type_: str, task: str | None = None, session: str | None = None, **data: Any) -> None:
        self._events.append({"time": self.now, "type": type_, "task": task, "session": session, "data": packed(data)})

    def close(self) -> None:
        """Numbers the events and writes them."""
        if self._events:
            last = self.connection.execute(_LAST_EVENT).scalar() or 0
            rows = [{"seq": last + number, **event} for number, event in enumerate(self._events, 1)]
            self.connection.execute(insert(tables.events), rows)
            self.wake.add("events")


class _Change(Work):
    def __init__(self, database: Database, change: Callable[[Transaction], Any]) -> None:
        self.database = database
        self.change = change
        self.loop = asyncio.get_running_loop()
        self.wake: set[str] = set()

    def write(self, connection: Connection) -> Any:
        transaction = Transaction(connection, self.database.clock())
        outcome = self.change(transaction)
        transaction.close()
        self.wake = transaction.wake
        return outcome

    def committed(self) -> None:
        if self.wake:
            with suppress(RuntimeError):  # the loop has ended, and with it who would be woken
                self.loop.call_soon_threadsafe(self.database.on_commit, self.wake)


class Database:
    """`on_commit` is called on the event loop with whom a change wakes, before its caller goes on."""

    def __init__(self, where: str | os.PathLike[str], *, clock: Callable[[], float] = time.time, busy_timeout_s: float = 5.0) -> None:
        self.clock = clock
        self.on_commit: Callable[[set[str]], object] = lambda wake: None
        self._lock_file: int | None = None
        self._engine, self._readers = open_engines(where, busy_timeout_s=busy_timeout_s, readers=READERS, schema=open_rollout_schema)
        try:
            self._lock_connection = self._claim(os.fspath(where))
        except BaseException:
            self._dispose()
            raise
        self._writer = Writer(self._engine, lambda connection, works: None, _probe)
        self._pool = ThreadPoolExecutor(READERS, thread_name_prefix="polar-rollout-read")

    @property
    def trouble(self) -> str | None:
        """What is wrong with the database, if anything."""
        return self._writer.trouble

    async def write(self, change: Callable[[Transaction], T]) -> T:
        """Runs the change; returns its outcome once it is on disk. Raises `StoreError` where the database fails, and what the change
        raises."""
        outcome: T = await self._writer.submit(_Change(self, change))
        return outcome

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Runs a query on a snapshot, in a thread of its own."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._read, query)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._writer.close)
        self._pool.shutdown()
        if self._lock_connection is not None:
            self._lock_connection.close()
        self._dispose()

    def _read(self, query: Callable[[Connection], T]) -> T:
        with self._readers.connect() as connection:
            return query(connection)

    def _dispose(self) -> None:
        self._engine.dispose()
        self._readers.dispose()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def _claim(self, where: str) -> Connection | None:
        """Two services on one database would dispatch everything twice: the second is refused."""
        engine: Engine = self._readers
        if engine.dialect.name == "postgresql":
            connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            if connection.execute(text("SELECT pg_try_advisory_lock(:lock)"), {"lock": _ONE_SERVICE}).scalar():
                return connection
            connection.close()
        else:
            path = sqlite_path(where)
            self._lock_file = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                pass
        raise ConfigError("another rollout service uses this database; stop it, or set rollout.store to another place")


def _probe(connection: Connection) -> None:
    changed = connection.execute(update(tables.meta).where(tables.meta.c.name == "probe").values(value="ok"))
    if not changed.rowcount:
        connection.execute(insert(tables.meta).values(name="probe", value="ok"))
