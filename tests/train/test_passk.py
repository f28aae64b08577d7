"""pass@k against every subset there is; intervals against their papers' numbers and against what they claim to cover."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.train.passk import difference, interval, mean_pass_at_k, pass_at_k, wilson


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int, int]:
    n = draw(st.integers(1, 9))
    return n, draw(st.integers(0, n)), draw(st.integers(1, n))


@given(counts())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(case: tuple[int, int, int]) -> None:
    n, c, k = case
    samples = [True] * c + [False] * (n - c)
    subsets = list(combinations(samples, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


@given(st.integers(1, 100_000), st.data())
def test_pass_at_k_is_a_probability_that_grows_with_k_and_with_passes(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, min(n, 200)))
    found = pass_at_k(n, c, k)
    assert 0.0 <= found <= 1.0
    if c < n:
        assert pass_at_k(n, c + 1, k) >= found - 1e-12
    if k < n:
        assert pass_at_k(n, c, k + 1) >= found - 1e-12


def test_pass_at_k_agrees_with_exact_binomials_where_floats_would_overflow() -> None:
    n, c, k = 20_000, 3, 5_000
    assert pass_at_k(n, c, k) == pytest.approx(float(1 - math.comb(n - c, k) / math.comb(n, k)), rel=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5), (0, 0, 1)])
def test_counts_that_cannot_be_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


def test_a_task_counts_once_however_many_samples_it_has() -> None:
    assert mean_pass_at_k({"a": [1, 1, 1, 1], "b": [0]}) == 0.5
    assert mean_pass_at_k({"a": [1, 0, 0], "b": [0, 0]}, 2) == pytest.approx((2 / 3 + 0) / 2)


@pytest.mark.parametrize(("passed", "trials", "low", "high"), [(0, 10, 0.0, 0.2775), (81, 263, 0.2553, 0.3662), (10, 10, 0.7225, 1.0)])
def test_wilson_gives_the_published_numbers(passed: int, trials: int, low: float, high: float) -> None:
    """81 of 263: Newcombe 1998, Stat. Med. 17:857, table I."""
    assert wilson(passed, trials) == pytest.approx((low, high), abs=5e-5)


@given(st.integers(1, 60), st.data())
def test_wilson_holds_the_share_and_mirrors(trials: int, data: st.DataObject) -> None:
    passed = data.draw(st.integers(0, trials))
    low, high = wilson(passed, trials)
    assert 0 <= low <= passed / trials <= high <= 1
    mirrored = wilson(trials - passed, trials)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-9)


def test_one_sample_a_task_gets_wilsons_interval() -> None:
    found = interval({str(i): [i < 4] for i in range(10)})
    assert found.method == "wilson"
    assert (found.low, found.high) == wilson(4, 10)
    assert (found.tasks, found.samples) == (10, 10)


OUTCOMES = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=2), st.lists(st.integers(0, 1), min_size=3, max_size=5), min_size=1)


@given(OUTCOMES, st.integers(1, 3))
def test_an_interval_holds_its_mean_and_stays_inside_0_and_1(outcomes: dict[str, list[int]], k: int) -> None:
    found = interval(outcomes, k, resamples=200)
    assert 0 <= found.low <= found.mean + 1e-12
    assert found.mean <= found.high + 1e-12 <= 1 + 1e-9
    assert found.mean == pytest.approx(mean_pass_at_k(outcomes, k))
    assert found == interval(outcomes, k, resamples=200)


def test_the_bootstrap_is_that_of_all_ways_to_draw_tasks() -> None:
    """Three tasks: the 27 draws of three can be listed."""
    outcomes = {"a": [0, 0, 0, 1], "b": [1, 1, 0, 1], "c": [1, 0, 1, 0]}
    scores = np.array([0.25, 0.75, 0.5])
    means = [scores[[i, j, k]].mean() for i in range(3) for j in range(3) for k in range(3)]
    expected = 0.5 + (np.quantile(means, [0.05, 0.95], method="inverted_cdf") - 0.5) * math.sqrt(3 / 2)
    found = interval(outcomes, confidence=0.9, resamples=50_000)
    assert (found.low, found.high) == pytest.approx(tuple(expected), abs=1e-9)
    assert found.method == "bootstrap"


def test_samples_of_one_task_are_no_independent_draws() -> None:
    """Tasks that are all or nothing: 16 samples a task say as much as one."""
    many = interval({str(i): [i < 5] * 16 for i in range(10)})
    assert many.low < 0.25
    assert many.high > 0.75


def test_tasks_that_agree_make_nobody_certain() -> None:
    found = interval({str(i): [1, 1, 1, 1] for i in range(8)})
    assert found.mean == found.high == 1.0
    assert found.low == wilson(8, 8)[0] < 0.7
    same = difference({str(i): [0, 1] for i in range(8)}, {str(i): [1, 0] for i in range(8)})
    assert same.method == "newcombe"
    assert same.low < 0 < same.high


@pytest.mark.parametrize("tasks", [8, 30])
def test_the_interval_covers_the_truth_about_as_often_as_it_says(tasks: int) -> None:
    generator = np.random.default_rng(5)
    covered = 0
    for _ in range(400):
        chances = generator.beta(1, 2, tasks)  # mean 1/3
        found = interval({str(i): (generator.random(8) < p).astype(int).tolist() for i, p in enumerate(chances)}, resamples=400)
        covered += found.low <= 1 / 3 <= found.high
    assert 0.89 <= covered / 400 <= 0.99


def test_a_difference_is_paired_by_task() -> None:
    """Tasks differ much, each rises by a quarter: paired, that is seen; compared as two means, it would drown."""
    before = {str(i): [1] * (i % 4) + [0] * (4 - i % 4) for i in range(12)}
    after = {task: [1] * (sum(values) + (task != "5")) + [0] * (3 - sum(values) + (task == "5")) for task, values in before.items()}
    found = difference(before, after)
    assert found.mean == pytest.approx(11 / 48)
    assert found.excludes_zero
    alone = interval(before)
    assert found.high - found.low < alone.high - alone.low


def test_a_difference_leaves_out_tasks_of_one_side_by_name() -> None:
    found = difference({"a": [0, 1], "b": [0, 0], "c": [1]}, {"a": [1, 1], "b": [0, 0], "d": [1]})
    assert found.left_out == ("c", "d")
    assert (found.tasks, found.samples) == (2, 8)
    with pytest.raises(ValueError, match="no task in common"):
        difference({"a": [1]}, {"b": [1]})


def test_rewards_that_are_no_passes_have_a_mean_and_no_pass_at_k() -> None:
    found = interval({"a": [0.2, 0.4], "b": [3.0], "c": [0.1]})
    assert found.mean == pytest.approx((0.3 + 3.0 + 0.1) / 3)
    assert found.method == "bootstrap"
    with pytest.raises(ValueError, match="other than 0 and 1"):
        interval({"a": [0.2, 0.4]}, 2)


def test_a_single_task_says_next_to_nothing_about_others() -> None:
    found = interval({"a": [0, 1, 1, 1]})
    assert found.mean == 0.75
    assert found.high - found.low > 0.8
    reward = interval({"a": [0.3, 2.0]})
    assert (reward.low, reward.high) == (-math.inf, math.inf)


@pytest.mark.parametrize("outcomes", [{}, {"a": []}, {"a": [float("nan")]}])
def test_what_was_not_evaluated_is_refused(outcomes: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError):
        interval(outcomes)
