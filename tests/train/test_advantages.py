"""Advantages: hand-computed values, and the laws of a baseline."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.train.advantages import Advantage, Rollout, advantages


def group(*rewards: float | None, name: str = "g") -> list[Rollout]:
    return [Rollout(f"{name}{index}", name, reward) for index, reward in enumerate(rewards)]


def test_mean_and_std_as_grpo_writes_them() -> None:
    found = advantages(group(1, 0, 0, 0), Advantage(epsilon=0)).values
    std = math.sqrt(3 / 16)
    assert list(found.values()) == pytest.approx([0.75 / std, -0.25 / std, -0.25 / std, -0.25 / std])


def test_dr_grpo_leaves_the_division_out() -> None:
    assert list(advantages(group(1, 0), Advantage(scale="none")).values.values()) == [0.5, -0.5]


def test_leave_one_out_compares_with_the_others_only() -> None:
    found = advantages(group(3, 1, 2), Advantage("leave_one_out", "none")).values
    assert list(found.values()) == pytest.approx([3 - 1.5, 1 - 2.5, 2 - 2.0])


def test_a_group_that_agrees_is_dropped_or_exactly_zero_never_a_quotient_of_noise() -> None:
    same = group(0.1 + 0.2, 0.3)
    assert set(advantages(same).dropped.values()) == {"zero_variance"}
    assert list(advantages(same, Advantage("leave_one_out", zero_variance="keep")).values.values()) == [0.0, 0.0]


def test_without_a_baseline_rewards_that_agree_are_not_divided_by_nothing() -> None:
    assert list(advantages(group(1, 1), Advantage("none")).values.values()) == [1.0, 1.0]
    assert list(advantages(group(1), Advantage("none")).values.values()) == [1.0]


def test_rewards_of_any_size_have_a_deviation() -> None:
    """An evaluator's number may be anything; its square may be none."""
    assert list(advantages(group(1e200, 0)).values.values()) == pytest.approx([1.0, -1.0])
    assert list(advantages(group(1e-200, 0), Advantage(epsilon=0, tolerance=0)).values.values()) == pytest.approx([1.0, -1.0])


def test_a_rollout_without_reward_is_in_no_statistic() -> None:
    found = advantages(group(1, None, 0), Advantage(scale="none"))
    assert list(found.values.values()) == [0.5, -0.5]
    assert found.dropped == {"g1": "no_reward"}


def test_nothing_to_compare_with_is_said_so() -> None:
    assert advantages(group(1, None)).dropped == {"g0": "alone", "g1": "no_reward"}


def test_a_rollout_that_comes_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="counts once"):
        advantages([Rollout("a", "g", 1.0), Rollout("a", "g", 0.0)])


REWARDS = st.lists(st.none() | st.floats(-1e3, 1e3), max_size=12)


@given(st.lists(REWARDS, max_size=5), st.sampled_from(["mean", "leave_one_out"]), st.sampled_from(["std", "none"]), st.booleans())
def test_every_rollout_is_trained_or_dropped_and_a_groups_advantages_cancel(
    rewards: list[list[float | None]], baseline: str, scale: str, keep: bool
) -> None:
    rollouts = [one for number, values in enumerate(rewards) for one in group(*values, name=f"g{number}")]
    how = Advantage(baseline, scale, "keep" if keep else "drop")  # type: ignore[arg-type]
    found = advantages(rollouts, how)
    assert found.values.keys() | found.dropped.keys() == {one.id for one in rollouts}
    assert not found.values.keys() & found.dropped.keys()
    for number in range(len(rewards)):
        mine = [value for one, value in found.values.items() if one.startswith(f"g{number}")]
        assert all(map(math.isfinite, mine))
        assert math.fsum(mine) == pytest.approx(0, abs=1e-6 * max([1.0, *map(abs, mine)]))
