"""How outcomes reach rows, and that a group counts a rollout once."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trajectory_samples import call, merge

from polar.errors import ConfigError
from polar.harness import Tag
from polar.records import Session
from polar.trajectory import Recipe, Trace, Trajectory, advantages, credit, groups

ROLES = Recipe("x", lambda one: Tag("sub_agent" if one.number == 1 else "main", "x"))


def session() -> Trajectory:
    """Three rows: main (turns 0 and 3), a sub-agent (1), main again after a break (2)."""
    return merge(call(0, [1], [2]), call(1, [5], [6]), call(2, [7], [8]), call(3, [1, 2, 3], [4], parent=0), recipe=ROLES)


def rewards(trajectory: Trajectory) -> list[float | None]:
    return [trace.reward for trace in trajectory.traces]


def test_rows_have_no_reward_until_one_reaches_them() -> None:
    assert rewards(session()) == [None, None, None]


def test_broadcast_gives_every_row_the_outcome() -> None:
    assert rewards(credit(session(), 1.0)) == [1.0, 1.0, 1.0]


def test_main_only_leaves_sub_agents_without_a_reward() -> None:
    assert rewards(credit(session(), 1.0, "main_only")) == [1.0, None, 1.0]


def test_last_row_is_the_one_with_the_sessions_last_turn() -> None:
    assert rewards(credit(session(), 1.0, "last_row")) == [1.0, None, None]


def test_per_row_takes_the_evaluators_own() -> None:
    assert rewards(credit(session(), None, "per_row", [0.5, None, -1.0])) == [0.5, None, -1.0]


def test_no_outcome_is_never_a_zero() -> None:
    assert rewards(credit(session(), None)) == [None, None, None]


def test_crediting_again_replaces_what_was_there() -> None:
    assert rewards(credit(credit(session(), 1.0), 0.0, "main_only")) == [0.0, None, 0.0]


def test_wrong_numbers_of_rewards_and_unknown_policies_are_refused() -> None:
    with pytest.raises(ValueError, match="has 3 rows, and its evaluator gave 2"):
        credit(session(), None, "per_row", [1.0, 2.0])
    with pytest.raises(ValueError, match="need the policy per_row"):
        credit(session(), 1.0, "broadcast", [1.0])
    with pytest.raises(ConfigError, match="no credit policy is called 'all'"):
        credit(session(), 1.0, "all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not finite"):
        credit(session(), math.inf)


def rollout(name: str, rows: int, reward: float | None, group: str | None = "g") -> list[Trace]:
    record = Session(name, b"", b"", metadata={} if group is None else {"group_id": group})
    made = [merge(call(n, [n + 1, 9], [3]), recipe=ROLES, session=record) for n in range(rows)]
    return [trace for one in made for trace in credit(one, reward).traces]


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=5))
def test_a_group_counts_a_rollout_once_however_many_rows_it_has(drawn: list[tuple[int, float]]) -> None:
    split = [row for number, (rows, reward) in enumerate(drawn) for row in rollout(str(number), rows, reward)]
    whole = [row for number, (_, reward) in enumerate(drawn) for row in rollout(str(number), 1, reward)]
    assert groups(split)["g"].mean == pytest.approx(groups(whole)["g"].mean)
    assert groups(split)["g"].std == pytest.approx(groups(whole)["g"].std)
    by_rollout = {row.rollout_id: value for row, value in zip(split, advantages(split, normalise=True), strict=True)}
    assert [by_rollout[row.rollout_id] for row in whole] == pytest.approx(advantages(whole, normalise=True))


def test_rows_without_reward_have_no_advantage_and_do_not_count() -> None:
    rows = rollout("a", 1, 1.0) + rollout("b", 1, 0.0) + rollout("c", 2, None)
    assert advantages(rows) == [0.5, -0.5, None, None]
    assert set(groups(rows)["g"].outcomes) == {"a", "b"}


def test_a_rollout_without_a_group_is_compared_with_nobody() -> None:
    assert advantages(rollout("a", 2, 1.0, None) + rollout("b", 1, 0.0, None)) == [0.0, 0.0, 0.0]


def test_a_rollouts_outcome_is_the_mean_of_its_rewarded_rows() -> None:
    rows = list(credit(session(), None, "per_row", [1.0, None, 0.0]).traces)
    assert groups(rows)["t"].outcomes == {"s": 0.5}
