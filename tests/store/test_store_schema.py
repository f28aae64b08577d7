"""The schema version, the way forward, and the places a store may be."""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text
from store_samples import agent_session, same, session

from polar.errors import ConfigError
from polar.store import open_store
from polar.store.migrations import MIGRATIONS, open_schema


def engine_of(place: str):
    return create_engine(place.replace("postgresql:", "postgresql+psycopg:") if "://" in place else f"sqlite:///{place}")


async def filled(place: str, turns: int = 4):
    store = open_store(place)
    await store.create_session(session())
    chain = agent_session(turns=turns, total=200 * turns)
    for completion in chain:
        await store.append([completion])
    await store.aclose()
    return chain


async def test_a_file_of_version_0_is_migrated(place: str) -> None:
    chain = await filled(place)
    engine = engine_of(place)
    with engine.begin() as connection:  # back to how version 0 was
        connection.execute(text("ALTER TABLE completions DROP COLUMN depth"))
        connection.execute(text("DROP INDEX sessions_created"))
        connection.execute(text("UPDATE meta SET value = '0' WHERE name = 'schema_version'"))
    store = open_store(place)
    for expected in chain:
        found = await store.completion("s", expected.number)
        assert found is not None
        assert same(found, expected)
    await store.aclose()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT depth FROM completions ORDER BY number")).scalars().all() == [0, 1, 2, 3]
        assert connection.execute(text("SELECT value FROM meta WHERE name = 'schema_version'")).scalar() == str(len(MIGRATIONS))
        assert "sessions_created" in {index["name"] for index in inspect(connection).get_indexes("sessions")}
    engine.dispose()


async def test_a_migration_that_fails_leaves_the_file_as_it_was(place: str) -> None:
    await filled(place)
    engine = engine_of(place)

    def add_column(connection) -> None:
        connection.execute(text("ALTER TABLE completions ADD COLUMN later INTEGER"))

    def fail(connection) -> None:
        raise RuntimeError("half way")

    if engine.dialect.name == "sqlite":  # as the store's own engine has it: DDL inside the transaction
        from sqlalchemy import event

        event.listen(engine, "connect", lambda connection, _: setattr(connection, "isolation_level", None))
        event.listen(engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
    with pytest.raises(RuntimeError, match="half way"), engine.begin() as connection:
        open_schema(connection, (*MIGRATIONS, add_column, fail))
    with engine.connect() as connection:
        assert "later" not in {column["name"] for column in inspect(connection).get_columns("completions")}
    with engine.begin() as connection:
        assert open_schema(connection, (*MIGRATIONS, add_column)) == len(MIGRATIONS)
    with pytest.raises(ConfigError, match=f"schema version {len(MIGRATIONS) + 1}.*versions up to {len(MIGRATIONS)}.*pip install --upgrade"):
        open_store(place)
    engine.dispose()


async def test_a_database_of_something_else_is_refused(place: str) -> None:
    engine = engine_of(place)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE recipes (name TEXT)"))
    with pytest.raises(ConfigError, match="not a Polar store: it holds the tables recipes"):
        open_store(place)
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == ["recipes"]
    engine.dispose()


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a database, but a long enough text to be read as the header of one" * 20)
    with pytest.raises(ConfigError, match="file is not a database"):
        open_store(tmp_path / "notes.txt")


@pytest.mark.parametrize("place", ["mysql://host/db", ":memory:", "sqlite://", "/proc/nowhere/store.db"])
def test_a_place_that_cannot_be_used_is_refused(place: str) -> None:
    with pytest.raises(ConfigError):
        open_store(place)


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="directory"):
        open_store(tmp_path)


@pytest.mark.real
def test_a_postgres_that_is_not_there_is_named_without_its_password() -> None:
    pytest.importorskip("psycopg")
    with pytest.raises(ConfigError, match="cannot be reached") as refused:
        open_store("postgresql://polar:hush@127.0.0.1:1/polar")
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize("form", ["{}", "sqlite:{}", "sqlite:///{}"])
async def test_forms_of_a_sqlite_place(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a" / "store.db"
    store = open_store(form.format(path))
    await store.create_session(session())
    await store.aclose()
    assert path.exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
async def test_only_the_owner_can_read_the_files(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = open_store(tmp_path / "new" / "deeper" / "store.db")
        await store.create_session(session())
        files = list((tmp_path / "new").rglob("*"))
        assert {file.name for file in files} == {"deeper", "store.db", "store.db-wal", "store.db-shm"}
        for file in [tmp_path / "new", *files]:
            assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file
        await store.aclose()
    finally:
        os.umask(before)


async def test_a_file_that_was_open_to_others_is_closed_to_them(tmp_path: Path) -> None:
    await filled(str(tmp_path / "store.db"))
    (tmp_path / "store.db").chmod(0o644)
    await open_store(tmp_path / "store.db").aclose()
    assert stat.S_IMODE((tmp_path / "store.db").stat().st_mode) == 0o600


async def test_each_commit_of_sqlite_is_synced_and_logged_ahead(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    for engine in store._engines:  # type: ignore[attr-defined]
        with engine.connect() as connection:
            assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
            assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar() == 1
    await store.aclose()


async def test_the_file_has_no_place_for_a_key(tmp_path: Path) -> None:
    """Keys are stored hashed; the store is given no key, only its hash."""
    await filled(str(tmp_path / "store.db"))
    connection = sqlite3.connect(tmp_path / "store.db")
    columns = [row[1] for row in connection.execute("PRAGMA table_info(sessions)")]
    connection.close()
    assert columns == ["id", "key_hash", "secret", "kind", "created", "closed", "settings", "metadata"]
