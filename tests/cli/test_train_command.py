"""`polar train` on the command line: what it refuses, the dry run, and a run that is stopped and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from polar.train.metrics import read_metrics

POLAR = [sys.executable, "-m", "polar.cli", "train"]
PARTS = Path(__file__).parent.parent / "train"


def polar_train(*options: str, timeout_s: float = 400) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*POLAR, *options], capture_output=True, text=True, timeout=timeout_s, check=False)


def settings(path: Path, **more: object) -> str:
    path.write_text(yaml.safe_dump({"model": "tiny-qwen3", "tasks": "demo", **more}))
    return str(path)


def test_wrong_settings_are_said_before_anything_is_made(tmp_path: Path) -> None:
    done = polar_train(settings(tmp_path / "train.yaml", stepz=3), "-o", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "stepz: there is no such setting; is steps meant?" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_harness_that_does_not_exist_is_said_at_once(tmp_path: Path) -> None:
    done = polar_train(settings(tmp_path / "train.yaml", harnesses="codexx"), "--dry-run")
    assert done.returncode == 2
    assert "codex" in done.stderr


def test_neither_settings_nor_a_run(tmp_path: Path) -> None:
    assert "name either a file of settings, or --resume" in polar_train().stderr
    assert "holds no run of polar train" in polar_train("--resume", str(tmp_path)).stderr


def test_a_dry_run_starts_nothing_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    done = polar_train(settings(tmp_path / "train.yaml"), "--dry-run", "-o", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert "time of rollouts" in done.stdout
    assert "assumed" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"attention": "flash_attention_2"}, "model: attention 'flash_attention_2' cannot be had"),
        ({"lora": {"target_modules": ["query"]}}, "model: lora.target_modules ['query'] fits no layer"),
    ],
)
def test_a_dry_run_refuses_what_the_model_could_not_be_loaded_with(model: dict[str, object], said: str, tmp_path: Path) -> None:
    path = settings(tmp_path / "train.yaml", model={"name": "tiny-qwen3", **model})
    done = polar_train(path, "--dry-run", "-o", str(tmp_path / "run"))
    assert done.returncode == 2
    assert said in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_goes_on_from_its_folder(number: signal.Signals, tmp_path: Path) -> None:
    sys.path.insert(0, str(PARTS))
    from test_trainer_kill import recorded
    from trainer_parts import tiny_model

    recorded(tmp_path / "groups.jsonl", 800)
    path = tmp_path / "train.yaml"
    given = {
        "model": str(tiny_model(tmp_path / "model")),
        "recorded": str(tmp_path / "groups.jsonl"),
        "steps": 200,
        "batch": {"groups": 2, "samples": 2},
        "checkpoints": {"every": 1000},
        "output": str(tmp_path / "run"),
    }
    path.write_text(yaml.safe_dump(given))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*POLAR, str(path)], stderr=subprocess.PIPE, text=True, env=environment)
    while process.poll() is None and len(read_metrics(tmp_path / "run")) < 5:
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=400)
    assert process.returncode == 130, said
    assert "stopped after step" in said
    assert "the same command goes on" in said
    done = len(read_metrics(tmp_path / "run"))
    assert 5 <= done < 200
    again = polar_train("--resume", str(tmp_path / "run"), "--steps", str(done + 2))
    assert again.returncode == 0, again.stderr
    assert f"going on in {tmp_path / 'run'} after step {done}" in again.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == list(range(1, done + 3))
