"""The schema version of a file, and the way forward from older ones. Knows the tables of the past, not their use.

`open_schema` creates a fresh database at the current version, migrates an older one step by step inside one transaction (all steps or
none), and refuses a newer one: a downgrade would guess at what it does not know. Each migration is frozen once released: it
spells out its own SQL, and never refers to `polar.store.tables`, which moves on.

Version 0 is the layout before `completions.depth`; it was never released, and its migration is what the next one is modelled on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sqlalchemy import Connection, MetaData, inspect, text

from polar.errors import ConfigError
from polar.store.tables import metadata

Migration = Callable[[Connection], None]
_ADVISORY_LOCK = 0x506F6C61  # "Pola": PostgreSQL has no lock on a whole database for several processes that start at once


def add_depth(connection: Connection) -> None:
    """0 to 1: `completions.depth`, the number of rows below a row that a rebuild reads, and an index for paging sessions."""
    connection.execute(text("ALTER TABLE completions ADD COLUMN depth INTEGER NOT NULL DEFAULT 0"))
    connection.execute(
        text(
            """
            WITH RECURSIVE chain(session, number, depth) AS (
                SELECT session, number, 0 FROM completions WHERE base IS NULL
                UNION ALL
                SELECT c.session, c.number, chain.depth + 1 FROM completions AS c
                JOIN chain ON c.session = chain.session AND c.base = chain.number
            )
            UPDATE completions SET depth = chain.depth FROM chain
            WHERE completions.session = chain.session AND completions.number = chain.number
            """
        )
    )
    connection.execute(text("CREATE INDEX sessions_created ON sessions (created)"))


MIGRATIONS: tuple[Migration, ...] = (add_depth,)
"""`MIGRATIONS[n]` leads from version n to n + 1."""


def open_schema(
    connection: Connection,
    migrations: Sequence[Migration] = MIGRATIONS,
    *,
    tables: MetaData = metadata,
    marks: frozenset[str] = frozenset({"sessions", "completions"}),
    kind: str = "a Polar store",
) -> int:
    """Brings the database to version `len(migrations)`, inside the caller's transaction. Returns the version found (-1: it was empty).

    `tables` are made where there are none; a database without the tables `marks` is not `kind`. Raises `ConfigError` for a newer
    version, and for a database that holds tables of something else.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:lock)"), {"lock": _ADVISORY_LOCK})
    target = len(migrations)
    names = set(inspect(connection).get_table_names())
    if not names:
        tables.create_all(connection)
        connection.execute(text("INSERT INTO meta (name, value) VALUES ('schema_version', :version)"), {"version": str(target)})
        return -1
    version = None
    if "meta" in names and marks <= names:
        version = connection.execute(text("SELECT value FROM meta WHERE name = 'schema_version'")).scalar()
    if version is None:
        raise ConfigError(
            f"this database is not {kind}: it holds the tables {', '.join(sorted(names)[:5])}. Name a file or database of its own."
        )
    found = int(version)
    if found > target:
        raise ConfigError(
            f"this store has schema version {found}, and this Polar knows versions up to {target}. "
            "Use the Polar that wrote it or a newer one (pip install --upgrade polar-rl), or name another store."
        )
    for migration in migrations[found:]:
        migration(connection)
    if found < target:
        connection.execute(text("UPDATE meta SET value = :version WHERE name = 'schema_version'"), {"version": str(target)})
    return found
