"""kill -9 of the trainer at random moments: the run that goes on is the run that was never disturbed, bit for bit."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path

import orjson
import pytest
from safetensors.torch import load_file
from trainer_parts import recorded_group, tiny_model

from polar.train.checkpoints import latest, load_run
from polar.train.metrics import read_metrics

CHILD = Path(__file__).with_name("trainer_child.py")
TIMES = ("time",)
"""What no two runs have in common: when it was, and how long it took."""


def recorded(path: Path, groups: int) -> Path:
    """Every fifth group teaches nothing, so that batches take more groups than they have."""
    lines = [
        result.model_dump_json()
        for number in range(groups)
        for result in recorded_group(number, (1.0, 1.0) if number % 5 == 2 else (1.0, 0.0)).results
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


class Run:
    """One run, in as many processes as it takes."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps

    def start(self, output: Path, model: Path, groups: Path) -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, str(CHILD), str(output), str(model), str(groups), str(self.steps)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def curve(folder: Path) -> list[dict[str, float | None]]:
    """The run's numbers by step. Raises where a step stands there twice."""
    steps = [orjson.loads(line)["step"] for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    assert steps == sorted(set(steps)), "a step stands in metrics.jsonl twice, or out of order"
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in read_metrics(folder)]


def killed_and_undisturbed(folder: Path, steps: int, kills: int, seed: int) -> int:
    """Compares the two; the number of kills that were made while the run was not done."""
    rng = random.Random(seed)
    model, groups = tiny_model(folder / "model"), recorded(folder / "groups.jsonl", 4 * steps)
    run = Run(folder, steps)
    began = time.monotonic()
    whole = run.start(folder / "whole", model, groups)
    said, problem = whole.communicate(timeout=600)
    took_s = time.monotonic() - began
    assert f"ended done after {steps}" in said, problem[-3000:]
    assert whole.returncode == 0

    made = 0
    while made < kills:
        process = run.start(folder / "killed", model, groups)
        done = len(read_metrics(folder / "killed"))
        wanted = done + rng.randint(0, max(1, (steps - done) // (kills - made + 1)))
        while process.poll() is None and len(read_metrics(folder / "killed")) < wanted:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.1 * took_s / steps))
        if process.poll() is not None:
            process.communicate()
            break
        process.kill()
        process.communicate()
        made += 1
    last = run.start(folder / "killed", model, groups)
    said, problem = last.communicate(timeout=600)
    assert f"ended done after {steps}" in said, problem[-3000:]

    assert curve(folder / "killed") == curve(folder / "whole")
    assert [line["step"] for line in curve(folder / "killed")] == list(range(1, steps + 1))
    places = [latest(folder / name / "checkpoints") for name in ("whole", "killed")]
    assert places[0] is not None
    assert places[1] is not None
    assert load_run(places[0]) == load_run(places[1])
    first, second = (load_file(place / "model" / "model.safetensors") for place in places if place is not None)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)
    return made


@pytest.mark.real
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_twice_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    assert killed_and_undisturbed(tmp_path, steps=14, kills=2, seed=1) == 2


@pytest.mark.accept
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_that_is_killed_at_ten_random_moments_ends_as_the_undisturbed_one(seed: int, tmp_path: Path) -> None:
    assert killed_and_undisturbed(tmp_path, steps=60, kills=10, seed=seed) == 10
