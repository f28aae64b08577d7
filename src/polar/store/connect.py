"""Databases by URL: engines set up so that a commit that has returned is on disk. Knows no table but the schema's version.

SQLite: write-ahead log with `synchronous=FULL` (each commit syncs the log), foreign keys, a busy timeout for the other processes that
write to the same file, and files that only their owner can read (SQLite gives `-wal` and `-shm` the mode of the database itself).
PostgreSQL: `synchronous_commit` is switched on where the server's default is off; a lock is waited for as long as SQLite's.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, OperationalError

from polar.errors import ConfigError
from polar.store.migrations import open_schema

LOOK_S = 0.0005
"""Between two looks whether another process has let go of the file."""

_POSTGRES = ("postgres:", "postgresql:", "postgresql+psycopg:")


def open_engines(
    where: str | os.PathLike[str], *, busy_timeout_s: float, readers: int, schema: Callable[[Connection], object] = open_schema
) -> tuple[Engine, Engine]:
    """The writer's engine and the readers', their schema brought up to date by `schema`, inside one transaction. Raises `ConfigError` for a
    place that cannot be used."""
    text = os.fspath(where)
    path = place_of(text)
    engines = _postgres(text, busy_timeout_s, readers) if path is None else _sqlite(path, busy_timeout_s, readers)
    try:
        with engines[0].begin() as connection:
            schema(connection)
    except DatabaseError as error:
        for engine in engines:
            engine.dispose()
        reason = " ".join(str(error.orig or error).split())
        raise ConfigError(f"the store at {_shown(text)} cannot be opened: {reason}") from error
    except BaseException:
        for engine in engines:
            engine.dispose()
        raise
    return engines


def place_of(text: str) -> Path | None:
    """The file of a store, `None` for a server. Raises `ConfigError` for what can be no store, before anything is opened."""
    if text.startswith(_POSTGRES):
        return None
    if "://" in text and not text.startswith("sqlite:"):
        raise ConfigError(f"the store's URL {_scheme(text)}://... is not one of sqlite: and postgresql:, and not a path")
    return sqlite_path(text)


def _scheme(text: str) -> str:
    return text.partition("://")[0]


def _shown(text: str) -> str:
    """The place without a password."""
    return make_url(text).render_as_string(hide_password=True) if "://" in text else text


# --- SQLite -----------------------------------------------------------------------------------------------------------


def sqlite_path(text: str) -> Path:
    """The file that a path or a `sqlite:` URL names, absolute. Raises `ConfigError` for one in memory."""
    if text.startswith("sqlite:"):
        text = text.removeprefix("sqlite:")
        if text.startswith("//"):  # as SQLAlchemy reads it: three slashes for a relative path, four for an absolute one
            text = text[3:]
    if text in ("", ":memory:"):
        raise ConfigError("a store in memory would not be durable: name a file")
    return Path(text).expanduser().absolute()


def _sqlite(path: Path, busy_timeout_s: float, readers: int) -> tuple[Engine, Engine]:
    try:
        _claim(path)
    except OSError as error:
        raise ConfigError(f"the store at {path} cannot be opened: {error.strerror}") from error
    url = URL.create("sqlite+pysqlite", database=str(path))
    arguments = {"timeout": busy_timeout_s, "check_same_thread": False}
    writer = create_engine(url, connect_args=arguments, pool_size=1)
    reader = create_engine(url, connect_args=arguments, pool_size=readers)
    patience = _Patience(busy_timeout_s)
    for engine in (writer, reader):
        event.listen(engine, "connect", patience.set_up)
    event.listen(writer, "connect", lambda connection, _: connection.execute("PRAGMA busy_timeout = 0"))
    event.listen(writer, "begin", patience.begin_write)
    event.listen(reader, "begin", lambda connection: connection.exec_driver_sql("BEGIN"))
    return writer, reader


def _claim(path: Path) -> None:
    """Makes the file and the directories that are missing, all of them for their owner only, before SQLite would make them for everyone."""
    missing = [folder for folder in path.parents if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    os.close(descriptor)
    for file in (path, path.with_name(path.name + "-wal"), path.with_name(path.name + "-shm")):
        if file.exists() and file.stat().st_mode & 0o077:
            file.chmod(0o600)
    for folder in {path.parent, *(folder.parent for folder in missing)}:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Patience:
    """Waits for the lock that another process has, for `limit_s` at most, where SQLite's own wait does not do.

    SQLite does not wait at all while a new file gets its write-ahead log. And it sleeps for up to 100 ms between two looks: a process
    that writes without a pause on a slow disk frees the lock for a moment between its transactions, so another would hardly ever see it.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s

    def set_up(self, connection: sqlite3.Connection, _: Any) -> None:
        connection.isolation_level = None  # the engine begins transactions itself: the driver would begin them too late for IMMEDIATE
        mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
        if mode != "wal":
            mode = self._execute(connection, "PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise ConfigError(f"SQLite cannot keep a write-ahead log here (its journal mode is {mode!r}): use a local disk")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")

    def begin_write(self, connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        try:
            self._execute(driver, "BEGIN IMMEDIATE")
        except sqlite3.Error:
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # fails again, as SQLAlchemy's error

    def _execute(self, connection: sqlite3.Connection, statement: str) -> sqlite3.Cursor:
        due = time.monotonic() + self._limit_s
        while True:
            try:
                return connection.execute(statement)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= due:
                    raise
            time.sleep(LOOK_S)


# --- PostgreSQL -------------------------------------------------------------------------------------------------------


_NETWORK = {"connect_timeout": 10, "keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 3, "tcp_user_timeout": 30_000}
"""libpq's settings (seconds, the last one milliseconds), unless the URL has its own: a server that has lost its power is a store that has
failed, within half a minute. Left to Linux it would be one after two hours, or a quarter of one in a write, and healthy until then."""


def _postgres(text: str, busy_timeout_s: float, readers: int) -> tuple[Engine, Engine]:
    try:
        url = make_url(text).set(drivername="postgresql+psycopg")
        options: dict[str, Any] = {"pool_pre_ping": True, "connect_args": {k: v for k, v in _NETWORK.items() if k not in url.query}}
        engines = create_engine(url, pool_size=1, **options), create_engine(url, pool_size=readers, **options)
    except ArgumentError as error:
        raise ConfigError(f"the store's URL cannot be read: {error}") from error
    except ModuleNotFoundError as error:
        raise ConfigError("a PostgreSQL store needs psycopg: pip install -e '.[postgres]' (in Polar's folder)") from error
    for engine in engines:
        event.listen(engine, "connect", _set_up_postgres(busy_timeout_s))
    try:
        engines[0].connect().close()
    except OperationalError as error:
        raise ConfigError(f"the store at {_shown(text)} cannot be reached: {' '.join(str(error.orig).split())}") from error
    return engines


def _set_up_postgres(busy_timeout_s: float) -> Any:
    lock_timeout = f"{max(1, round(busy_timeout_s * 1000))}ms"

    def set_up(connection: Any, _: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'")
            cursor.execute("SELECT set_config('lock_timeout', %s, false)", (lock_timeout,))
        connection.commit()

    return set_up
