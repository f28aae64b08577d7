"""From groups to rows: who is trained, with what advantage, and every token counted (law 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_parts import recorded_group, session

from polar.errors import NotTrainable
from polar.train.advantages import Advantage
from polar.train.batch import Counts, Recipe, make_batch
from polar.train.groups import Group, group_of, teaches
from polar.train.trainer import sample_for_gate

PLAIN = Recipe(advantage=Advantage(scale="none"), max_staleness=None)


def group(*results: object, number: int = 0) -> Group:
    return group_of(number, tuple(results))  # type: ignore[arg-type]


def advantages_of(groups: Sequence[Group], recipe: Recipe = PLAIN) -> dict[str, float]:
    return {row.name.removesuffix(".0"): row.advantage for row in make_batch(groups, recipe, policy_version=0).rows}


def test_a_rollout_is_compared_with_its_group() -> None:
    one = group(session("a", 1.0), session("b", 0.0), session("c", 0.0), session("d", 0.0))
    assert advantages_of([one]) == {"a": 0.75, "b": -0.25, "c": -0.25, "d": -0.25}


def test_failures_of_the_infrastructure_are_no_zeros() -> None:
    one = group(session("a", 1.0), session("b", 0.0), session("c", None, outcome="infrastructure"), session("d", None, outcome="cancelled"))
    batch = make_batch([one], PLAIN, policy_version=0)
    assert {row.name: row.advantage for row in batch.rows} == {"a.0": 0.5, "b.0": -0.5}
    assert batch.counts.dropped == {"infrastructure": 12, "cancelled": 12}


def test_what_the_policy_failed_counts_with_the_reward_that_its_task_gave_it() -> None:
    one = group(session("a", 1.0), session("b", 0.0, outcome="policy"), session("c", None, outcome="policy"))
    batch = make_batch([one], PLAIN, policy_version=0)
    assert [row.advantage for row in batch.rows] == [0.5, -0.5]
    assert batch.counts.dropped == {"no_reward": 12}


def test_groups_that_agree_are_counted_and_not_trained() -> None:
    same, other = recorded_group(1, (1.0, 1.0)), recorded_group(2, (1.0, 0.0))
    batch = make_batch([same, other], PLAIN, policy_version=0)
    assert (batch.taught, len(batch.rows), len(batch.traces)) == (1, 2, 4)
    assert batch.counts.dropped == {"zero_variance": 24}
    assert not teaches(same, Advantage())
    assert teaches(other, Advantage())


def test_rows_of_one_session_share_its_advantage_and_its_weight() -> None:
    one = group(session("a", 1.0, row_rewards=[1.0, 1.0, 1.0]), session("b", 0.0))
    batch = make_batch([one], replace(PLAIN, aggregation="sequence_mean"), policy_version=0)
    assert [row.advantage for row in batch.rows] == [0.5, 0.5, 0.5, -0.5]
    assert [float(row.weights.sum()) for row in batch.rows] == pytest.approx([1 / 6, 1 / 6, 1 / 6, 1 / 2])


def test_rows_without_credit_are_dropped_by_that_name() -> None:
    one = group(session("a", 1.0, row_rewards=[1.0, None]), session("b", 0.0))
    batch = make_batch([one], PLAIN, policy_version=0)
    assert len(batch.rows) == 2
    assert batch.counts.dropped == {"no_credit": 12}


def test_rows_with_images_are_neither_trained_nor_compared() -> None:
    """Where an image stood, the engine saw what no id says: the trainer's log-probabilities of what comes after it mean nothing."""
    pictured = session("a", 1.0, row_rewards=[1.0, 1.0])
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    (pictured.trajectory or {})["traces"][0]["prompt_messages"] = [{"role": "user", "content": [picture]}]
    batch = make_batch([group(pictured, session("b", 0.0))], PLAIN, policy_version=0)
    assert [row.advantage for row in batch.rows] == [0.5, -0.5]
    assert batch.counts.dropped == {"images": 12}
    assert [trace.has_images for trace, _ in sample_for_gate([batch], "0", 9)] == [False, False]


def test_rows_with_rewards_of_their_own_are_compared_by_them() -> None:
    one = group(session("a", 0.5, row_rewards=[1.0, 0.0]), session("b", 0.0))
    batch = make_batch([one], PLAIN, policy_version=0)
    assert [row.advantage for row in batch.rows] == [0.75, -0.25, -0.25]


def test_rows_of_sessions_that_agree_are_compared_without_a_division_by_nothing() -> None:
    one = group(session("a", 0.5, row_rewards=[1.0, 0.0]), session("b", 0.5))
    batch = make_batch([one], replace(PLAIN, advantage=Advantage(zero_variance="keep")), policy_version=0)
    assert [row.advantage for row in batch.rows] == [0.5, -0.5, 0.0]


def test_what_is_no_trajectory_is_refused_with_its_session() -> None:
    broken = session("a", 1.0)
    assert broken.trajectory is not None
    del broken.trajectory["traces"][0]["loss_mask"]
    with pytest.raises(NotTrainable, match="session a: its trajectory cannot be read: 'loss_mask' is missing"):
        make_batch([group(broken, session("b", 0.0))], PLAIN, policy_version=0)


def test_tokens_of_too_old_a_policy_are_stale() -> None:
    one = group(session("a", 1.0, version="3"), session("b", 0.0, version="5"), session("c", 0.0, version=None))
    batch = make_batch([one], replace(PLAIN, max_staleness=1), policy_version=6)
    assert [row.name for row in batch.rows] == ["b.0"]
    assert (batch.counts.stepped, batch.counts.stale) == (12, 24)
    assert batch.ages == {1: 12}


def test_shuffled_rewards_stay_in_their_group_and_are_the_same_each_time() -> None:
    groups = [recorded_group(number, (1.0, 0.0, 0.0, 0.0, 0.0, 0.0)) for number in range(20)]
    shuffled = replace(PLAIN, shuffle_rewards=True, seed=4)
    first, again = (make_batch(groups, shuffled, policy_version=0) for _ in range(2))
    assert [row.advantage for row in first.rows] == [row.advantage for row in again.rows]
    assert first.taught == 20
    winners = [index % 6 for index, row in enumerate(first.rows) if row.advantage > 0]
    assert len(winners) == 20
    assert len(set(winners)) > 2


def test_tokens_that_do_not_add_up_stop_the_run() -> None:
    with pytest.raises(NotTrainable, match="100 tokens were sampled, 60 are in rows and 30 in ledgers"):
        Counts(sampled=100, in_rows=60, stepped=60, ledger={"title": 30}).check()
    with pytest.raises(NotTrainable, match="60 tokens are in rows: 40 trained"):
        Counts(sampled=60, in_rows=60, stepped=40).check()


def test_a_trajectory_in_the_reference_form_says_nothing_of_what_was_sampled() -> None:
    result = session("a", 1.0)
    assert result.trajectory is not None
    del result.trajectory["metadata"]["sampled_tokens"]
    batch = make_batch([group(result, session("b", 0.0))], PLAIN, policy_version=0)
    assert batch.counts.sampled == 24


SESSIONS = st.builds(
    session,
    st.uuids().map(str),
    st.sampled_from([0.0, 0.5, 1.0, None]),
    outcome=st.sampled_from(["graded", "policy", "infrastructure", "cancelled"]),
    version=st.sampled_from(["0", "3", "5", None]),
    tokens=st.integers(1, 6),
    ledger=st.integers(0, 4),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(SESSIONS, min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["mean", "leave_one_out", "none"]),
    st.sampled_from(["drop", "keep"]),
    st.sampled_from(["token_mean", "sequence_mean"]),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
)
def test_every_sampled_token_is_trained_stale_dropped_or_in_a_ledger(
    sessions: list[list[object]], baseline: str, zero: str, aggregation: str, staleness: int | None, shuffled: bool
) -> None:
    groups = [group(*members, number=number) for number, members in enumerate(sessions)]
    recipe = Recipe(
        advantage=Advantage(baseline=baseline, zero_variance=zero),  # type: ignore[arg-type]
        aggregation=aggregation,  # type: ignore[arg-type]
        max_staleness=staleness,
        shuffle_rewards=shuffled,
    )
    batch = make_batch(groups, recipe, policy_version=5)
    counts = batch.counts
    assert counts.sampled == sum(result.sampled_tokens for result in batch.results)
    assert counts.sampled == counts.stepped + counts.stale + sum(counts.dropped.values()) + sum(counts.ledger.values())
    assert counts.stepped == sum(len(row.places) for row in batch.rows)
    if counts.stepped:
        assert float(np.sum([float(row.weights.double().sum()) for row in batch.rows])) == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize("wrong", [-1, 61])
def test_an_id_that_the_model_does_not_have_is_refused_with_its_row(wrong: int) -> None:
    result = session("a", 1.0, row_rewards=[1.0, 1.0])
    (result.trajectory or {})["traces"][1]["prompt_ids"][2] = wrong
    make_batch([group(result, session("b", 0.0))], Recipe(vocabulary=62 if wrong > 0 else None), policy_version=0)
    with pytest.raises(NotTrainable, match=f"session a, row 1: id {wrong} is none of the model's 61"):
        make_batch([group(result, session("b", 0.0))], Recipe(vocabulary=61), policy_version=0)
