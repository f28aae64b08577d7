"""`answer`: texts, patterns and numbers as people write them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from evaluator_lab import Lab, work
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError, EvaluatorError
from polar.evaluator import make
from polar.evaluator.answer import numbers


async def reward(lab: Lab, answer: str | None, config: dict[str, Any], **more: Any) -> float:
    return (await make("answer", config).evaluate(lab.evidence(None, answer=answer, **more))).reward


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", "42"),
        ("The answer is 1,234.50 dollars.", "1234.5"),
        ("$1,000", "1000"),
        ("-2.5e3", "-2500"),
        ("−7", "-7"),
        ("3/4", "3/4"),
        ("\\frac{3}{4}", "3/4"),
        ("-\\dfrac{1}{2}", "-1/2"),
        ("first 3, then \\boxed{12} and 5", "12"),
        ("\\boxed{\\frac{1}{3}}", "1/3"),
        ("50%", "1/2"),
        ("½", "1/2"),
        (".5", "1/2"),
        ("5-3", "3"),
        ("x = 10.", "10"),
        ("1,23", "23"),
    ],
)
def test_the_last_number_of_a_text(text: str, value: str) -> None:
    assert numbers(text)[-1] == Fraction(value)


@given(st.integers(-(10**12), 10**12))
def test_whole_numbers_are_read_with_and_without_separators(value: int) -> None:
    assert numbers(f"it is {value:,}.")[-1] == numbers(str(value))[-1] == value


@given(st.decimals(-(10**9), 10**9, allow_nan=False, places=6))
def test_decimals_are_read_exactly(value: Any) -> None:
    assert numbers(f"{value:f}") == [Fraction(value)]
    assert numbers(f"{value:,f}") == [Fraction(value)]


@given(st.text(max_size=200))
def test_no_text_makes_it_fail(text: str) -> None:
    numbers(text)


async def test_numbers_are_compared_with_a_tolerance(lab: Lab) -> None:
    assert await reward(lab, "about 3.1415", {"mode": "numeric", "expected": 3.1416, "tolerance": 0.001}) == 1
    assert await reward(lab, "about 3.1", {"mode": "numeric", "expected": 3.1416, "tolerance": 0.001}) == 0
    assert await reward(lab, "101", {"mode": "numeric", "expected": 100, "relative_tolerance": 0.01}) == 1
    assert await reward(lab, "0.1", {"mode": "numeric", "expected": "1/10"}) == 1
    assert await reward(lab, "no number", {"mode": "numeric", "expected": 1}) == 0
    assert await reward(lab, "50%", {"mode": "numeric", "expected": 50}) == 1
    assert await reward(lab, "50%", {"mode": "numeric", "expected": 0.5}) == 1


async def test_which_number_counts(lab: Lab) -> None:
    for pick, right in [("last", 0), ("first", 1), ("any", 1), ("only", 0)]:
        assert await reward(lab, "7, not 8", {"mode": "numeric", "expected": 7, "pick": pick}) == right


async def test_exact_texts(lab: Lab) -> None:
    assert await reward(lab, "  Paris\n", {"expected": "Paris"}) == 1
    assert await reward(lab, "paris", {"expected": ["Rome", "Paris"], "ignore_case": True}) == 1
    assert await reward(lab, "Paris, I think", {"expected": "Paris"}) == 0
    assert await reward(lab, "the answer: Paris.", {"expected": "Paris", "extract": r"answer: (\w+)"}) == 1
    assert await reward(lab, "New   York", {"expected": "New York", "collapse_space": True}) == 1


async def test_truth_values_are_words(lab: Lab) -> None:
    for answer in ("true", "True", " TRUE\n"):
        assert await reward(lab, answer, {"expected": True}) == 1
        assert await reward(lab, answer, {"expected_key": "a"}, metadata={"a": True}) == 1
        assert await reward(lab, answer, {"expected": False}) == 0
    assert await reward(lab, "1", {"expected": True}) == 0


async def test_patterns(lab: Lab) -> None:
    assert await reward(lab, "it is Paris", {"mode": "regex", "expected": r"\bParis\b"}) == 1
    assert await reward(lab, "it is Rome", {"mode": "regex", "expected": r"\bParis\b"}) == 0


async def test_no_answer_is_a_wrong_one(lab: Lab) -> None:
    assert await reward(lab, None, {"expected": "x"}) == 0
    assert await reward(lab, None, {"expected": "x", "wrong": -1}) == -1


async def test_the_expected_answer_of_the_metadata(lab: Lab) -> None:
    config = {"mode": "numeric", "expected_key": "answer"}
    assert await reward(lab, "18", config, metadata={"answer": "18"}) == 1
    with pytest.raises(EvaluatorError, match="metadata"):
        await reward(lab, "18", config)


async def test_a_file_of_the_agents(lab: Lab) -> None:
    config = {"expected": "42", "file": "out/answer.txt"}
    async with lab.sandbox() as agent:
        evidence = lab.evidence(agent)
        assert (await make("answer", config).evaluate(evidence)).reward == 0
        await work(agent, "mkdir out; echo 42 > out/answer.txt")
        assert (await make("answer", config).evaluate(evidence)).reward == 1
        await work(agent, "rm out/answer.txt; ln -s /etc/hostname out/answer.txt")
        assert (await make("answer", config).evaluate(evidence)).reward == 0
    with pytest.raises(EvaluatorError, match="gone"):
        await reward(lab, None, config)


@pytest.mark.parametrize(
    "config", [{}, {"expected": "x", "mode": "numeric"}, {"expected": "(", "mode": "regex"}, {"expected": "x", "extract": "("}]
)
def test_wrong_settings_are_told_at_submission(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make("answer", config)
