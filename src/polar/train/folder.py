"""A run's folder: what the run is called, with which settings it was begun, and that no two processes train in it. Knows no torch.

run.json            the run's id and the settings that it was begun with
metrics.jsonl       a line a step (`polar.train.metrics`)
checkpoints/        where it goes on (`polar.train.checkpoints`)
recorded.txt        which groups a run on recorded ones began with (`polar.train.checks`)
tasks.txt           which tasks a live run began with (the same)
weights/            the newest versions, as the engines load them
evaluations/        results of the held-out tasks, a file an evaluation
rollout/            the run's own service and node: stores, logs, artefacts
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.train.config import TrainConfig
from polar.train.disk import saving

FIXED = ("tasks", "recorded", "harnesses", "seed", "shuffle_rewards", "temperature")
FIXED_IN = {
    "model": ("name", "dtype", "lora"),
    "batch": ("groups", "samples", "most_groups"),
    "advantage": ("baseline", "zero_variance"),
    "evaluation": ("samples", "harnesses"),
}
"""What a run cannot change and still be the same run: which weights it trains, what its numbered groups are, and how many of
them a step takes. How the weights are laid out and computed is free: who is short of memory goes on another way."""


KEPT = ("checkpoints", "evaluations", "rollout", "metrics.jsonl")
"""What there is of a run that has begun."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """`begun`: whether the run was there before."""

    path: Path
    run_id: str
    begun: bool

    @property
    def rollout(self) -> Path:
        return self.path / "rollout"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"


@contextmanager
def opened(config: TrainConfig) -> Iterator[RunFolder]:
    """The run's folder, made or found, and locked for as long as the context lasts.

    Raises `ConfigError` for a folder that is something else's, that another process trains in, or whose run was begun with settings that
    would make it another run; `SaveFailed` for one that cannot be written to.
    """
    path = Path(config.output).expanduser() if config.output else Path("runs") / time.strftime("train-%Y%m%d-%H%M%S")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"output: {path} is a file")
    if path.is_dir() and _holds_anything(path) and not (path / "run.json").is_file():
        raise ConfigError(f"output: {path} holds something else than a run; name another folder")
    path = path.resolve()
    with locked(path, f"output: another process trains in {path}"):
        yield _identified(path, config)


@contextmanager
def locked(path: Path, why_not: str) -> Iterator[None]:
    """A folder, made if need be, that is this process's alone. Raises `ConfigError` that says `why_not`."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(why_not) from None
        yield
    finally:
        os.close(lock)


def _holds_anything(path: Path) -> bool:
    """Beyond what a run leaves that ended before it had a name (killed, or on a full disk)."""
    return any(file.name != ".lock" and not file.name.startswith(".run.json.") for file in path.iterdir())


def read_run(path: Path) -> tuple[str, JsonObject]:
    """The id and the settings of the run in a folder. Raises `ConfigError` where there is none."""
    try:
        facts = orjson.loads((path / "run.json").read_bytes())
        return str(facts["id"]), dict(facts["settings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no run of polar train ({error})") from error


def _identified(path: Path, config: TrainConfig) -> RunFolder:
    settings = config.model_dump(mode="json")
    if (path / "run.json").is_file():
        run_id, begun_with = read_run(path)
        changed = [name for name, before, now in _fixed(begun_with, settings) if before != now]
        if not changed:
            return RunFolder(path, run_id, True)
        if any((path / name).exists() for name in KEPT):  # else it never came so far as to be a run: settings were wrong, and are mended
            raise ConfigError(f"{path} holds a run with another {', '.join(changed)}: go on with the same settings, or name another output")
    run_id = f"train-{secrets.token_hex(4)}"
    making = path / f".run.json.{os.getpid()}"
    with saving("the run's settings", path):
        with making.open("wb") as file:
            file.write(orjson.dumps({"id": run_id, "settings": settings}, option=orjson.OPT_INDENT_2))
            file.flush()
            os.fsync(file.fileno())
        making.replace(path / "run.json")
    return RunFolder(path, run_id, False)


def _fixed(before: JsonObject, now: JsonObject) -> Iterator[tuple[str, Any, Any]]:
    for name in FIXED:
        yield name, before.get(name), now.get(name)
    for section, names in FIXED_IN.items():
        for name in names:
            yield f"{section}.{name}", (before.get(section) or {}).get(name), (now.get(section) or {}).get(name)
