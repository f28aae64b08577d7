"""What a token weighs: hand-computed, and conserved."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.train.weights import weights
from polar.trajectory import Span, Trace


def row(rollout: str, *spans: tuple[int, str | None], gap: int = 2) -> Trace:
    """A row of sampled runs of the given lengths and policy versions, each after `gap` ids of context."""
    mask: list[bool] = []
    found = []
    for number, (length, version) in enumerate(spans):
        mask += [False] * gap
        found.append(Span(number, len(mask), len(mask) + length, policy_version=version))
        mask += [True] * length
    size = len(mask)
    return Trace(
        rollout, np.arange(size, dtype=np.int32), np.array(mask, np.bool_), np.zeros(size, np.float32), tuple(found), rollout_id=rollout
    )


def test_token_mean_weighs_every_token_the_same() -> None:
    found = weights([row("a", (3, None)), row("b", (1, None))], [True, True])
    assert [float(one.max()) for one in found.rows] == [0.25, 0.25]
    assert sum(float(one.sum()) for one in found.rows) == pytest.approx(1)


def test_sequence_mean_weighs_every_rollout_the_same_however_many_rows_it_has() -> None:
    found = weights([row("a", (2, None)), row("a", (2, None)), row("b", (1, None))], [True] * 3, aggregation="sequence_mean")
    a, b = float(found.rows[0].sum() + found.rows[1].sum()), float(found.rows[2].sum())
    assert a == pytest.approx(0.5)
    assert b == pytest.approx(0.5)


def test_fixed_length_divides_by_the_same_number_whatever_was_sampled() -> None:
    found = weights([row("a", (2, None)), row("b", (6, None))], [True, True], aggregation="fixed_length", fixed_length=10)
    assert [round(float(one.sum()), 6) for one in found.rows] == [0.1, 0.3]
    with pytest.raises(ValueError, match="needs its length"):
        weights([], [], aggregation="fixed_length")


def test_spans_beyond_the_staleness_bound_are_not_trained_the_rest_of_the_row_is() -> None:
    found = weights([row("a", (2, "3"), (2, "5"), (2, None))], [True], policy_version=6, max_staleness=1)
    assert (found.stepped, found.stale) == (2, 4)
    assert found.rows[0][found.masks[0]].sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="policy version"):
        weights([], [], max_staleness=1)


@pytest.mark.parametrize("version", ["default", "v5", "--5", "²", ""])
def test_a_version_that_is_no_number_is_no_version_of_the_trainers(version: str) -> None:
    found = weights([row("a", (2, version), (1, "5"))], [True], policy_version=5, max_staleness=9)
    assert (found.stepped, found.stale) == (1, 2)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"), st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["1", "2", None])), max_size=4), st.booleans()
        ),
        max_size=6,
    ),
    st.sampled_from(["token_mean", "sequence_mean", "fixed_length"]),
    st.none() | st.integers(0, 2),
)
def test_law_3_of_the_trainer(rows: list[tuple[str, list[tuple[int, str | None]], bool]], aggregation: str, bound: int | None) -> None:
    traces = [row(rollout, *spans) for rollout, spans, _ in rows]
    found = weights(
        traces,
        [wanted for *_, wanted in rows],
        aggregation=aggregation,
        fixed_length=7,
        policy_version=2,
        max_staleness=bound,  # type: ignore[arg-type]
    )
    assert found.stepped + found.stale + found.other == sum(trace.trained for trace in traces)
    assert found.stepped == sum(int(np.count_nonzero(one)) for one in found.rows)
    if found.stepped and aggregation != "fixed_length":
        assert sum(float(one.sum(dtype=np.float64)) for one in found.rows) == pytest.approx(1, rel=1e-5)
