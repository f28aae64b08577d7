"""Checkpoints: everything that a run goes on from, on disk before the name is there.

    <folder>/step-000120/   model/ (save_pretrained), state.pt (optimiser, counters, random states), run.json (for people and the loop)
    <folder>/latest         the name of the newest complete one

A checkpoint is written beside its place, synced, and renamed: one that was being written when the process died is not seen, and is removed
by the next. Knows no engine and no loss.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polar.errors import ConfigError
from polar.train import disk
from polar.train.disk import saving
from polar.train.learner import Learner

_NAME = re.compile(r"step-\d{6,}")


@dataclass(slots=True)
class RunState:
    """Where a run is. `policy_version`: the weights' version; `batches`: trained so far; `position`: of the data, in whatever form its
    source keeps it (JSON)."""

    policy_version: int = 0
    batches: int = 0
    position: dict[str, Any] = field(default_factory=dict)


def save(folder: Path, learner: Learner, run: RunState, *, keep: int = 2) -> Path:
    """Writes one and removes all but the newest `keep`, and those of later steps: it went on from an earlier one than they are. When it
    returns, it survives a crash of the machine. Raises `SaveFailed` (a full disk); then nothing of it is left, and the others are."""
    name = f"step-{run.batches:06d}"
    making, place = folder / f".{name}.{os.getpid()}", folder / name
    with saving(f"the checkpoint of step {run.batches}", folder):
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        making.mkdir()
        try:
            _write(making, learner, run)
        except BaseException:
            _clear(folder)
            raise
        shutil.rmtree(place, ignore_errors=True)
        making.rename(place)
        _point(folder, name)
    _prune(folder, place, keep)
    return place


def _write(making: Path, learner: Learner, run: RunState) -> None:
    """Everything, synced."""
    learner.save_model(making / "model")
    disk.save(
        {
            "optimizer": learner.optimizer_state(),
            "steps": learner.steps,
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": np.random.get_state(legacy=False),
            "python": random.getstate(),
        },
        making / "state.pt",
    )
    facts = {"policy_version": run.policy_version, "batches": run.batches, "position": run.position, "optimizer_steps": learner.steps}
    (making / "run.json").write_text(json.dumps(facts))
    for file in making.rglob("*"):
        _sync(file)
    _sync(making)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint; `None`: there is none."""
    with contextlib.suppress(FileNotFoundError):
        place = folder / (folder / "latest").read_text().strip()
        if (place / "run.json").is_file():
            return place
    return next(reversed(_complete(folder)), None)


def load_run(place: Path) -> RunState:
    """What `run.json` says. Raises `ConfigError` for a folder that is no checkpoint."""
    try:
        facts = json.loads((place / "run.json").read_text())
        return RunState(int(facts["policy_version"]), int(facts["batches"]), dict(facts["position"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{place} is not a checkpoint: {error}") from error


def restore(place: Path, learner: Learner) -> RunState:
    """Puts a checkpoint's state into a learner whose policy was loaded from `place / "model"`. Random generators too.

    The machine may have other devices, or fewer, than the one that saved it. Raises `ConfigError` where the checkpoint is of another
    model or optimiser.
    """
    run = load_run(place)
    # Our own file: it holds generators' states, not only tensors. What it holds is copied to where it belongs, one tensor after another.
    state = torch.load(place / "state.pt", map_location="cpu", weights_only=False)
    try:
        learner.load_optimizer_state(state["optimizer"])
    except ValueError as error:
        raise ConfigError(f"{place}: its optimiser does not fit this model ({error})") from error
    learner.steps = state["steps"]
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, generator in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(generator, device)
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    return run


def _complete(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [place for place in folder.iterdir() if _NAME.fullmatch(place.name) and (place / "run.json").is_file()]
    return sorted(found, key=lambda place: int(place.name.removeprefix("step-")))


def _prune(folder: Path, newest: Path, keep: int) -> None:
    places = _complete(folder)
    end = places.index(newest) + 1
    for place in [*places[: max(0, end - keep)], *places[end:]] if keep else ():
        shutil.rmtree(place, ignore_errors=True)


def _clear(folder: Path) -> None:
    """Of what a process that was killed was writing: it may be what fills the disk."""
    for left in folder.glob(".step-*"):
        shutil.rmtree(left, ignore_errors=True)


def _point(folder: Path, name: str) -> None:
    temporary = folder / f".latest.{os.getpid()}"
    temporary.write_text(name)
    _sync(temporary)
    temporary.replace(folder / "latest")
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
