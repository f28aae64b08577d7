"""What a run will take: reckoned from what was measured before what is stated before what is assumed, and it says which."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from trainer_parts import recorded_group, tiny_model
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from polar.cli.train_report import amount
from polar.errors import ConfigError
from polar.train.config import TrainConfig
from polar.train.price import ASSUMED, Figure, price


def config(**more: Any) -> TrainConfig:
    least: dict[str, Any] = {"model": "tiny-qwen3", "tasks": "demo", "steps": 10, "batch": {"groups": 4, "samples": 8}}
    return TrainConfig.model_validate({**least, **more})


def results(path: Path) -> Path:
    """Two groups of two sessions; each has 12 sampled tokens and a row of 20; one group teaches. A session takes 3 s."""
    lines = []
    for group in (recorded_group(0, (1.0, 0.0)), recorded_group(1, (1.0, 1.0))):
        for result in group.results:
            result.timing.run_ms = 3000.0
            lines.append(result.model_dump_json())
    path.write_text("\n".join(lines))
    return path


def test_without_anything_known_the_figures_are_called_assumed() -> None:
    found = price(config())
    assert found["sampled_tokens"] == Figure("sampled_tokens", ASSUMED["sampled_tokens"], "tokens a session", "assumed")
    assert found["sessions"].origin == "assumed"
    assert found["steps"].origin == "exact"
    assert found["time of steps"].value is None
    assert "price.train_tokens_per_second" in found["time of steps"].why


def test_measured_sessions_are_worth_more_than_stated_ones(tmp_path: Path) -> None:
    stated = config(
        price={"sampled_tokens": 9, "train_tokens_per_second": 100}, rollout={"at_once": 2}, evaluation={"before": False, "after": False}
    )
    found = price(stated, results(tmp_path / "results.jsonl"))
    assert (found["sampled_tokens"].value, found["sampled_tokens"].origin) == (12, "measured")
    assert (found["row_tokens"].value, found["teaching"].value) == (20, 0.5)
    assert found["groups a step"].value == 8
    assert found["sessions"].value == 10 * 8 * 8
    assert found["tokens sampled"].value == 640 * 12
    assert found["tokens of trained rows"].value == 10 * 4 * 8 * 20
    assert found["time of rollouts"].value == pytest.approx(640 * 3 / 2 / 3600)
    assert found["time of steps"].value == pytest.approx(6400 / 100 / 3600)
    assert found["time of steps"].origin == "stated"
    assert found["time in all"].value == found["time of rollouts"].value


def test_without_rollouts_ahead_the_two_take_turns() -> None:
    found = price(config(max_staleness=0, price={"train_tokens_per_second": 1000}))
    assert found["time in all"].value == pytest.approx((found["time of rollouts"].value or 0) + (found["time of steps"].value or 0))


def test_arithmetic_follows_from_the_parameters(tmp_path: Path) -> None:
    model = tiny_model(tmp_path / "model")
    found = price(config(model=str(model), price={"row_tokens": 1000, "tflops": 1.0}))
    parameters = found["parameters"].value or 0
    assert parameters == 61 * 16 + 2 * (3 * 16 * 24 + 16 * 16 + 2 * 16 * 8 + 16 * 16 + 2 * 8 + 2 * 16) + 16
    assert found["arithmetic of the steps"].value == 6 * parameters * 10 * 4 * 8 * 1000
    assert found["time of steps"].origin == "stated"
    assert found["memory for the state"].value == 16 * parameters


@pytest.mark.parametrize(
    ("more", "passes"),
    [({"lora": {}}, 4), ({"lora": {}, "gradient_checkpointing": True}, 6), ({"gradient_checkpointing": True}, 8)],
)
def test_frozen_weights_have_no_gradients_to_compute(more: dict[str, Any], passes: int, tmp_path: Path) -> None:
    found = price(config(model={"name": str(tiny_model(tmp_path / "model")), **more}, price={"row_tokens": 1000}))
    assert found["arithmetic of the steps"].value == passes * (found["parameters"].value or 0) * 10 * 4 * 8 * 1000


def test_of_experts_those_count_that_a_token_goes_through(tmp_path: Path) -> None:
    """Two of eight."""
    shape = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    made = AutoModelForCausalLM.from_config(Qwen3MoeConfig(vocab_size=61, head_dim=8, **shape, **experts))
    made.save_pretrained(tmp_path / "model")
    found = price(config(model=str(tmp_path / "model"), price={"row_tokens": 1000}))
    active = (found["parameters"].value or 0) - 2 * 6 * 3 * 16 * 32
    assert found["arithmetic of the steps"].value == pytest.approx(6 * active * 10 * 4 * 8 * 1000)
    assert found["memory for the state"].value == 16 * (found["parameters"].value or 0)


@pytest.mark.parametrize(
    ("more", "each"),
    [
        ({}, 16),
        ({"dtype": "bfloat16"}, 18),
        ({"dtype": "bfloat16", "sharding": "full"}, 16),
        ({"dtype": "bfloat16", "lora": {}}, 2),
    ],
)
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_memory_is_that_of_the_optimiser(more: dict[str, Any], each: int, beta: float, tmp_path: Path) -> None:
    """docs/scaling.md, "Memory". A KL term keeps a frozen copy, which with an adapter is the base that is there."""
    model = tiny_model(tmp_path / "model")
    found = price(config(model={"name": str(model), **more}, loss={"beta": beta}))
    copy = 0 if not beta or "lora" in more else 2 if "dtype" in more else 4
    assert found["memory for the state"].value == (each + copy) * (found["parameters"].value or 0)


def test_a_model_that_only_the_hub_has_leaves_its_figures_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.train.checks.check_place", lambda name: None)  # it has it
    found = price(config(model="some/model", engine="http://127.0.0.1:1"))
    assert found["parameters"].value is None
    assert found["memory for the state"].value is None
    assert amount(found["parameters"]) == "not known"


def test_steps_that_the_run_has_made_are_measured(tmp_path: Path) -> None:
    line = {"step": 1, "time": 0.0, "tokens/rows": 800, "time/step_s": 2.0, "tokens/sampled": 96, "sessions": 32, "groups": 4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**line, "groups/taught": 1}) + "\n")
    found = price(config(output=str(tmp_path), price={"train_tokens_per_second": 1, "row_tokens": 1}))
    assert found["time of steps"].value == pytest.approx((found["tokens of trained rows"].value or 0) / 400 / 3600)
    assert found["time of steps"].origin == "measured"
    assert (found["sampled_tokens"].value, found["row_tokens"].value, found["teaching"].value) == (3, 100, 0.25)


def test_memory_of_a_small_model_is_told_in_a_small_unit() -> None:
    assert amount(Figure("memory", 32 * 2**20, "bytes", "exact")) == "32.0 MiB"
    assert amount(Figure("memory", 3 * 2**30, "bytes", "exact")) == "3.0 GiB"


@pytest.mark.parametrize(
    ("evaluation", "times"), [({}, 2), ({"every": 3}, 5), ({"every": 5, "after": False}, 3), ({"before": False, "after": False}, 0)]
)
def test_evaluations_are_counted(evaluation: dict[str, Any], times: int) -> None:
    once = price(config(evaluation={"before": True, "after": False}))["evaluation sessions"].value
    assert once
    assert price(config(evaluation=evaluation))["evaluation sessions"].value == times * once


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"harnesses": "no-such-harness"}, "harnesses: no harness is called 'no-such-harness'"),
        ({"evaluation": {"harnesses": ["none-such"]}}, "evaluation.harnesses: no harness is called 'none-such'"),
        ({"rollout": {"builder": "none-such"}}, "rollout.builder: no builder is called 'none-such'"),
        ({"rollout": {"agent": {"settings": {"context": "x"}}}}, "task .* under pi: agent.settings.context is a whole number"),
        ({"engine": {"kind": "no-such-kind"}}, "engine.kind: 'no-such-kind' is not known"),
        ({"rollout": {"runtime": "no-such-runtime"}}, "rollout.runtime: no runtime is called 'no-such-runtime'"),
        ({"model": "/no/such/model"}, "model: there is no folder /no/such/model"),
        ({"model": "some/model"}, "the embedded engine loads nothing from elsewhere: download it first"),
        ({"model": "tiny-qwen"}, "is tiny-qwen3 meant?"),
        ({"tasks": "dmo"}, "tasks.train: .*is demo meant?"),
        ({"tasks": {"train": "demo", "held_out": "dmo"}}, "tasks.held_out: .*is demo meant?"),
        ({"metrics": ["wandb"]}, "the metrics writer wandb needs its library: pip install wandb"),
        ({"tasks": None, "recorded": "no-such.jsonl"}, "recorded: there is no file no-such.jsonl"),
    ],
)
def test_what_the_run_would_refuse_is_refused(more: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with pytest.raises(ConfigError, match=said):
        price(config(**more))


def test_recorded_rows_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    results(tmp_path / "results.jsonl")
    recorded = config(model=str(tmp_path / "model"), tasks=None, recorded=str(tmp_path / "results.jsonl"))
    assert price(recorded)["sampled_tokens"].origin == "measured"
    facts = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**facts, "vocab_size": 12}))
    with pytest.raises(ConfigError, match=r"recorded: session s0-0, row 0: id \d+ is none of the model's 12: another tokenizer made it"):
        price(recorded)
