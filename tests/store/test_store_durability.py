"""Law 4: what was acknowledged is on disk, after kill -9, a full disk, a locked database and a sync that failed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from store_child import SESSIONS, endless, recovery
from store_samples import agent_session, differences, same, session

from polar.errors import StoreError
from polar.store import open_store
from polar.store.connect import open_engines
from polar.store.sql import SqlStore
from polar.store.writer import Job, Work

CHILD = [sys.executable, str(Path(__file__).with_name("store_child.py"))]


def run_child(*arguments: object, **environment: str) -> list[str]:
    done = subprocess.run(
        [*CHILD, *map(str, arguments)], env=os.environ | environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def integrity(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("PRAGMA integrity_check").fetchone()[0])
    finally:
        connection.close()


async def check_all_there(path: Path, acknowledged: dict[str, int]) -> None:
    """`acknowledged` counts the completions of each session that must be there, from 0; more may be, but all of them whole."""
    store = open_store(path, cache_bytes=0)
    try:
        for name, count in acknowledged.items():
            found = [completion async for completion in store.completions(name)]
            assert len(found) >= count, f"{name}: {count} acknowledged, {len(found)} there"
            for completion, expected in zip(found, islice(endless(name), len(found)), strict=True):
                assert same(completion, expected), (name, completion.number, differences(completion, expected))
    finally:
        await store.aclose()


def kill_while_it_appends(path: Path, name: str, after_s: float) -> dict[str, int]:
    """Starts the load, kills it `after_s` after its first acknowledgement; returns what it acknowledged."""
    process = subprocess.Popen([*CHILD, "load", str(path), name], stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    rest = process.stdout.read()
    process.wait(timeout=20)
    assert process.returncode == -signal.SIGKILL
    lines = (first + rest).decode().splitlines()
    acknowledged = {f"{name}-{i}": 0 for i in range(SESSIONS)}
    for line in lines:
        _, session_id, number = line.split()
        assert int(number) == acknowledged[session_id]
        acknowledged[session_id] += 1
    return acknowledged


@pytest.mark.parametrize(
    "rounds", [pytest.param(5, marks=pytest.mark.real), pytest.param(50, marks=[pytest.mark.accept, pytest.mark.timeout(900)])]
)
def test_nothing_acknowledged_is_lost_by_kill_9(tmp_path: Path, rounds: int) -> None:
    path = tmp_path / "store.db"
    chance = random.Random(4)
    total = 0
    for round_ in range(rounds):
        acknowledged = kill_while_it_appends(path, f"r{round_}", chance.uniform(0, 0.6))
        total += sum(acknowledged.values())
        asyncio.run(check_all_there(path, acknowledged))
        assert integrity(path) == "ok"
    assert total > 10 * rounds


@pytest.mark.real
@pytest.mark.parametrize("sync_takes_us", [0, 30_000, 100_000], ids="sync of {} us".format)
def test_two_processes_append_to_one_file(tmp_path: Path, shim: str, sync_takes_us: int) -> None:
    """On a slow disk one of them has the lock nearly all the time; the other gets its turns nevertheless."""
    path = tmp_path / "store.db"
    env = os.environ | ({"LD_PRELOAD": shim, "SYNC_TAKES_US": str(sync_takes_us)} if sync_takes_us else {})
    commands = [[*CHILD, "load", str(path), name, "60"] for name in ("a", "b")]
    children = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for command in commands]
    for child in children:
        out, said = child.communicate(timeout=100)
        assert child.returncode == 0, said.decode()[-2000:]
        assert len(out.splitlines()) == 60 * SESSIONS
    asyncio.run(check_all_there(path, {f"{name}-{i}": 60 for name in "ab" for i in range(SESSIONS)}))
    assert integrity(path) == "ok"


# --- the sync itself, seen from between SQLite and the kernel ---------------------------------------------------------

SHIM = textwrap.dedent(
    r"""
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <errno.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <unistd.h>
    static int is_log(int fd) {
        char link[64], path[4096];
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
        ssize_t n = readlink(link, path, sizeof path);
        return n > 4 && !memcmp(path + n - 4, "-wal", 4);
    }
    static int synced(int fd, const char *name) {
        const char *flag = getenv("SYNC_FAILS_WHILE");
        if (flag && !access(flag, F_OK)) { errno = EIO; return -1; }
        int (*real)(int) = dlsym(RTLD_NEXT, name);
        int result = real(fd);
        const char *slow = getenv("SYNC_TAKES_US");
        if (slow) usleep(atoi(slow));
        if (is_log(fd) && !result && getenv("SYNC_TRACE")) write(1, "sync\n", 5);
        return result;
    }
    int fsync(int fd) { return synced(fd, "fsync"); }
    int fdatasync(int fd) { return synced(fd, "fdatasync"); }
    static void wrote(int fd) { if (getenv("SYNC_TRACE") && is_log(fd)) write(1, "write\n", 6); }
    ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
        ssize_t (*real)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, "pwrite");
        ssize_t result = real(fd, data, n, at);
        wrote(fd);
        return result;
    }
    ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
        ssize_t (*real)(int, const void *, size_t, off64_t) = dlsym(RTLD_NEXT, "pwrite64");
        ssize_t result = real(fd, data, n, at);
        wrote(fd);
        return result;
    }
    """
)


@pytest.fixture
def shim(tmp_path: Path) -> str:
    """A library for LD_PRELOAD that reports each write and sync of the write-ahead log, or lets syncs fail."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and a C compiler")
    source, library = tmp_path / "shim.c", tmp_path / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-w", "-o", library, source, "-ldl"], check=True, timeout=60)
    return str(library)


@pytest.mark.real
def test_the_sync_precedes_the_acknowledgement(tmp_path: Path, shim: str) -> None:
    lines = run_child("steps", tmp_path / "store.db", 50, LD_PRELOAD=shim, SYNC_TRACE="1")
    for number in range(50):
        during = lines[lines.index(f"begin {number}") : lines.index(f"ack {number}")]
        assert "write" in during
        assert "sync" in during[len(during) - during[::-1].index("write") :], "the last write to the log was not synced before the end"


@pytest.mark.real
def test_a_failed_sync_is_not_acknowledged(tmp_path: Path, shim: str) -> None:
    lines = run_child("sick", tmp_path / "store.db", tmp_path / "flag", LD_PRELOAD=shim, SYNC_FAILS_WHILE=str(tmp_path / "flag"))
    assert lines[0].startswith("failed the completion store failed: disk I/O error")
    assert lines[1] == "healthy disk I/O error"
    assert lines[2:] == [f"ack {i}" for i in range(5)]
    asyncio.run(check_all_there(tmp_path / "store.db", {"sick": 5}))


# --- a full disk, a locked database -------------------------------------------------------------------------------------


def check_recovery(path: Path, lines: list[str], name: str, *words: str) -> None:
    failed = next(i for i, line in enumerate(lines) if line.startswith("failed"))
    assert failed > 10, "it was full before anything was written"
    assert any(word in lines[failed + 1] for word in words), lines[failed + 1]
    assert lines[failed + 2] == "healthy None"
    acknowledged = [line for line in lines if line.startswith("ack")]
    assert acknowledged == [f"ack {i}" for i in range(len(acknowledged))]
    assert len(acknowledged) == failed + 1
    asyncio.run(check_all_there(path, {name: len(acknowledged)}))
    assert integrity(path) == "ok"


@pytest.mark.real
def test_a_file_that_may_not_grow_any_more(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    check_recovery(path, run_child("full", path, 400_000), "full", "disk I/O error", "full")


@pytest.mark.real
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], capture_output=True, check=False, timeout=20)
    if mounted.returncode != 0:
        pytest.skip("may not mount a file system of its own")
    try:
        (disk / "ballast").write_bytes(b"x" * 2_000_000)
        check_recovery(disk / "store.db", run_child("crowded", disk / "store.db", disk / "ballast"), "crowded", "full", "disk I/O error")
    finally:
        subprocess.run(["umount", disk], check=True, timeout=20)


LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


def lock(path: Path) -> subprocess.Popen[bytes]:
    """Another process that holds the database until its stdin ends."""
    other = subprocess.Popen([sys.executable, "-c", LOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline() == b"locked\n"
    return other


async def test_a_database_that_another_process_has_locked(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    first, second, third = agent_session(turns=3, total=600)
    store = open_store(path, busy_timeout_s=0.2)
    await store.create_session(session())
    await store.append([first])
    other = lock(path)
    with pytest.raises(StoreError, match="database is locked"):
        await store.append([second])
    assert store.healthy == "database is locked"
    assert same(await store.completion("s", 0), first)  # type: ignore[arg-type]
    assert await store.completion("s", 1) is None
    other.communicate(timeout=20)
    await recovery(store)
    assert store.healthy is None  # by itself: nothing was written meanwhile
    await store.append([second])
    await store.append([third])
    await store.aclose()
    store = open_store(path)
    for expected in (first, second, third):
        assert same(await store.completion("s", expected.number), expected)  # type: ignore[arg-type]
    await store.aclose()


async def test_a_short_lock_is_waited_out(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = open_store(path)
    await store.create_session(session())
    other = lock(path)
    append = asyncio.create_task(store.append(agent_session(turns=1, total=300)))
    await asyncio.sleep(0.3)
    assert not append.done()
    await asyncio.to_thread(other.communicate, timeout=20)
    await append
    assert store.healthy is None
    await store.aclose()


@pytest.mark.real
async def test_a_postgres_that_dropped_its_connections(postgres: str, new_schema: Callable[[], str]) -> None:
    """An idle connection that the server (or a proxy) closed is noticed before a completion is given to it."""
    import psycopg

    place = new_schema()
    first, second = agent_session(turns=2, total=400)
    store = open_store(place)
    await store.create_session(session())
    await store.append([first])
    with contextlib.closing(psycopg.connect(f"{postgres}/postgres", autocommit=True)) as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = 'polar'")
    await store.append([second])
    assert store.healthy is None
    assert [completion.number async for completion in store.completions("s")] == [0, 1]
    await store.aclose()


@pytest.mark.real
async def test_a_postgres_that_loses_its_power_is_not_waited_for_by_the_hour(new_schema: Callable[[], str]) -> None:
    def settings(place: str) -> list[dict[str, str]]:
        engines = open_engines(place, busy_timeout_s=1.0, readers=1)
        found = []
        for engine in engines:
            with engine.connect() as connection:
                driver: Any = connection.connection.driver_connection
                found.append(driver.info.get_parameters())
            engine.dispose()
        return found

    place = new_schema()
    for found in settings(place):
        assert (found["tcp_user_timeout"], found["keepalives_idle"], found["connect_timeout"]) == ("30000", "10", "10")
    for found in settings(place + "&tcp_user_timeout=5000&connect_timeout=3"):
        assert (found["tcp_user_timeout"], found["keepalives_idle"], found["connect_timeout"]) == ("5000", "10", "3")


@pytest.mark.real
async def test_a_postgres_table_that_another_client_has_locked(new_schema: Callable[[], str]) -> None:
    import psycopg

    place = new_schema()
    first, second = agent_session(turns=2, total=400)
    store = open_store(place, busy_timeout_s=0.2)
    await store.create_session(session())
    await store.append([first])
    with contextlib.closing(psycopg.connect(place)) as other:
        other.execute("LOCK TABLE completions, meta IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StoreError, match="lock timeout"):
            await store.append([second])
        assert "lock timeout" in str(store.healthy)
        other.rollback()
    await recovery(store)
    assert store.healthy is None
    await store.append([second])
    assert same(await store.completion("s", 1), second)  # type: ignore[arg-type]
    await store.aclose()


@pytest.mark.real
def test_many_processes_open_a_new_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    children = [subprocess.Popen([*CHILD, "load", str(path), f"p{i}", "2"], stdout=subprocess.PIPE) for i in range(4)]
    for child in children:
        out, _ = child.communicate(timeout=100)
        assert child.returncode == 0
        assert len(out.splitlines()) == 2 * SESSIONS


async def test_a_note_of_delivery_that_comes_after_the_end_is_given_up(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    await store.create_session(session())
    await store.append(agent_session(turns=1, total=300))
    await store.aclose()
    await store.mark_delivered("s", 0)


async def test_a_caller_whose_loop_ends_meanwhile_does_not_stop_the_store(tmp_path: Path) -> None:
    """Between a look at the loop and the word to it, the loop may be closed: the writer has others to serve."""
    store = open_store(tmp_path / "store.db")
    try:
        ended = asyncio.new_event_loop()
        future = ended.create_future()
        ended.close()
        ended.is_closed = lambda: False  # type: ignore[method-assign]
        assert isinstance(store, SqlStore)
        store._writer._put(Job(Nothing(), future))
        async with asyncio.timeout(10):
            await store.create_session(session("one"))
    finally:
        await store.aclose()
        del ended.is_closed


class Nothing(Work):
    def write(self, connection: Connection) -> None:
        return None


async def test_a_store_that_is_closed_says_so(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db")
    await store.create_session(session("one"))
    await store.aclose()
    with pytest.raises(StoreError, match="the store is closed"):
        await store.session("one")
    with pytest.raises(StoreError, match="the store is closed"):
        await store.create_session(session("two"))
