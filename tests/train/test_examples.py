"""The ready settings are settings: each is read, its tasks can be asked for, and the CPU one really runs."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from typer.testing import CliRunner

from polar.cli.commands import app
from polar.errors import ConfigError
from polar.tasks import find
from polar.train.curriculum import split
from polar.train.metrics import read_metrics
from polar.train.requests import Requests
from polar.train.settings import load

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = sorted(EXAMPLES.glob("*.yaml"))
ROW = {"base_commit": "abc", "problem_statement": "It fails.", "FAIL_TO_PASS": ["test_a"], "PASS_TO_PASS": []}


def swe_data() -> Any:
    spec = importlib.util.spec_from_file_location("swe_data", EXAMPLES / "swe_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_the_three() -> None:
    assert [file.stem for file in FILES] == ["cpu", "one-gpu-lora", "paper-qwen3.5-4b-codex-8gpu"]
    for file in FILES:
        assert f"({file.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_settings_are_read_and_their_sessions_can_be_asked_for(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(file)
    assert config.tasks is not None
    if config.tasks.train.startswith("data/"):
        data = swe_data()
        (tmp_path / "data").mkdir()
        known = {"instance_id": "django__django-11099", "repo": "django/django", "version": "3.0", "test_patch": "diff"}
        data.write(tmp_path / "data" / "train.jsonl", [data.swe_gym({**ROW, "instance_id": "python__mypy-1", "eval_script": "pytest"})])
        data.write(tmp_path / "data" / "verified.jsonl", [data.verified({**ROW, **known})])
    monkeypatch.chdir(tmp_path)
    train, held_out = split(config.tasks)
    assert train
    assert held_out
    Requests(config, train, held_out).check()
    config.make_optimisation()
    config.make_loss()


def test_the_papers_recipe_is_the_papers() -> None:
    config = load(EXAMPLES / "paper-qwen3.5-4b-codex-8gpu.yaml")
    assert (config.batch.groups, config.batch.samples, config.steps) == (4, 16, 293 // 4)
    assert (config.optimisation.lr, config.optimisation.betas, config.optimisation.weight_decay) == (1e-6, (0.9, 0.98), 0.1)
    assert list(config.harnesses) == ["codex"]
    assert config.rollout.builder == "prefix_merging"


def test_rows_of_swe_gym_get_their_image_and_parser(tmp_path: Path) -> None:
    data = swe_data()
    row = data.swe_gym({**ROW, "instance_id": "Project-MONAI__MONAI-1", "eval_script": "pytest"})
    assert row["image"] == "xingyaoww/sweb.eval.x86_64.project-monai_s_monai-1:latest"
    data.write(tmp_path / "train.jsonl", [row, data.swe_gym({**ROW, "instance_id": "x__y-2"})])
    (task,) = find(str(tmp_path / "train.jsonl"))
    assert task.name == "Project-MONAI__MONAI-1"
    assert data.verified({"instance_id": "x__y-2"}) is None


@pytest.mark.parametrize("file", [file for file in FILES if file.stem != "cpu"], ids=lambda file: file.stem)
def test_what_an_example_needs_and_is_not_there_is_said(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code != 0
    assert isinstance(result.exception, ConfigError | SystemExit)


@pytest.mark.real
@pytest.mark.timeout(900)
def test_the_cpu_example_runs_and_goes_on(tmp_path: Path) -> None:
    torch.set_num_threads(2)
    fewer = ["--set", "evaluation.before=false", "--set", "evaluation.after=false", "--set", "checkpoints.every=1"]
    command = ["train", str(EXAMPLES / "cpu.yaml"), "--output", str(tmp_path / "run"), *fewer]
    for steps in (1, 2):
        result = CliRunner().invoke(app, [*command, "--steps", str(steps)])
        assert result.exit_code == 0, result.output
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    facts = json.loads((checkpoint / "run.json").read_text())
    assert facts["batches"] == 2
    assert [one["step"] for one in read_metrics(tmp_path / "run")][-1] == 2
