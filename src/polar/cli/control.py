"""How the command talks to a running gateway: its control API, found through a state file that only its owner can read."""

from __future__ import annotations

import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.gateway.config import state_dir

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
    return state_dir() / "gateway.json"


def announce(admin: Admin, store: str) -> None:
    """Writes the state file; the next gateway of this user overwrites it."""
    path = state_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(orjson.dumps({"pid": os.getpid(), "admin_url": admin.url, "admin_token": admin.token, "store": store}))


def running() -> Admin:
    """The running gateway of this user. Raises `ConfigError` if none has been started."""
    state = _state()
    if state is None:
        raise ConfigError(f"no gateway is running ({state_file()} does not exist); start one with: polar gateway --engine URL")
    return Admin(str(state["admin_url"]), str(state["admin_token"]))


def store_url(given: str | None) -> str:
    """The store to read: as given, else the running (or last) gateway's, else the default."""
    if given:
        return given
    state = _state()
    return str(state_dir() / "polar.db") if state is None else str(state["store"])


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


def _state() -> JsonObject | None:
    try:
        return _object(state_file().read_bytes())
    except FileNotFoundError:
        return None


def _object(raw: bytes) -> JsonObject:
    found: JsonObject = orjson.loads(raw)
    return found
