"""The gate is open for what agrees, and shut with the right suspect for each fault."""

from __future__ import annotations

import numpy as np
import pytest

from polar.errors import NotTrainable
from polar.train.gate import Facts, compare
from polar.trajectory import Span, Trace

FACTS = Facts(policy_version="7", tokenizer_hash="t" * 20, template_hash="c" * 20)


def trace(version: str | None = "7", temperature: float = 1.0, harness: str = "pi") -> Trace:
    logprobs = np.zeros(60, np.float32)
    mask = np.zeros(60, np.bool_)
    spans = []
    for number, start in enumerate((10, 30)):
        mask[start : start + 15] = True
        spans.append(Span(number, start, start + 15, policy_version=version, sampling={"temperature": temperature}))
    logprobs[mask] = -np.abs(np.random.default_rng(1).normal(2, 1, int(mask.sum()))).astype(np.float32)
    return Trace("s", np.arange(60, dtype=np.int32), mask, logprobs, tuple(spans), metadata={"harness": harness})


def own(one: Trace) -> np.ndarray:
    return one.logprobs[one.mask].copy()


def test_what_agrees_passes_and_is_told_by_harness_and_turn() -> None:
    row = trace()
    report = compare([row], [own(row) + np.float32(1e-4)], FACTS)
    assert report.open
    assert set(report.by) == {"harness pi", "turn 0", "turn 1"}
    assert report.whole.tokens == 30
    assert report.by["turn 1"].mean == pytest.approx(1e-4, rel=1e-2)
    report.check()


def test_corrupt_weights_are_told_as_such_and_stop_the_run() -> None:
    row = trace()
    report = compare([row], [own(row) - np.float32(3)], FACTS)
    assert [name for name, _ in report.suspects] == ["weights"]
    with pytest.raises(NotTrainable, match="weights are not the trainer's"):
        report.check()


def test_one_wrong_span_in_many_is_enough() -> None:
    row = trace()
    found = own(row)
    found[3] -= 8
    assert not compare([row], [found], FACTS).open


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_shifted_id_is_recognised(shift: int) -> None:
    row = trace()
    report = compare([row], [np.roll(own(row), shift)], FACTS)
    assert report.suspects[0][0] == "shifted"


def test_a_stale_policy_is_named_with_both_versions_even_where_the_numbers_agree() -> None:
    row = trace("5")
    report = compare([row], [own(row)], FACTS)
    assert not report.open
    assert report.suspects[0] == ("stale_policy", "rows were sampled by policy version 5, and the trainer is at 7")


def test_versions_within_the_bound_are_compared_with_nothing() -> None:
    row = trace("6")
    report = compare([row], [own(row) - np.float32(9)], Facts(policy_version="7", allowed_versions=frozenset({"6"})))
    assert report.open
    assert report.whole.tokens == 0


def test_another_temperature_is_named() -> None:
    row = trace(temperature=0.6)
    report = compare([row], [own(row) * np.float32(0.6)], FACTS)
    assert report.suspects[0][0] == "temperature"


@pytest.mark.parametrize(("field", "suspect"), [("tokenizer_hash", "tokenizer"), ("template_hash", "chat_template")])
def test_another_tokenizer_or_template_is_named(field: str, suspect: str) -> None:
    row = trace()
    report = compare([row], [own(row) - np.float32(2)], FACTS, provenance=[{field: "other"}])
    assert report.suspects[0][0] == suspect


def test_numbers_that_do_not_line_up_are_an_error() -> None:
    with pytest.raises(ValueError, match="30 trained ids and 29"):
        compare([trace()], [own(trace())[1:]], FACTS)


def test_one_row_in_many_that_differs_is_not_drowned_by_the_rest() -> None:
    rows = [trace() for _ in range(40)]
    found = [own(row) for row in rows]
    found[7] = found[7] - np.float32(0.3)
    report = compare(rows, found, FACTS)
    assert report.whole.mean < report.threshold.mean
    assert not report.open
    assert "mean 0.3 over the 30 of session 's'" in str(report)


def test_numbers_that_are_none_shut_the_gate() -> None:
    row = trace()
    assert not compare([row], [np.full(30, np.nan, np.float32)], FACTS).open


@pytest.mark.parametrize(
    ("row", "facts", "provenance", "suspect"),
    [
        (trace(), FACTS, [{"tokenizer_hash": "other"}], "tokenizer"),
        (trace(), FACTS, [{"template_hash": "other"}], "chat_template"),
        (trace(temperature=0.6), FACTS, [], "temperature"),
    ],
)
def test_what_rows_say_of_themselves_is_enough(row: Trace, facts: Facts, provenance: list[dict[str, str]], suspect: str) -> None:
    report = compare([row], [own(row)], facts, provenance=provenance)
    assert not report.open
    assert [name for name, _ in report.suspects] == [suspect]
    with pytest.raises(NotTrainable, match="though recorded and recomputed log-probabilities agree"):
        report.check()
