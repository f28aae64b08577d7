"""A step does what it says, whatever the packing, and a run goes on bit for bit from a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_qwen3 import tiny_qwen3

from polar.errors import ConfigError, SaveFailed
from polar.train.checkpoints import RunState, latest, load_run, restore, save
from polar.train.learner import Learner, Optimisation
from polar.train.loss import Loss
from polar.train.policy import Policy
from polar.train.rows import Row

VOCABULARY = 61
HOW = Optimisation(lr=1e-2, token_budget=40)


def policy(seed: int = 0, dtype: torch.dtype = torch.float64) -> Policy:
    return Policy(tiny_qwen3(VOCABULARY, seed).to(dtype))


def batch(seed: int, count: int = 5) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(0, VOCABULARY, (12 + number,), generator=generator)
        places = torch.arange(6, len(ids))
        rows.append(Row(ids, places, torch.full((len(places),), -4.0), torch.full((len(places),), 0.02), 1.0 - number * 0.5))
    return rows


def weights(one: Policy) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in one.model.parameters()]


def test_what_earned_more_becomes_likelier() -> None:
    learner = Learner(policy(), HOW)
    rows = batch(1)
    before = [float(values.sum()) for values in learner.logprobs(rows)]
    for _ in range(5):
        report = learner.step(rows)
    after = [float(values.sum()) for values in learner.logprobs(rows)]
    assert after[0] > before[0]
    assert after[-1] < before[-1]
    assert report.tokens == sum(len(row.places) for row in rows)


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_the_budget_of_micro_batches_changes_nothing(budget: int) -> None:
    first, second = Learner(policy(), HOW), Learner(policy(), replace(HOW, token_budget=budget))
    first.step(batch(2))
    report = second.step(batch(2))
    assert report.micro_batches == {1: 5, 25: 4, 10_000: 1}[budget]
    for ours, theirs in zip(weights(first.policy), weights(second.policy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_several_minibatches_clip_against_the_policy_at_the_start() -> None:
    learner = Learner(policy(), replace(HOW, minibatches=5, lr=0.1), Loss(clip_low=0.01, clip_high=0.01))
    report = learner.step(batch(3))
    assert learner.steps == 5
    assert report.clipped > 0
    assert report.ratio != 1.0


def test_each_of_several_minibatches_has_the_gradient_of_a_batch() -> None:
    """A token weighs its share of the batch; where an optimiser step sees half of the tokens, its gradient was half as large and was
    clipped at twice the norm (huggingface/trl#6024)."""
    row = replace(batch(5)[0], weights=torch.full((6,), 1 / (4 * 6)))
    norms = [Learner(policy(), replace(HOW, lr=1e-12, minibatches=count)).step([row] * 4) for count in (1, 2, 4)]
    assert [report.grad_norm for report in norms] == pytest.approx([norms[0].grad_norm] * 3, rel=1e-6)
    assert [report.loss for report in norms] == pytest.approx([norms[0].loss] * 3, rel=1e-6)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone() -> None:
    learner = Learner(policy(), HOW)
    before = weights(learner.policy)
    rows = batch(4)
    rows[0] = replace(rows[0], advantage=float("inf"))
    assert learner.step(rows).skipped
    assert all(torch.equal(a, b) for a, b in zip(before, weights(learner.policy), strict=True))


def test_nothing_to_train_is_said_so() -> None:
    empty = replace(batch(1)[0], places=torch.zeros(0, dtype=torch.int64), recorded=torch.zeros(0), weights=torch.zeros(0))
    with pytest.raises(ValueError, match="nothing to train"):
        Learner(policy(), HOW).step([empty])


@pytest.mark.parametrize(("step", "factor"), [(0, 0.5), (1, 1.0), (2, 1.0), (6, 0.5), (10, 0.0), (99, 0.0)])
def test_the_rate_warms_up_and_falls(step: int, factor: float) -> None:
    assert Optimisation(schedule="linear", warmup_steps=2, total_steps=10).factor(step) == pytest.approx(factor)


def test_a_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    straight = Learner(policy(dtype=torch.float32), HOW)
    for number in range(6):
        straight.step(batch(number))
    learner = Learner(policy(dtype=torch.float32), HOW)
    for number in range(6):
        learner.step(batch(number))
        save(tmp_path, learner, RunState(number + 1, number + 1, {"next": number + 1}), keep=1)
        place = latest(tmp_path)
        assert place is not None
        learner = Learner(Policy.load(str(place / "model")), HOW)
        assert restore(place, learner).position == {"next": number + 1}
    assert all(torch.equal(a, b) for a, b in zip(weights(straight.policy), weights(learner.policy), strict=True))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000006"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_that_goes_on_with_other_settings_has_them(dtype: torch.dtype, tmp_path: Path) -> None:
    learner = Learner(policy(dtype=dtype), HOW)
    learner.step(batch(0))
    place = save(tmp_path, learner, RunState(1, 1))
    other = Learner(policy(dtype=dtype), replace(HOW, weight_decay=0.75, betas=(0.5, 0.6), epsilon=1e-3))
    restore(place, other)
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.75, 0.0]
    assert {(group["betas"], group["eps"]) for group in other.optimizer.param_groups} == {((0.5, 0.6), 1e-3)}


def test_the_disk_is_cleared_of_what_another_process_left_before_more_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(policy(), HOW)
    (tmp_path / ".step-000002.99").mkdir()

    def full(folder: Path) -> None:
        assert not (tmp_path / ".step-000002.99").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(learner, "save_model", full)
    with pytest.raises(SaveFailed, match="No space"):
        save(tmp_path, learner, RunState(2, 2))
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_of_steps_that_are_trained_again_do_not_push_out_the_new_ones(tmp_path: Path) -> None:
    learner = Learner(policy(), HOW)
    save(tmp_path, learner, RunState(10, 10))
    save(tmp_path, learner, RunState(20, 20))
    (tmp_path / "latest").write_text("step-000010")  # killed before it was named
    place = save(tmp_path, learner, RunState(12, 12), keep=1)
    assert latest(tmp_path) == place
    assert place.is_dir()
    assert not (tmp_path / "step-000020").exists()


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path) -> None:
    learner = Learner(policy(), HOW)
    save(tmp_path, learner, RunState(1, 1))
    (tmp_path / ".step-000002.99").mkdir()
    (tmp_path / "step-000003").mkdir()
    found = latest(tmp_path)
    assert found is not None
    assert found.name == "step-000001"
    (tmp_path / "latest").unlink()
    assert latest(tmp_path) == found
    with pytest.raises(ConfigError, match="not a checkpoint"):
        load_run(tmp_path / "step-000003")


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    place = save(tmp_path, Learner(policy(), HOW), RunState(3, 2))
    assert json.loads((place / "run.json").read_text())["policy_version"] == 3
    other = Policy(tiny_qwen3(9, hidden_size=8, num_hidden_layers=1))
    with pytest.raises(ConfigError, match="does not fit"):
        restore(place, Learner(other, HOW))
