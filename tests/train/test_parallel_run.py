"""`polar train` under torchrun: the settings of a run, started as a user starts it, end where one process ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from trainer_parts import recorded_group, tiny_model

from polar.train.metrics import read_metrics

STEPS = 3


def settings(folder: Path, name: str, **model: Any) -> Path:
    """A run from recorded groups, with a KL term, so that a reference is there, too."""
    file = folder / f"{name}.yaml"
    file.write_text(
        yaml.safe_dump(
            {
                "model": {"name": str(folder / "model"), **model},
                "recorded": str(folder / "recorded.jsonl"),
                "steps": STEPS,
                "output": str(folder / name),
                "batch": {"groups": 2, "samples": 3},
                "loss": {"beta": 0.01},
                "optimisation": {"lr": 1e-3, "token_budget": 64, "minibatches": 2},
                "checkpoints": {"every": 1, "keep": 1},
            }
        )
    )
    return file


def run(*command: str, code: int = 0) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
    assert done.returncode == code, done.stdout[-4000:]
    return done.stdout


def torchrun(count: int, *arguments: str, code: int = 0) -> str:
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), *rendezvous)
    return run(*launcher, "-m", "polar.cli", *arguments, code=code)


def weights(run: Path) -> dict[str, torch.Tensor]:
    (place,) = (run / "checkpoints").glob("step-*/model")
    (file,) = place.glob("*.safetensors")
    return load_file(file)


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("sharding", "lora"), [("full", False), ("none", True)])
def test_a_run_of_two_processes_is_a_run_of_one(tmp_path: Path, sharding: str, lora: bool) -> None:
    tiny_model(tmp_path / "model")
    groups = [recorded_group(number, (1.0, 0.0, 0.0)) for number in range(2 * STEPS)]
    lines = [result.model_dump_json() for group in groups for result in group.results]
    (tmp_path / "recorded.jsonl").write_text("\n".join(lines) + "\n")
    model: dict[str, Any] = {"sharding": sharding, **({"lora": {"r": 4}} if lora else {})}
    run(sys.executable, "-m", "polar.cli", "train", str(settings(tmp_path, "one", **model)))
    two = settings(tmp_path, "two", **model)
    torchrun(2, "train", str(two), "--steps", "2")
    torchrun(2, "train", str(two))  # goes on from its checkpoint
    assert [one["step"] for one in read_metrics(tmp_path / "two")] == [one["step"] for one in read_metrics(tmp_path / "one")]
    ours, theirs = weights(tmp_path / "two"), weights(tmp_path / "one")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-5)


@pytest.mark.real
def test_what_the_leader_refuses_is_not_buried_under_the_others_words(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / "recorded.jsonl").write_text(recorded_group(0).results[0].model_dump_json() + "\n")
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "something.txt").touch()
    said = torchrun(2, "train", str(settings(tmp_path, "one")), code=1)
    assert "holds something else than a run" in said
    assert "closed by peer" not in said
    assert "[rank1]" not in said
