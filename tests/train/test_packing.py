"""Every row in exactly one bin, no bin over the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.train.packing import balance, pack

LENGTHS = st.lists(st.integers(0, 50), max_size=40)


@given(LENGTHS, st.integers(1, 60))
def test_every_row_once_and_only_a_lone_row_over_the_budget(lengths: list[int], budget: int) -> None:
    bins = pack(lengths, budget)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    for rows in bins:
        assert rows == sorted(rows)
        assert sum(lengths[row] for row in rows) <= budget or len(rows) == 1


@given(LENGTHS, st.integers(50, 60))
def test_no_two_bins_would_fit_into_one(lengths: list[int], budget: int) -> None:
    loads = sorted(sum(lengths[row] for row in rows) for rows in pack(lengths, budget))
    assert len(loads) < 2 or loads[0] + loads[1] > budget or loads[0] == 0


@given(LENGTHS, st.integers(1, 6))
def test_shares_differ_by_at_most_the_longest_row(lengths: list[int], parts: int) -> None:
    shares = balance(lengths, parts)
    assert sorted(row for share in shares for row in share) == list(range(len(lengths)))
    loads = [sum(lengths[row] for row in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_nothing_fits_a_budget_of_nothing() -> None:
    with pytest.raises(ValueError, match="holds no row"):
        pack([1], 0)
    with pytest.raises(ValueError, match="at least one"):
        balance([1], 0)
