"""The plan and the progress of one export: a SQLite file in its folder, so that memory does not grow with the data. Knows no rows.

What an export has decided and done stands here: which sessions it takes, in which split each lands, what was refused and why, which rows
it has seen, which parts are on disk. A checkpoint is one transaction, made after the parts that it names were synced and renamed. So
whatever interrupts an export, the file tells exactly how far its parts go, and going on from there gives the same bytes as one run.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from polar.errors import ConfigError
from polar.export.facts import Facts

VERSION = "2"
BATCH = 256
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE labels (session TEXT PRIMARY KEY, facts BLOB NOT NULL, used INTEGER NOT NULL DEFAULT 0);
CREATE TABLE sessions (
    session TEXT PRIMARY KEY, created REAL NOT NULL, facts BLOB NOT NULL, grp TEXT, key TEXT, origin TEXT NOT NULL, reward REAL,
    split TEXT NOT NULL DEFAULT 'train', refused TEXT
);
CREATE INDEX sessions_order ON sessions (created, session);
CREATE INDEX sessions_group ON sessions (grp, reward);
CREATE TABLE keys (key TEXT PRIMARY KEY, hash BLOB NOT NULL, sessions INTEGER NOT NULL, split TEXT);
CREATE TABLE seen (hash BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE prompts (hash BLOB PRIMARY KEY, split TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE parts (split TEXT, number INTEGER, file TEXT NOT NULL, rows INTEGER NOT NULL, bytes INTEGER NOT NULL, sha256 TEXT NOT NULL,
    PRIMARY KEY (split, number));
CREATE TABLE rows (split TEXT NOT NULL, messages INTEGER NOT NULL, turns INTEGER NOT NULL, tokens INTEGER NOT NULL,
    trained INTEGER NOT NULL);
CREATE TABLE dropped (reason TEXT PRIMARY KEY, rows INTEGER NOT NULL, tokens INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE ledger (reason TEXT PRIMARY KEY, tokens INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE models (facts TEXT PRIMARY KEY, sessions INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class Planned:
    """A session that the export takes, and where its rows go."""

    facts: Facts
    split: str


@dataclass(frozen=True, slots=True)
class Part:
    """A file that is complete and on disk. `bytes` is its size, `file` its path below the export's folder."""

    split: str
    number: int
    file: str
    rows: int
    bytes: int
    sha256: str


class State:
    """Open with `State.open`; `begin` starts a transaction, `commit` makes everything since then durable."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.db = connection

    @classmethod
    def open(cls, path: Path, fingerprint: str) -> State:
        """The state at `path`, fresh where there is none or where its plan was never finished.

        Raises `ConfigError` for one of an export with other options.
        """
        if path.exists():
            found = cls(_connect(path))
            known = found.meta()
            if known.get("planned") and known.get("version") == VERSION:
                if known.get("fingerprint") != fingerprint:
                    found.close()
                    raise ConfigError(
                        f"{path.parent} holds an unfinished export with other options or of another store: "
                        "repeat it with its own, or name another folder"
                    )
                return found
            found.close()
            cls.remove(path)
        made = cls(_connect(path))
        made.db.executescript(_SCHEMA)
        made.set_meta(version=VERSION, fingerprint=fingerprint)
        return made

    @staticmethod
    def remove(path: Path) -> None:
        for ending in ("", "-wal", "-shm"):
            path.with_name(path.name + ending).unlink(missing_ok=True)

    def begin(self) -> None:
        self.db.execute("BEGIN IMMEDIATE")

    def commit(self) -> None:
        self.db.execute("COMMIT")

    def close(self) -> None:
        """What was not committed is undone."""
        self.db.close()

    def meta(self) -> dict[str, str]:
        try:
            return dict(self.db.execute("SELECT name, value FROM meta"))
        except sqlite3.OperationalError:  # interrupted before its tables were made
            return {}

    def set_meta(self, **values: str) -> None:
        self.db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    # --- progress ---

    def todo(self) -> Iterator[Planned]:
        """The sessions still to do, oldest first. Safe while the state is written to."""
        known = self.meta()
        after: tuple[float, str] = (float(known.get("done_created", "-inf")), known.get("done_session", ""))
        query = """SELECT created, session, facts, split FROM sessions WHERE refused IS NULL AND (created, session) > (?, ?)
                   ORDER BY created, session LIMIT ?"""
        while page := self.db.execute(query, (*after, BATCH)).fetchall():
            for _, _, facts, split in page:
                yield Planned(facts_from(facts), split)
            after = (page[-1][0], page[-1][1])

    def done(self, facts: Facts) -> None:
        """Everything up to this session is in parts, once the transaction is committed."""
        self.set_meta(done_created=repr(facts.created), done_session=facts.session)

    def refuse(self, session: str, reason: str) -> None:
        self.db.execute("UPDATE sessions SET refused = ? WHERE session = ?", (reason, session))

    def is_new(self, digest: bytes) -> bool:
        """Whether a row of this content comes for the first time; it is known from now on."""
        return self.db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (digest,)).rowcount == 1

    def may_stand_in(self, prompt: bytes, split: str) -> bool:
        """Whether no row that starts with this prompt stands in another split; it belongs to this one from now on."""
        self.db.execute("INSERT OR IGNORE INTO prompts VALUES (?, ?)", (prompt, split))
        found: tuple[str] = self.db.execute("SELECT split FROM prompts WHERE hash = ?", (prompt,)).fetchone()
        return found[0] == split

    def count_row(self, split: str, messages: int, turns: int, tokens: int, trained: int) -> None:
        self.db.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?)", (split, messages, turns, tokens, trained))

    def drop_row(self, reason: str, tokens: int) -> None:
        """A row that is left out, with its number of trained tokens."""
        self.db.execute(
            "INSERT INTO dropped VALUES (?, 1, ?) ON CONFLICT (reason) DO UPDATE SET rows = rows + 1, tokens = tokens + excluded.tokens",
            (reason, tokens),
        )

    def count_ledger(self, reason: str, tokens: int) -> None:
        self.db.execute(
            "INSERT INTO ledger VALUES (?, ?) ON CONFLICT (reason) DO UPDATE SET tokens = tokens + excluded.tokens", (reason, tokens)
        )

    def count_model(self, facts: bytes) -> None:
        """One more session with rows of the model that these facts (JSON) name."""
        self.db.execute("INSERT INTO models VALUES (?, 1) ON CONFLICT (facts) DO UPDATE SET sessions = sessions + 1", (facts.decode(),))

    def add_part(self, part: Part) -> None:
        self.db.execute(
            "INSERT INTO parts VALUES (?, ?, ?, ?, ?, ?)", (part.split, part.number, part.file, part.rows, part.bytes, part.sha256)
        )

    def parts(self) -> list[Part]:
        found = self.db.execute("SELECT split, number, file, rows, bytes, sha256 FROM parts ORDER BY split, number")
        return [Part(*row) for row in found]

    def one(self, query: str, *values: Any) -> Any:
        """The first column of the only row of a query."""
        return self.db.execute(query, values).fetchone()[0]


def facts_to(facts: Facts) -> bytes:
    return orjson.dumps({name: value for name, value in asdict(facts).items() if value is not None})


def facts_from(raw: bytes) -> Facts:
    values = orjson.loads(raw)
    if "row_rewards" in values:
        values["row_rewards"] = tuple(values["row_rewards"])
    return Facts(**values)


def _connect(path: Path) -> sqlite3.Connection:
    """Locked until it is closed, or its process ends. Raises `ConfigError` where another process holds it."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=1)
    try:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -8192")  # 8 MiB
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        connection.close()
        raise ConfigError(
            f"the state of the export in {path.parent} cannot be opened: {error}; is another export writing there?"
        ) from error
    return connection
