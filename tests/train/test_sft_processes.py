"""Several processes train one model to the numbers of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from sft_samples import config

from polar.train.metrics import read_metrics

FLAGS = ["--epochs", "3", "--batch-tokens", "80", "--token-budget", "60", "--lr", "1e-2"]


@pytest.mark.real
@pytest.mark.parametrize("more", [[], ["--lora", "4"]])
def test_two_processes_do_what_one_does(tmp_path: Path, more: list[str]) -> None:
    config(tmp_path)
    sft = ["-m", "polar.cli", "sft", "model", "data", *FLAGS, *more]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0"]
    for arguments, output in ([*sft, "-o", "one"], "one"), ([*launcher, *sft, "-o", "two"], "two"):
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        ended = subprocess.run([sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, timeout=200)
        assert ended.returncode == 0, ended.stderr.decode()
        assert (tmp_path / output / "model" / "model.safetensors").is_file()
    one, two = (read_metrics(tmp_path / output) for output in ("one", "two"))
    assert [line["step"] for line in one] == [line["step"] for line in two]
    for name in ("loss", "validation_loss", "grad_norm"):
        assert [line[name] for line in two if name in line] == pytest.approx([line[name] for line in one if name in line], rel=1e-3)
    ours, theirs = (load_file(tmp_path / output / "model" / "model.safetensors") for output in ("one", "two"))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert float((value - theirs[name]).abs().mean()) < 1e-4  # on the mean: Adam makes a step of any gradient, however close to 0
