"""kill -9 of the trainer at random moments: the run that goes on is the run that was never disturbed, bit for bit."""

from __future__ import annotations

import random
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import orjson
import pytest
import trainer_child
from safetensors.torch import load_file
from trainer_fork import forked
from trainer_parts import recorded_group, tiny_model

from polar.train.checkpoints import latest, load_run
from polar.train.metrics import read_metrics

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

    def __init__(self, steps: int, model: Path, groups: Path) -> None:
        self.steps = steps
        self._arguments = (str(model), str(groups), steps)

    def start(self, output: Path) -> BaseProcess:
        return forked(trainer_child.main, str(output), *self._arguments)

    def finish(self, output: Path) -> float:
        """Goes on to the end; the seconds that took."""
        began = time.monotonic()
        process = self.start(output)
        process.join(600)
        assert process.exitcode == 0
        return time.monotonic() - began


def curve(folder: Path) -> list[dict[str, float | None]]:
    """The run's numbers by step. Raises where a step stands there twice."""
    steps = [orjson.loads(line)["step"] for line in (folder / "metrics.jsonl").read_bytes().splitlines()]
    assert steps == sorted(set(steps)), "a step stands in metrics.jsonl twice, or out of order"
    return [{name: value for name, value in line.items() if not name.startswith(TIMES)} for line in read_metrics(folder)]


def killed(run: Run, folder: Path, kills: int, rng: random.Random, step_s: float) -> bool:
    """Kills the run so many times at random moments; `False`: it was done before the last of them struck."""
    for left in range(kills, 0, -1):
        done = len(read_metrics(folder))
        process = run.start(folder)
        wanted = done + rng.randint(0, (run.steps - done) // (left + 1))
        while process.is_alive() and len(read_metrics(folder)) < wanted:
            time.sleep(0.002)
        ends = time.monotonic() + rng.uniform(0, 2 * step_s)
        while time.monotonic() < ends and len(read_metrics(folder)) < run.steps - left:
            time.sleep(0.002)
        process.kill()
        process.join(60)
        if process.exitcode == 0:
            return False
        assert process.exitcode == -signal.SIGKILL
    return True


def killed_and_undisturbed(folder: Path, steps: int, kills: int, seed: int) -> None:
    """Compares the two, after so many kills at random moments of the second run."""
    rng = random.Random(seed)
    run = Run(steps, tiny_model(folder / "model"), recorded(folder / "groups.jsonl", 4 * steps))
    step_s = run.finish(folder / "whole") / steps

    while not killed(run, folder / "killed", kills, rng, step_s):  # a busy machine may kill too late: then all of it once more
        shutil.rmtree(folder / "killed")
    run.finish(folder / "killed")

    assert curve(folder / "killed") == curve(folder / "whole")
    assert [line["step"] for line in curve(folder / "killed")] == list(range(1, steps + 1))
    places = [latest(folder / name / "checkpoints") for name in ("whole", "killed")]
    assert places[0] is not None
    assert places[1] is not None
    assert load_run(places[0]) == load_run(places[1])
    first, second = (load_file(place / "model" / "model.safetensors") for place in places if place is not None)
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_twice_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    killed_and_undisturbed(tmp_path, steps=14, kills=2, seed=1)


@pytest.mark.accept
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_that_is_killed_at_ten_random_moments_ends_as_the_undisturbed_one(seed: int, tmp_path: Path) -> None:
    killed_and_undisturbed(tmp_path, steps=60, kills=10, seed=seed)
