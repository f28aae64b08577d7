"""A supervised run lowers the loss on its rows, is the same however it is packed, and ends in a model that loads."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sft_samples import config, exported, model, tokens
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from polar.cli.commands import app
from polar.errors import ConfigError
from polar.tokens.tokenizer import load_tokenizer
from polar.train.learner import Learner, Optimisation
from polar.train.metrics import read_metrics
from polar.train.policy import Policy, Way
from polar.train.sft import CrossEntropy, SftReport, batch_of, run
from polar.train.sft_config import SftConfig
from polar.train.sft_data import read_rows

ROOT = Path(__file__).parents[2]


def quiet(config: SftConfig, **how: Any) -> SftReport:
    return run(config, say=lambda line: None, **how)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    ours, theirs = weights(a), weights(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_loss_falls(tmp_path: Path) -> None:
    report = quiet(config(tmp_path, epochs=12))
    assert report.finished
    assert report.losses[0] == pytest.approx(math.log(4096), abs=0.2)
    assert report.losses[report.steps] < 0.7 * report.losses[0]
    lines = read_metrics(tmp_path / "out")
    assert [line["step"] for line in lines] == list(range(report.steps + 1))
    assert lines[-1]["loss"] == report.loss
    assert lines[-1]["epoch"] == 12.0
    assert [line["step"] for line in lines if "validation_loss" in line] == list(report.losses)


def test_the_loss_is_the_mean_cross_entropy_of_the_trained_ids(tmp_path: Path) -> None:
    """Against transformers' own loss on the same rows, one by one."""
    settings = config(tmp_path)
    rows = read_rows(Path(settings.data), "train", load_tokenizer(settings.model), vocabulary=4096, max_tokens=256).samples
    policy = Policy.load(settings.model, dtype="float64")
    reference = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float64)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in rows:
        ids = torch.from_numpy(sample.ids.astype("int64"))
        labels = torch.where(torch.from_numpy(sample.mask), ids, -100)
        total = total + reference(input_ids=ids[None], labels=labels[None]).loss * int(sample.mask.sum())
        count += int(sample.mask.sum())
    (total / count).backward()
    expected = torch.cat([one.grad.flatten() for one in reference.parameters()])
    learner = Learner(policy, Optimisation(max_grad_norm=1e9), CrossEntropy())
    report = learner.step(batch_of(list(rows)))
    assert report.loss == pytest.approx(total.item() / count, abs=1e-6)  # weights are float32
    assert report.tokens == count
    assert report.grad_norm == pytest.approx(float(expected.norm()), rel=1e-6)


def test_a_packed_step_is_the_step_of_rows_one_by_one(tmp_path: Path) -> None:
    settings = config(tmp_path)
    rows = list(read_rows(Path(settings.data), "train", load_tokenizer(settings.model), vocabulary=4096, max_tokens=256).samples)

    def after(way: Way | None, budget: int) -> list[torch.Tensor]:
        learner = Learner(Policy.load(settings.model, dtype="float64"), Optimisation(lr=1e-2, token_budget=budget), CrossEntropy())
        learner.step(batch_of(rows), way)
        return [one.detach() for one in learner.policy.model.parameters()]

    plain = after("plain", 10_000)
    for packed in (after("packed", 10_000), after("packed", 60), after(None, 60)):
        for ours, theirs in zip(packed, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_the_model_that_comes_out_loads_and_has_its_tokenizer(tmp_path: Path) -> None:
    settings = config(tmp_path, epochs=1)
    report = quiet(settings)
    assert report.model == tmp_path / "out" / "model"
    assert load_tokenizer(report.model).hash == load_tokenizer(settings.model).hash
    assert load_tokenizer(report.model).template_hash == load_tokenizer(settings.model).template_hash
    loaded = Policy.load(str(report.model))
    assert not same(report.model, Path(settings.model))
    again = quiet(SftConfig.model_validate({**settings.model_dump(), "model": str(report.model), "output": str(tmp_path / "more")}))
    assert again.losses[0] == pytest.approx(report.losses[report.steps], abs=1e-4)
    assert next(loaded.model.parameters()).dtype == torch.float32


def test_a_stopped_run_goes_on_to_the_same_end(tmp_path: Path) -> None:
    straight = config(tmp_path, output=str(tmp_path / "straight"), dtype="bfloat16")
    quiet(straight)
    parts = config(tmp_path, dtype="bfloat16")
    stopped, rounds = quiet(parts, stop=lambda: True), 1
    while not stopped.finished:
        assert stopped.model is None
        stopped = quiet(parts, stop=lambda: True)
        rounds += 1
    assert rounds == stopped.steps
    assert same(tmp_path / "straight" / "model", tmp_path / "out" / "model")

    def losses(folder: str) -> list[Any]:
        return [(line["step"], line.get("loss"), line.get("validation_loss")) for line in read_metrics(tmp_path / folder)]

    assert losses("out") == losses("straight")


def test_lora_trains_an_adapter_and_leaves_a_merged_model(tmp_path: Path) -> None:
    lora = {"r": 4, "alpha": 16.0, "dropout": 0.1}
    straight = config(tmp_path, lora=lora, output=str(tmp_path / "straight"))
    whole = quiet(straight)
    parts = config(tmp_path, lora=lora)
    while not quiet(parts, stop=lambda: True).finished:
        pass
    assert same(tmp_path / "straight" / "model", tmp_path / "out" / "model")
    assert (tmp_path / "out" / "adapter" / "adapter_config.json").is_file()
    assert whole.losses[whole.steps] < whole.losses[0]
    merged = quiet(config(tmp_path, model=str(whole.model), output=str(tmp_path / "more"), epochs=1))
    assert merged.losses[0] == pytest.approx(whole.losses[whole.steps], abs=1e-4)


def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    settings = config(tmp_path, epochs=1)
    quiet(settings)
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    said: list[str] = []
    again = run(settings, say=said.append)
    assert again.finished
    assert again.loss is None
    assert said[-1].endswith("nothing to do")
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before


def test_the_rate_is_said_early(tmp_path: Path) -> None:
    said: list[str] = []
    run(config(tmp_path), say=said.append)
    assert any(line.startswith("step 3 of ") and "tokens/s, about " in line for line in said)
    assert said[0] == "train: 12 rows, 213 tokens, 177 of them trained"


def test_max_steps_ends_the_run_and_its_schedule(tmp_path: Path) -> None:
    report = quiet(config(tmp_path, max_steps=2))
    assert report.steps == 2
    assert [line["step"] for line in read_metrics(tmp_path / "out")] == [0, 1, 2]


def test_validation_is_done_as_often_as_asked(tmp_path: Path) -> None:
    report = quiet(config(tmp_path, evaluate_every=2, epochs=2))
    assert list(report.losses) == [0, *range(2, report.steps, 2), report.steps]


def test_without_a_validation_split_there_is_no_validation_loss(tmp_path: Path) -> None:
    assert quiet(config(tmp_path, validation="none", epochs=1)).losses == {}


# --- folders --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{"lr": 0.5}, {"batch_tokens": 81}, {"epochs": 4}, {"seed": 1}])
def test_a_folder_of_another_run_is_left_alone(tmp_path: Path, changes: dict[str, Any]) -> None:
    quiet(config(tmp_path), stop=lambda: True)
    with pytest.raises(ConfigError, match=f"another {next(iter(changes))}"):
        quiet(config(tmp_path, **changes))


def test_a_run_does_not_go_on_with_other_rows(tmp_path: Path) -> None:
    quiet(config(tmp_path), stop=lambda: True)
    part = tmp_path / "data" / "data" / "train-00000.jsonl"
    part.write_text(part.read_text() + json.dumps(tokens(99)) + "\n")
    with pytest.raises(ConfigError, match="another rows"):
        quiet(config(tmp_path))


def test_what_changes_no_number_may_change(tmp_path: Path) -> None:
    quiet(config(tmp_path), stop=lambda: True)
    assert quiet(config(tmp_path, checkpoint_every=2, keep=1, metrics=["jsonl", "tensorboard"])).finished


def test_a_run_that_is_short_of_memory_goes_on_with_less(tmp_path: Path) -> None:
    quiet(config(tmp_path, output=str(tmp_path / "straight")))
    quiet(config(tmp_path), stop=lambda: True)
    begun = json.loads((tmp_path / "out" / "sft.json").read_text())
    (tmp_path / "out" / "sft.json").write_text(json.dumps({**begun, "token_budget": 60}))  # as it was noted before
    assert quiet(config(tmp_path, token_budget=30, gradient_checkpointing=True)).finished
    for name, value in weights(tmp_path / "straight" / "model").items():
        assert float((value - weights(tmp_path / "out" / "model")[name]).abs().mean()) < 1e-4, name


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="is no run of polar sft"):
        quiet(config(tmp_path))


def test_a_run_that_was_killed_before_it_began_begins(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".sft.json").write_text('{"mod')
    assert quiet(config(tmp_path, epochs=1)).finished


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    said: list[str] = []
    settings = config(tmp_path)

    def second() -> bool:
        with pytest.raises(ConfigError, match="another process"):
            quiet(settings)
        said.append("tried")
        return True

    quiet(settings, stop=second)
    assert said


def test_a_model_that_lacks_the_ids_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    model(tmp_path / "small")
    shape = json.loads((tmp_path / "small" / "config.json").read_text())
    (tmp_path / "small" / "config.json").write_text(json.dumps({**shape, "vocab_size": 90}))
    exported(tmp_path / "data", {"train": [tokens(0)]})
    with pytest.raises(ConfigError, match="none of the model's 90"):
        run(SftConfig(model=str(tmp_path / "small"), data=str(tmp_path / "data"), output=str(tmp_path / "out")))


def test_a_gradient_that_is_not_finite_is_said_and_counted(tmp_path: Path) -> None:
    settings = config(tmp_path, epochs=1)
    saved = weights(tmp_path / "model")
    saved["model.norm.weight"] = torch.full_like(saved["model.norm.weight"], math.inf)
    from safetensors.torch import save_file

    save_file(saved, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    said: list[str] = []
    run(settings, say=said.append)
    assert any("not finite" in line for line in said)
    assert read_metrics(tmp_path / "out")[1]["skipped"] == 1
    assert read_metrics(tmp_path / "out")[1]["loss"] is None


# --- settings -------------------------------------------------------------------------------------------------------------


def test_settings_come_from_flags_over_a_file(tmp_path: Path) -> None:
    settings = config(tmp_path)
    file = tmp_path / "sft.yaml"
    file.write_text(f"model: {settings.model}\ndata: {settings.data}\nepochs: 5\nlr: 1.0e-2\nlora: {{r: 2}}\n")
    arguments = ["sft", "-c", str(file), "-o", str(tmp_path / "out"), "--epochs", "1", "--set", "lora={r: 3}", "--max-steps", "1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    held = json.loads((tmp_path / "out" / "sft.json").read_text())
    assert (held["epochs"], held["lr"], held["lora"]["r"]) == (1, 0.01, 3)
    assert "validation loss" in result.output
    assert str(tmp_path / "out" / "model") in result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "model: is missing"),
        (["m", "d", "-o", "o", "--lr", "0"], "lr: "),
        (["m", "d", "-o", "o", "--set", "learn_rate=1"], "is lr meant|there is no such setting"),
        (["m", "d", "-o", "o", "--set", "epoch=1"], "is epochs meant"),
        (["m", "d", "-o", "o", "--set", "epochs"], "NAME=VALUE"),
        (["m", "d", "-o", "o", "--validation", "train"], "is what is trained"),
        (["m", "d", "-o", "o"], "model: m is neither a folder with a config.json"),
        (["m", "d"], r"(?s)output: is missing.*model: m is neither.*data: there is no file or folder d"),
        (["tiny-qwen3", "d", "-o", "o"], "^the command line: these are wrong:\ndata: there is no file or folder d$"),
    ],
)
def test_wrong_settings_are_said(arguments: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["sft", *arguments])
    assert isinstance(result.exception, ConfigError)
    with pytest.raises(ConfigError, match=why):
        raise result.exception
    assert not (tmp_path / "o").exists()


def test_the_python_of_the_page_runs(tmp_path: Path) -> None:
    config(tmp_path)
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "sft.md").read_text(), re.DOTALL | re.MULTILINE)
    page: dict[str, Any] = {"__name__": "page"}
    exec(compile(code, "sft.md", "exec"), page)
    losses = page["warm"](*(str(tmp_path / name) for name in ("model", "data", "out")))
    assert len(losses) == 2
