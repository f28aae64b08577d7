"""A private PostgreSQL for tests: a cluster of its own on a loopback port, and empty schemas in it. A pytest plug-in."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polar.sockets import free_port


def _binary(name: str) -> str | None:
    return shutil.which(name) or next(iter(sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), reverse=True)), None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a running PostgreSQL server without a database name: a cluster of its own on a loopback port, gone afterwards."""
    pytest.importorskip("psycopg", reason="psycopg is not installed (pip install -e '.[postgres]' (in Polar's folder))")
    initdb, server = _binary("initdb"), _binary("postgres")
    if initdb is None or server is None:
        pytest.skip("no PostgreSQL server is installed")
    user = "nobody" if os.getuid() == 0 else None  # PostgreSQL refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="polar-pg-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        port = free_port()
        data = folder / "data"
        subprocess.run(
            [initdb, "-D", data, "-U", "polar", "-A", "trust", "-E", "UTF8", "--no-sync"],
            user=user, cwd=folder, check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        process = subprocess.Popen(
            [server, "-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", folder, "-c", "fsync=off"],
            user=user, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            url = f"postgresql://polar@127.0.0.1:{port}"
            _wait_for(url)
            yield url
        finally:
            process.send_signal(signal.SIGQUIT)
            process.wait(timeout=30)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(url: str) -> None:
    import psycopg

    deadline = time.monotonic() + 30
    while True:
        try:
            psycopg.connect(f"{url}/postgres").close()
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


_names = itertools.count()


def _schema(url: str) -> str:
    """A URL whose connections see a schema of their own: what a database would be, at a hundredth of the time."""
    import psycopg

    name = f"polar_{next(_names)}"
    with contextlib.closing(psycopg.connect(f"{url}/postgres", autocommit=True)) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
    return f"{url}/postgres?options=-csearch_path%3D{name}"


@pytest.fixture
def new_schema(postgres: str) -> Callable[[], str]:
    """Makes places in PostgreSQL, each empty."""
    return lambda: _schema(postgres)
