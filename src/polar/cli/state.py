"""Where a running gateway leaves its address and token, so that `polar session` needs no flags. Readable by its owner only."""

from __future__ import annotations

import os
from pathlib import Path

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.gateway.config import state_dir
from polar.gateway.gateway import Gateway


def state_file() -> Path:
    return state_dir() / "gateway.json"


def announce(gateway: Gateway) -> Path:
    """Writes the state file; the next gateway of this user overwrites it."""
    path = state_file()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    body = {
        "pid": os.getpid(),
        "admin_url": f"http://127.0.0.1:{gateway.config.admin_port}",
        "admin_token": gateway.admin_token,
        "store": gateway.config.store_url,
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(orjson.dumps(body))
    return path


def running() -> JsonObject:
    """The running gateway of this user. Raises `ConfigError` if none has been started."""
    path = state_file()
    try:
        state: JsonObject = orjson.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"no gateway is running ({path} does not exist); start one with: polar gateway --engine URL") from None
    return state


def store_url(given: str | None) -> str:
    """The store to read: as given, else the running (or last) gateway's, else the default."""
    if given:
        return given
    try:
        return str(running()["store"])
    except ConfigError:
        return str(state_dir() / "polar.db")
