"""How the command talks to a running gateway: its control API, found through state files that only their owner can read.

Each gateway has one in `gateways/` of the state directory, from its start to its end, and holds a lock on it: a file without one was left
by a gateway that was killed. `gateway.json` beside it is a copy of the newest; it stays, so that commands that read find the last store.
"""

from __future__ import annotations

import fcntl
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO
from urllib.parse import urlsplit

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.folders import state_dir

if TYPE_CHECKING:
    from polar.gateway.gateway import Gateway


@dataclass(frozen=True, slots=True)
class Admin:
    """A control API and its token."""

    url: str
    token: str

    @classmethod
    def of(cls, gateway: Gateway) -> Admin:
        return cls(f"http://127.0.0.1:{gateway.config.admin_port}", gateway.admin_token)


def state_file() -> Path:
    """The newest gateway's state, or that of the last one."""
    return state_dir() / "gateway.json"


@contextmanager
def announced(admin: Admin, store: str) -> Iterator[None]:
    """Makes this gateway known to the commands of this user, until it ends. The newest one is who they talk to."""
    folder = state_dir() / "gateways"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    state = {"pid": os.getpid(), "started": time.time(), "admin_url": admin.url, "admin_token": admin.token, "store": store_place(store)}
    path = folder / f"{os.getpid()}-{urlsplit(admin.url).port}.json"
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb", opener=_private) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # before it has its name: whoever finds it finds it locked
        file.write(orjson.dumps(state))
        file.flush()
        temporary.replace(path)
        _replace(state_file(), state)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            others = alive()
            if others:
                _replace(state_file(), others[0])


def alive() -> list[JsonObject]:
    """The states of the gateways that run, newest first. Files of dead ones are removed."""
    found = []
    for path in (state_dir() / "gateways").glob("*.json"):
        try:
            with path.open("rb") as file:
                if not _locked(file):
                    path.unlink(missing_ok=True)
                    continue
                found.append(_object(file.read()))
        except FileNotFoundError:  # it ended meanwhile
            continue
    return sorted(found, key=lambda state: float(state["started"]), reverse=True)


def running() -> Admin:
    """The newest gateway of this user that runs. Raises `ConfigError` if none does."""
    states = alive()
    if not states:
        raise ConfigError("no gateway is running; start one with: polar gateway --engine URL")
    return Admin(str(states[0]["admin_url"]), str(states[0]["admin_token"]))


def store_url(given: str | None) -> str:
    """The store to read: as given, else the running (or last) gateway's, else the default."""
    if given:
        return given
    states = alive()
    if states:
        return str(states[0]["store"])
    try:
        return str(_object(state_file().read_bytes())["store"])
    except FileNotFoundError:
        return str(state_dir() / "polar.db")


def store_place(url: str) -> str:
    """The store's file as it is called in any folder; the URL of a server as it is."""
    file = store_file(url)
    return url if file is None else str(file)


def store_file(url: str) -> Path | None:
    """The SQLite file that `url` means; `None` for a server."""
    from polar.store.connect import sqlite_path  # with SQLAlchemy: not for the commands that open no store

    return sqlite_path(url) if "://" not in url or url.startswith("sqlite:") else None


def call(admin: Admin, method: str, path: str, body: JsonObject | None = None) -> JsonObject:
    """One call of the control API. Raises `ConfigError` with the gateway's own words."""
    request = urllib.request.Request(
        admin.url + path,
        data=None if body is None else orjson.dumps(body),
        method=method,
        headers={"authorization": f"Bearer {admin.token}", "content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return _object(answer.read())
    except urllib.error.HTTPError as error:
        answered = _object(error.read())
        if "error" not in answered:  # a red /health is an answer, too
            return answered
        raise ConfigError(str(answered["error"]["message"])) from error
    except urllib.error.URLError as error:
        raise ConfigError(
            f"the gateway at {admin.url} does not answer ({error.reason}); start one with: polar gateway --engine URL"
        ) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _replace(path: Path, state: JsonObject) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb", opener=_private) as file:
        file.write(orjson.dumps(state))
    temporary.replace(path)


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _object(raw: bytes) -> JsonObject:
    found: JsonObject = orjson.loads(raw)
    return found
