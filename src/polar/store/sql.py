"""The store over SQL. Writes go through `polar.store.writer`, reads through a few threads; recent completions stay in memory.

The hot path of a call is one `completion()` of the turn that it continues, which the cache answers on the event loop, and one
`append()`, whose work is proportional to what is new in the completion: the rest of a long prompt is compared, never re-encoded.

Several processes may use one database, each session in one process at a time: a process does not see what another one changed on a
completion that it holds in its cache (`delivered`, `stored`).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, Table, bindparam, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, IntegrityError

from polar.chat import Tool
from polar.errors import StoreError
from polar.records import Completion, Head, Session
from polar.store.arrays import unpack
from polar.store.base import Store
from polar.store.cache import Cache
from polar.store.codec import dumps, loads
from polar.store.connect import open_engines
from polar.store.delta import Encoded, Opened, decode, encode, read_tools
from polar.store.tables import blobs, completions, meta, sessions
from polar.store.weight import weight
from polar.store.writer import Work, Writer

Key = tuple[str, int]
T = TypeVar("T")

MAX_DEPTH = 256
"""Rows that a rebuild reads at most. A completion at this depth is stored in full, and its children build on it."""
PAGE = 32
"""Rows read at once when a session is streamed."""
READERS = 4
_KNOWN_BLOBS = 1 << 16
_BLOB_CACHE_BYTES = 32 << 20
_HEAD = [
    completions.c[f] for f in ("number", "root", "turn", "loose", "thinking_hash", "parent", "status", "delivered", "choice", "sampled")
]


class SqlStore(Store):
    """See `open_store`."""

    def __init__(self, where: str | os.PathLike[str], *, cache_bytes: int, busy_timeout_s: float) -> None:
        writing, self._reading = open_engines(where, busy_timeout_s=busy_timeout_s, readers=READERS)
        self._engines = (writing, self._reading)
        self._insert_new = _insert_new(blobs, writing.dialect.name)
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="polar-store-read")
        self._recent: Cache[Key, tuple[Completion, int]] = Cache(cache_bytes)
        self._known: Cache[bytes, bool] = Cache(_KNOWN_BLOBS)
        self._tools: Cache[bytes, tuple[Tool, ...]] = Cache(_BLOB_CACHE_BYTES)
        self._marked: set[Key] = set()
        self._changes = 0
        self._closed = False
        self._writer = Writer(writing, self._prepare, _probe)

    @property
    def healthy(self) -> str | None:
        return self._writer.trouble

    async def aclose(self) -> None:
        await asyncio.to_thread(self._writer.close)
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)
        for engine in self._engines:
            engine.dispose()

    # --- sessions ---

    async def create_session(self, session: Session) -> None:
        row = {name: getattr(session, name) for name in ("id", "key_hash", "secret", "kind", "created", "closed")}
        row |= {"settings": dumps(session.settings), "metadata": dumps(session.metadata)}
        try:
            await self._writer.submit(_Statement(lambda connection: connection.execute(insert(sessions), row)))
        except IntegrityError as error:
            raise ValueError(f"session {session.id!r} or its key exists already") from error

    async def session(self, session_id: str) -> Session | None:
        return await self._one_session(select(sessions).where(sessions.c.id == session_id))

    async def session_by_key(self, key_hash: bytes) -> Session | None:
        return await self._one_session(select(sessions).where(sessions.c.key_hash == key_hash))

    async def _one_session(self, query: Select[Any]) -> Session | None:
        row = await self._read(lambda connection: connection.execute(query).first())
        return None if row is None else _session(row)

    async def sessions(self, *, limit: int = 100, before: float | None = None, open_only: bool = False) -> list[Session]:
        """As in `Store`. Sessions created at the very same time stand on one page, which is longer than `limit` if need be."""
        query = select(sessions).order_by(sessions.c.created.desc(), sessions.c.id)
        if before is not None:
            query = query.where(sessions.c.created < before)
        if open_only:
            query = query.where(sessions.c.closed.is_(None))

        def read(connection: Connection) -> list[Session]:
            rows = list(connection.execute(query.limit(limit)))
            if rows and len(rows) == limit:
                last = rows[-1].created
                ties = connection.execute(query.where(sessions.c.created == last))
                rows = [row for row in rows if row.created != last] + list(ties)
            return [_session(row) for row in rows]

        return await self._read(read)

    async def close_session(self, session_id: str, at: float) -> bool:
        statement = update(sessions).where(sessions.c.id == session_id, sessions.c.closed.is_(None)).values(closed=at)
        return bool(await self._writer.submit(_Statement(lambda connection: connection.execute(statement).rowcount)))

    # --- completions: writing ---

    async def append(self, completions: Sequence[Completion]) -> None:
        if not completions:
            return
        try:
            await self._writer.submit(_Append(self, completions))
        except IntegrityError as error:
            first = completions[0]
            raise StoreError(
                f"completion {first.number} of session {first.session!r} was not recorded: it exists already, or its session does not"
            ) from error
        except (TypeError, ValueError) as error:
            raise StoreError(f"completion {completions[0].number} cannot be stored without loss: {error}") from error

    async def mark_delivered(self, session_id: str, number: int) -> None:
        key = (session_id, number)
        if key not in self._marked:
            self._marked.add(key)
            self._writer.post(_Delivered(self, key))

    async def forget_response(self, session_id: str, number: int) -> bool:
        here = (completions.c.session == session_id) & (completions.c.number == number)
        statement = update(completions).where(here, completions.c.stored).values(stored=False)
        forgotten = bool(await self._writer.submit(_Statement(lambda connection: connection.execute(statement).rowcount)))
        self._amend((session_id, number), stored=False)
        return forgotten

    def _amend(self, key: Key, **changes: Any) -> None:
        """Keeps the cache true to a row that has changed."""
        self._changes += 1
        entry = self._recent.get(key)
        if entry is not None:
            completion, depth = entry
            self._recent.swap(key, (replace(completion, **changes), depth))

    def _remember(self, completion: Completion, depth: int) -> None:
        self._recent.put((completion.session, completion.number), (completion, depth), weight(completion))

    def _prepare(self, connection: Connection, works: Sequence[Work]) -> None:
        """Encodes a batch's completions and writes their blobs, by hash: two processes must not wait for each other in a circle."""
        pending: dict[Key, tuple[Completion, int]] = {}
        new: dict[bytes, bytes] = {}
        marks = [work for work in works if isinstance(work, _Delivered)]
        for mark in marks:
            mark.together = marks if mark is marks[-1] else []
        for work in works:
            if isinstance(work, _Append):
                work.encode(connection, pending)
                for encoded in work.encoded:
                    new |= encoded.blobs
        if new:
            connection.execute(self._insert_new, [{"hash": address, "content": new[address]} for address in sorted(new)])

    def _encode(self, connection: Connection, completion: Completion, pending: dict[Key, tuple[Completion, int]]) -> Encoded:
        """Against its parent, wherever that is: in this batch, in memory or on disk. Without one (a failed call leaves a gap), in full."""
        base: tuple[Completion, int] | None = None
        if completion.parent is not None and completion.parent < completion.number:
            key = (completion.session, completion.parent)
            base = pending.get(key) or self._recent.get(key) or self._load(connection, key)
        if base is None or base[1] >= MAX_DEPTH:
            encoded = encode(completion, None, 0, self._is_known)
        else:
            encoded = encode(completion, base[0], base[1] + 1, self._is_known)
        if encoded.row["tools"] is not None:  # 5,000 sessions of one harness hold its tools once
            shared = self._tools.get(encoded.row["tools"])
            if shared is None:
                shared = encoded.completion.tools
                self._tools.put(encoded.row["tools"], shared, weight(shared))
            encoded.completion.tools = shared
        pending[completion.session, completion.number] = (encoded.completion, encoded.row["depth"])
        return encoded

    def _is_known(self, address: bytes) -> bool:
        return self._known.get(address) is not None

    def _appended(self, encoded: Encoded) -> None:
        completion = encoded.completion
        for address in encoded.blobs:
            self._known.put(address, True, 1)
        self._remember(completion, encoded.row["depth"])
        if encoded.copied and completion.parent is not None:
            self._recent.retire((completion.session, completion.parent))

    # --- completions: reading ---

    async def completion(self, session_id: str, number: int) -> Completion | None:
        key = (session_id, number)
        entry = self._recent.get(key)
        if entry is None:
            changes = self._changes
            entry = await self._read(lambda connection: self._load(connection, key))
            if entry is None:
                return None
            if changes == self._changes:  # else it may be from before a change that the cache should know of
                self._remember(*entry)
        return self._seen(entry[0])

    async def completions(self, session_id: str) -> AsyncIterator[Completion]:
        """As in `Store`. A completion is let go when the last one that is coded against it has been read."""
        query = select(completions.c.number, completions.c.base).where(completions.c.session == session_id)
        plan = await self._read(lambda connection: list(connection.execute(query.order_by(completions.c.number))))
        waiting = Counter(base for _, base in plan if base is not None)
        live: dict[int, tuple[Completion, int]] = {}
        numbers = [number for number, _ in plan]
        for start in range(0, len(numbers), PAGE):
            page = numbers[start : start + PAGE]
            for opened, contents in await self._read(lambda connection, page=page: self._page(connection, session_id, page)):  # type: ignore[misc]
                row = opened.row
                base = None if row["base"] is None else live[row["base"]][0]
                completion = decode(opened, base, contents.__getitem__, self._read_tools(contents))
                if row["base"] is not None:
                    waiting[row["base"]] -= 1
                    if not waiting[row["base"]]:
                        del live[row["base"]]
                if waiting[row["number"]]:
                    live[row["number"]] = (completion, row["depth"])
                yield self._seen(completion)

    async def heads(self, session_id: str) -> list[Head]:
        query = select(*_HEAD).where(completions.c.session == session_id).order_by(completions.c.number)
        rows = await self._read(lambda connection: list(connection.execute(query)))
        found = [Head(**row._mapping) for row in rows]
        marked = self._marked
        return [replace(head, delivered=True) if (session_id, head.number) in marked else head for head in found] if marked else found

    def _seen(self, completion: Completion) -> Completion:
        """The caller's own copy (arrays and messages are shared: only read them), with a mark that is still on its way to disk."""
        marked = (completion.session, completion.number) in self._marked
        return replace(completion, delivered=completion.delivered or marked)

    def _load(self, connection: Connection, key: Key) -> tuple[Completion, int] | None:
        """Rebuilds a completion, from the nearest one stored in full, with its depth."""
        session_id, number = key
        this = (
            select(completions.c.number, completions.c.base)
            .where(completions.c.session == session_id, completions.c.number == number)
            .cte("chain", recursive=True)
        )
        below = select(completions.c.number, completions.c.base).where(
            completions.c.session == session_id, completions.c.number == this.c.base
        )
        chain = this.union_all(below)
        query = (
            select(completions)
            .join(chain, completions.c.number == chain.c.number)
            .where(completions.c.session == session_id)
            .order_by(completions.c.depth)
        )
        rows = [Opened.of(row) for row in connection.execute(query).mappings()]
        contents = self._contents(connection, rows)
        completion: Completion | None = None
        for opened in rows:
            completion = decode(opened, completion, contents.__getitem__, self._read_tools(contents))
        return None if completion is None else (completion, rows[-1].row["depth"])

    def _page(self, connection: Connection, session_id: str, numbers: list[int]) -> list[tuple[Opened, dict[bytes, bytes]]]:
        query = select(completions).where(completions.c.session == session_id, completions.c.number.in_(numbers))
        rows = [Opened.of(row) for row in connection.execute(query.order_by(completions.c.number)).mappings()]
        contents = self._contents(connection, rows)
        return [(opened, contents) for opened in rows]

    def _contents(self, connection: Connection, rows: Iterable[Opened]) -> dict[bytes, bytes]:
        """The blobs that these rows refer to, but for tool sets that are in memory."""
        wanted = set[bytes]().union(*(opened.addresses() for opened in rows))
        addresses = sorted(address for address in wanted if self._tools.get(address) is None)
        found: dict[bytes, bytes] = {}
        for start in range(0, len(addresses), 500):
            query = select(blobs.c.hash, blobs.c.content).where(blobs.c.hash.in_(addresses[start : start + 500]))
            found |= {bytes(row.hash): unpack(row.content) for row in connection.execute(query)}
        return found

    def _read_tools(self, contents: dict[bytes, bytes]) -> Callable[[bytes], tuple[Tool, ...]]:
        def read(address: bytes) -> tuple[Tool, ...]:
            tools = self._tools.get(address)
            if tools is None:
                tools = read_tools(contents[address])
                self._tools.put(address, tools, weight(tools))
            return tools

        return read

    async def _read(self, query: Callable[[Connection], T]) -> T:
        """Runs `query` on a reader's thread. Raises `StoreError` where the database fails, or the store is closed."""
        if self._closed:
            raise StoreError("the store is closed")

        def run() -> T:
            with self._reading.connect() as connection, connection.begin():
                return query(connection)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, run)
        except DBAPIError as error:
            raise StoreError(f"the completion store cannot be read: {' '.join(str(error.orig).split())}") from error


class _Statement(Work):
    def __init__(self, run: Callable[[Connection], Any]) -> None:
        self.run = run

    def write(self, connection: Connection) -> Any:
        return self.run(connection)


HEAVY_IDS = 4096
"""Prompt ids without a parent to delta against that make an append heavy."""


class _Append(Work):
    def __init__(self, store: SqlStore, given: Sequence[Completion]) -> None:
        self.store = store
        self.given = given
        self.heavy = any(one.parent is None and one.prompt_ids is not None and len(one.prompt_ids) > HEAVY_IDS for one in given)
        self.encoded: list[Encoded] = []

    def encode(self, connection: Connection, pending: dict[Key, tuple[Completion, int]]) -> None:
        self.encoded = [self.store._encode(connection, completion, pending) for completion in self.given]

    def write(self, connection: Connection) -> None:
        connection.execute(insert(completions), [encoded.row for encoded in self.encoded])

    def committed(self) -> None:
        for encoded in self.encoded:
            self.store._appended(encoded)


_MARK = (
    update(completions)
    .where(completions.c.session == bindparam("of_session"), completions.c.number == bindparam("of_number"))
    .values(delivered=True)
)


class _Delivered(Work):
    def __init__(self, store: SqlStore, key: Key) -> None:
        self.store = store
        self.key = key
        self.together: Sequence[_Delivered] = (self,)
        """The last mark of a batch writes all of them, in one statement."""

    def write(self, connection: Connection) -> None:
        if self.together:
            connection.execute(_MARK, [{"of_session": mark.key[0], "of_number": mark.key[1]} for mark in self.together])

    def committed(self) -> None:
        self.store._amend(self.key, delivered=True)
        self.store._marked.discard(self.key)

    def failed(self) -> None:
        self.store._marked.discard(self.key)


def _probe(connection: Connection) -> None:
    """A small write, to learn whether a database that failed takes writes again."""
    if not connection.execute(update(meta).where(meta.c.name == "probe").values(value="1")).rowcount:
        connection.execute(insert(meta).values(name="probe", value="1"))


def _insert_new(table: Table, dialect: str) -> Any:
    """An INSERT that leaves rows alone that are there already."""
    kind = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return kind(table).on_conflict_do_nothing()


def _session(row: Row[Any]) -> Session:
    return Session(
        id=row.id,
        key_hash=bytes(row.key_hash),
        secret=bytes(row.secret),
        kind=row.kind,
        created=row.created,
        closed=row.closed,
        settings=loads(row.settings),
        metadata=loads(row.metadata),
    )
