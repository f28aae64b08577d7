"""`kill -9` of `polar sft` at any moment, and the same command again: the curve and the weights of a run that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sft_samples import config, exported, model, tokens

from polar.train.metrics import FILE, read_metrics
from polar.train.sft_config import SftConfig

KILLS = 8


def command(settings: SftConfig, output: Path) -> list[str]:
    given = settings.model_dump(exclude={"model", "data", "output", "metrics", "lora", "betas"}, exclude_none=True)
    flags = [part for name, value in given.items() for part in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "polar.cli", "sft", settings.model, settings.data, "-o", str(output), *flags]


def start(settings: SftConfig, output: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(settings, output), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


def lines_in(output: Path) -> int:
    return (output / FILE).read_bytes().count(b"\n") if (output / FILE).is_file() else 0


def until(process: subprocess.Popen[bytes], reached: Callable[[], bool], timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        if process.poll() is not None:
            return
        assert time.monotonic() < deadline
        time.sleep(0.002)


def curve(output: Path) -> list[tuple[Any, ...]]:
    """What of the metrics is no time."""
    return [tuple(line.get(name) for name in ("step", "loss", "validation_loss", "lr", "grad_norm")) for line in read_metrics(output)]


@pytest.fixture
def settings(tmp_path: Path) -> SftConfig:
    """A hundred and some steps, with a checkpoint every seventh."""
    model(tmp_path / "model")
    exported(tmp_path / "data", {"train": [tokens(i, 16 + i % 9) for i in range(40)], "validation": [tokens(1)]})
    return config(tmp_path, epochs=14, batch_tokens=90, checkpoint_every=7, evaluate_every=10)


@pytest.mark.real
def test_killed_and_resumed_runs_end_alike(tmp_path: Path, settings: SftConfig) -> None:
    straight = start(settings, tmp_path / "straight")
    _, errors = straight.communicate(timeout=200)
    assert straight.returncode == 0, errors.decode()
    expected = curve(tmp_path / "straight")
    chance, output, killed = random.Random(11), tmp_path / "killed", 0
    while True:
        process = start(settings, output)
        if killed < KILLS:
            had = lines_in(output)
            wait_s = chance.random() * 0.1
            # the first dies before its first checkpoint
            wanted = had + (4 if killed == 0 else chance.randint(1, len(expected) // KILLS))
            until(process, lambda wanted=wanted: lines_in(output) >= wanted)  # type: ignore[misc]
            time.sleep(wait_s)
            process.kill()
        _, errors = process.communicate(timeout=200)
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, errors.decode()
        killed += 1
    assert killed >= 4
    assert curve(output) == expected
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (output, tmp_path / "straight"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert sorted(path.name for path in output.iterdir() if path.name.startswith(".")) == []


@pytest.mark.real
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_with_a_checkpoint(tmp_path: Path, settings: SftConfig, number: signal.Signals) -> None:
    process = start(settings, tmp_path / "out")
    until(process, lambda: lines_in(tmp_path / "out") >= 3)
    process.send_signal(number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 130, errors.decode()
    last = read_metrics(tmp_path / "out")[-1]["step"]
    assert (tmp_path / "out" / "checkpoints" / f"step-{last:06d}").is_dir()
    assert f"stopped after step {last} of" in errors.decode()
    again = start(settings, tmp_path / "out")
    _, errors = again.communicate(timeout=200)
    assert again.returncode == 0, errors.decode()
    assert f"going on after step {last} of" in errors.decode()
    steps = [line["step"] for line in read_metrics(tmp_path / "out")]
    assert steps == list(range(len(steps)))
