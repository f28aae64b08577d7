"""`train()` in two pieces is `train()` in one, whatever is trained: whole, an adapter, masters under bfloat16, against a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from trainer_parts import recorded_group, tiny_model

from polar.errors import ConfigError
from polar.train import TrainConfig, train
from polar.train.checks import check_tokenizer
from polar.train.metrics import read_metrics


def run(folder: Path, data: Path, steps: int, **more: Any) -> Path:
    settings: dict[str, Any] = {
        "model": {"name": str(data / "model"), **more.pop("model", {})},
        "recorded": str(data / "groups.jsonl"),
        "steps": steps,
        "output": str(folder),
        "batch": {"groups": 2, "samples": 2},
        "optimisation": {"lr": 1e-2, "token_budget": 64},
    }
    summary = train(TrainConfig.model_validate({**settings, **more}))
    assert summary is not None
    assert summary.steps == steps
    assert summary.checkpoint is not None
    return summary.checkpoint


@pytest.mark.parametrize(
    "more",
    [{}, {"model": {"lora": {"r": 4}}}, {"model": {"dtype": "bfloat16"}}, {"loss": {"beta": 0.1}}],
    ids=["whole", "lora", "bfloat16", "reference"],
)
def test_a_run_in_two_pieces_is_the_run_in_one(more: dict[str, Any], tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    lines = [result.model_dump_json() for number in range(8) for result in recorded_group(number).results]
    (tmp_path / "groups.jsonl").write_text("\n".join(lines))
    one = run(tmp_path / "one", tmp_path, 4, **more)
    run(tmp_path / "two", tmp_path, 2, **more)
    two = run(tmp_path / "two", tmp_path, 4, **more)
    losses = [[line["step/loss"] for line in read_metrics(tmp_path / name)] for name in ("one", "two")]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 4
    (file,) = [path.name for path in (one / "model").glob("*.safetensors")]
    first, second = (load_file(place / "model" / file) for place in (one, two))
    assert first.keys() == second.keys()
    assert all(first[name].equal(second[name]) for name in first)


def test_recorded_groups_may_grow_and_not_become_others(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    path = tmp_path / "groups.jsonl"
    lines = [[result.model_dump_json() for result in recorded_group(number).results] for number in range(5)]

    def write(numbers: list[int]) -> None:
        path.write_text("\n".join(line for number in numbers for line in lines[number]))

    write([0, 1])
    run(tmp_path / "run", tmp_path, 1)
    write([1, 0, 2, 3])
    with pytest.raises(ConfigError, match="the first 2 groups, which the run has trained on"):
        run(tmp_path / "run", tmp_path, 2)
    write([0, 1, 4, 3])
    run(tmp_path / "run", tmp_path, 2)


def test_recorded_ids_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    group = recorded_group(0)
    check_tokenizer([group], "a" * 64)  # nobody says whose ids these are
    group.results[1].metadata["run"] = {"engine": {"tokenizer_hash": "b" * 64}}
    check_tokenizer([group], "b" * 64)
    with pytest.raises(ConfigError, match="session s0-1 holds ids of another tokenizer"):
        check_tokenizer([group], "a" * 64)


def test_recorded_ids_beyond_the_vocabulary_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    group = recorded_group(0)
    row = (group.results[1].trajectory or {})["traces"][0]
    row["response_ids"][3] = 61
    (tmp_path / "groups.jsonl").write_text("\n".join(result.model_dump_json() for result in group.results))
    with pytest.raises(ConfigError, match="recorded: session s0-1, row 0: id 61 is none of the model's 61"):
        run(tmp_path / "run", tmp_path, 1)
    assert not read_metrics(tmp_path / "run")
