"""`train.yaml`: defaults that work, short forms, and errors that name the setting and the nearest that there is."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import pytest

from polar.errors import ConfigError
from polar.train import settings
from polar.train.advantages import Advantage
from polar.train.config import Schedule, TrainConfig
from polar.train.learner import Optimisation
from polar.train.learner import Schedule as LearnerSchedule
from polar.train.loss import Loss

LEAST: dict[str, Any] = {"model": "tiny-qwen3", "tasks": "demo"}


def parse(**more: Any) -> TrainConfig:
    return settings.parse({**LEAST, **more})


def test_model_and_tasks_are_enough() -> None:
    config = parse()
    assert (config.model.name, config.tasks.train if config.tasks else None) == ("tiny-qwen3", "demo")
    assert config.engine.embedded
    assert config.harnesses == {"pi": 1.0}


def test_the_algorithm_has_the_defaults_of_its_own_classes() -> None:
    config = parse()
    assert config.make_advantage() == Advantage()
    assert config.make_loss() == Loss()
    assert asdict(config.make_optimisation()) == asdict(Optimisation())
    assert get_args(Schedule) == get_args(LearnerSchedule)


def test_a_schedule_ends_with_the_run() -> None:
    config = parse(steps=7, optimisation={"schedule": "cosine", "minibatches": 2})
    assert config.make_optimisation().total_steps == 14


def test_short_forms() -> None:
    config = parse(
        harnesses=["pi", "codex"], engine="http://127.0.0.1:8000", rollout={"runtime": "docker"}, model={"name": "x", "lora": {}}
    )
    assert config.harnesses == {"pi": 1.0, "codex": 1.0}
    assert config.engine.urls == ["http://127.0.0.1:8000"]
    assert config.rollout.runtime.backend == "docker"
    assert config.model.lora is not None
    assert parse(harnesses="codex", engine="embedded").engine.embedded
    assert parse(engine=["http://a", "http://b"]).engine.urls == ["http://a", "http://b"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimization": {}}, "optimization: there is no such setting; is optimisation meant?"),
        ({"loss": {"clip_hi": 1}}, "loss.clip_hi: there is no such setting; is loss.clip_high meant?"),
        ({"batch": {"samples": 1}}, "batch.samples: Input should be greater than or equal to 2"),
        ({"loss": {"aggregation": "fixed_length"}}, "loss.fixed_length: the aggregation of that name (loss.aggregation) needs it"),
        ({"recorded": "x"}, "tasks: give either tasks, to roll them out, or recorded"),
        ({"tasks": None}, "tasks: give either tasks, to roll them out, or recorded"),
        ({"harnesses": {}}, "harnesses: name at least one"),
        ({"harnesses": {"pi": 0}}, "harnesses.pi: Input should be greater than 0"),
        ({"evaluation": {"k": [1, 8], "samples": 4}}, "evaluation.k: pass@8 needs 8 samples"),
        ({"rollout": {"min_usable": 20}}, "rollout.min_usable: it is more than the 16 sessions of a group"),
        ({"batch": {"groups": 4, "most_groups": 2}}, "batch.most_groups: it is less than batch.groups, 4"),
        ({"temperature": float("inf")}, "temperature: Input should be a finite number"),
        ({"model": None}, "model: "),
        ({"sync": {"adapter": "mine"}}, "sync.adapter: the model is trained whole"),
        ({"model": {"name": "m", "lora": {"dropout": 0.05}}}, "model.lora.dropout: it is for polar sft"),
        ({"sync": {"adapter": "mine"}, "model": {"name": "m", "lora": {}}}, "sync.adapter: the embedded engine takes no adapters"),
        ({"optimisation": {"betas": [0.9, 1.0]}}, "optimisation.betas: each is 0 or more and less than 1"),
        ({"rollout": {"agent": {"no_such": 1}}}, "rollout.agent: no_such: Extra inputs are not permitted"),
        ({"rollout": {"agents": {"pi": {"env": {"A": 3}}}}}, "rollout.agents: pi.env.A: Input should be a valid string"),
        ({"rollout": {"agent": {"import_path": "a:B"}}}, "rollout.agent: an agent needs either a harness or an import_path"),
        ({"seed": 1 << 70}, "seed: Input should be less than"),
    ],
)
def test_what_is_wrong_is_said_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse(**wrong)


def test_settings_on_the_command_line_go_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model: tiny-qwen3\ntasks: demo\noptimisation:\n  lr: 1.0e-5\n")
    config = settings.load(path, ["optimisation.lr=1e-4", "model.dtype=bfloat16", "tasks.held_out=coding", "metrics=[tensorboard]"])
    assert config.optimisation.lr == 1e-4
    assert (config.model.name, config.model.dtype) == ("tiny-qwen3", "bfloat16")
    assert config.tasks is not None
    assert (config.tasks.train, config.tasks.held_out) == ("demo", "coding")
    assert config.metrics == ["tensorboard"]


@pytest.mark.parametrize(
    ("overrides", "of_the_file", "of_set"),
    [
        (["stepz=3"], [], ["stepz: there is no such setting; is steps meant?"]),
        (["optimisation.lr=0"], [], ["optimisation.lr: Input should be greater than 0"]),
        (["loss={beta: -1}"], [], ["loss.beta: Input should be greater than or equal to 0"]),
        (["loss.aggregation=fixed_length"], [], ["loss.fixed_length: the aggregation of that name (loss.aggregation) needs it"]),
        (["recorded=x"], [], ["tasks: give either tasks, to roll them out, or recorded"]),
        (["seed.x=1"], [], ["seed: Input should be a valid integer"]),
        (["lr=1"], ["optimisation.l: there is no such setting"], ["lr: there is no such setting; is optimisation.lr meant?"]),
        (["optimisation.lr=1"], ["optimisation.l: there is no such setting; is optimisation.lr meant?"], []),
    ],
)
def test_what_is_wrong_is_said_of_the_place_where_it_stands(
    overrides: list[str], of_the_file: list[str], of_set: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("model: tiny-qwen3\ntasks: demo\n" + ("optimisation: {l: 1}\n" if of_the_file else ""))
    with pytest.raises(ConfigError) as caught:
        settings.load(path, overrides)
    said = str(caught.value)
    before, _, after = said.partition("--set: these are wrong:\n")
    assert (f"{path}: these are wrong:" in before) == bool(of_the_file)
    assert all(line in before for line in of_the_file)
    assert all(line in after for line in of_set)
    assert len(said.splitlines()) == sum(len(lines) + 1 for lines in (of_the_file, of_set) if lines)


@pytest.mark.parametrize("override", ["steps", "=3", "seed.x=1", "steps=[1", "steps=" + "1" * 5000])
def test_an_override_that_is_none_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        settings.overlaid({**LEAST, "seed": 1}, [override])


def test_reading_settings_and_a_dry_run_load_no_torch() -> None:
    program = "import sys, polar, polar.cli.commands, polar.train.price, polar.train.requests; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
