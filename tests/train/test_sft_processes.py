"""Several processes train one model to the numbers of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file
from sft_samples import config

from polar.sockets import free_port
from polar.train.metrics import read_metrics

FLAGS = ["--epochs", "3", "--batch-tokens", "80", "--token-budget", "60", "--lr", "1e-2"]


def train(folder: Path, output: str, processes: int, more: list[str], *, expected: Sequence[int] = (0, 0)) -> list[str]:
    """As `torchrun` starts them. What each of them says."""
    command = [sys.executable, "-m", "polar.cli", "sft", "model", "data", *FLAGS, *more, "-o", output]
    port = free_port()
    shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = []
    try:
        for rank in range(processes):
            own = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with (folder / f"{output}-{rank}.log").open("wb") as log:
                started.append(subprocess.Popen(command, cwd=folder, env=own, stdout=log, stderr=subprocess.STDOUT))
        for rank, process in enumerate(started):
            assert process.wait(timeout=240) == expected[rank], (folder / f"{output}-{rank}.log").read_text()
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(folder / f"{output}-{rank}.log").read_text() for rank in range(processes)]


@pytest.mark.real
@pytest.mark.parametrize("more", [[], ["--lora", "4"]], ids=["whole", "lora"])
def test_two_processes_do_what_one_does(tmp_path: Path, more: list[str]) -> None:
    config(tmp_path)
    train(tmp_path, "one", 1, more)
    train(tmp_path, "two", 2, more)
    one, two = (read_metrics(tmp_path / output) for output in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for name in ("loss", "validation_loss", "grad_norm"):
        assert [line[name] for line in two if name in line] == pytest.approx([line[name] for line in one if name in line], rel=1e-3)
    ours, theirs = (load_file(tmp_path / output / "model" / "model.safetensors") for output in ("one", "two"))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert float((value - theirs[name]).abs().mean()) < 1e-4  # on the mean: Adam makes a step of any gradient, however close to 0


@pytest.mark.real
def test_where_the_leader_has_nothing_to_do_or_refuses_the_others_end_in_silence(tmp_path: Path) -> None:
    """A launcher calls a run failed if any of its processes is."""
    config(tmp_path)
    train(tmp_path, "one", 1, [])
    said = train(tmp_path, "one", 2, [])
    assert "nothing to do" in said[0]
    assert said[1] == ""
    said = train(tmp_path, "one", 2, ["--seed", "5"], expected=(2, 0))
    assert "holds a run with another seed" in said[0]
    assert said[1] == ""
