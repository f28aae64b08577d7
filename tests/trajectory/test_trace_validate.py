"""Rows from anywhere: everything that is wrong with one is said, and nothing raises."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_samples import DRAWN, SESSION, call, merge, options, row, sessions

from polar.chat import Message, ToolCall
from polar.records import Completion
from polar.testing.tokenizer import WordTokenizer
from polar.trajectory import Forest, Options, PrefixMerging, Trace, validate


def codes(data: Any, **more: Any) -> list[str]:
    return [problem.code for problem in validate(data, **more)]


def changed(**fields: Any) -> dict[str, Any]:
    return {**row().to_json(), **fields}


def test_a_good_row_has_no_problems() -> None:
    assert codes(row().to_json(), vocabulary=6) == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"loss_mask": [1, 0]}, "length"),
        ({"response_logprobs": [-0.1, 0]}, "length"),
        ({"response_logprobs": None}, "missing"),
        ({"response_ids": "abc"}, "type"),
        ({"metadata": [1]}, "type"),
        ({"loss_mask": [2, 0, 1]}, "mask"),
        ({"loss_mask": [0.5, 0, 1]}, "mask"),
        ({"loss_mask": [True, 0, 1]}, "mask"),
        ({"loss_mask": [1, 1, 1]}, "contiguity"),
        ({"response_logprobs": [float("nan"), 0, -1]}, "logprob"),
        ({"response_logprobs": [None, 0, -1]}, "logprob"),
        ({"response_logprobs": [float("-inf"), 0, -1]}, "logprob"),
        ({"response_ids": [3, 4, 6]}, "vocabulary"),
        ({"response_ids": [3, -4, 5]}, "vocabulary"),
        ({"prompt_ids": [1, 2.0]}, "vocabulary"),
        ({"reward": float("inf")}, "reward"),
        ({"reward": "good"}, "reward"),
        ({"prompt_ids": [1]}, "contiguity"),
        ({"metadata": {"spans": [{"start": 2, "end": 9}]}}, "contiguity"),
        ({"metadata": {"spans": [{"begin": 2}]}}, "type"),
        ({"metadata": {"spans": [{"start": 2, "end": 5, "completion": 0, "colour": "red"}]}}, "row"),
        ({"response_messages": [{"content": "no role"}]}, "row"),
    ],
)
def test_each_fault_is_named(fields: dict[str, Any], code: str) -> None:
    found = validate(changed(**fields), vocabulary=6)
    assert code in [problem.code for problem in found if problem.severity == "error"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"loss_mask": [0, 0, 0], "response_logprobs": [0, 0, 0]}, "nothing_trained"),
        ({"response_logprobs": [0.5, 0, -1]}, "positive_logprob"),
        ({"response_logprobs": [-0.5, -2, -1]}, "masked_logprob"),
        ({"metadata": {**row().to_json()["metadata"], "faithful": False}}, "unfaithful"),
    ],
)
def test_what_is_only_worth_a_look_is_a_warning(fields: dict[str, Any], code: str) -> None:
    assert [(problem.code, problem.severity) for problem in validate(changed(**fields))] == [(code, "warning")]


def test_all_faults_are_told_at_once() -> None:
    assert {"mask", "logprob", "vocabulary"} <= set(
        codes(changed(loss_mask=[7, 0, 1], response_logprobs=[float("nan"), 0, 0], response_ids=[3, 4, -5]))
    )


def test_a_run_that_does_not_decode_to_its_message_is_found() -> None:
    words = WordTokenizer()
    question, answer = words.encode("what is it"), words.encode("it is this")
    good = merge(call(0, question, answer, answer=Message("assistant", "it is this"))).traces[0].to_json()
    assert codes(good, tokenizer=words) == []
    bad = merge(call(0, question, answer, answer=Message("assistant", "it is that"))).traces[0].to_json()
    assert codes(bad, tokenizer=words) == ["decode"]


@pytest.mark.parametrize(("text", "found"), [("first\nthen", []), ("then\nfirst", ["decode"]), ("first\nthat", ["decode"])])
def test_text_on_both_sides_of_a_call_is_found_in_its_pieces(text: str, found: list[str]) -> None:
    """A message's text has no place for what stood between: `tokens.reading` puts each piece on a line of its own."""
    words = WordTokenizer()
    answer = Message("assistant", text, tool_calls=(ToolCall("c", "run", "{}"),))
    made = call(0, words.encode("go"), words.encode("first call run end then"), answer=answer)
    assert codes(merge(made).traces[0].to_json(), tokenizer=words) == found


def test_a_run_that_the_rows_end_cuts_is_not_its_whole_message() -> None:
    words = WordTokenizer()
    question, answer = words.encode("what is it"), words.encode("it is this one here")
    made = call(0, question, answer, answer=Message("assistant", "it is this one here"))
    (cut,) = merge(made, max_length=len(question) + 3, cut="token").traces
    assert cut.spans[0].message is None
    assert codes(cut.to_json(), tokenizer=words) == []


def test_ids_that_the_tokenizer_does_not_know_are_found() -> None:
    words = WordTokenizer()
    assert codes(merge(call(0, [0], [4000])).traces[0].to_json(), tokenizer=words) == ["decode"]


@pytest.mark.parametrize("data", [None, [], "row", 3, {}, {"prompt_ids": {}}])
def test_what_is_no_row_at_all_is_said_to_be_none(data: Any) -> None:
    assert validate(data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)
names = st.sampled_from(sorted(row().to_json()))


@given(st.dictionaries(names, json_values, max_size=3))
@settings(max_examples=300, deadline=None)
def test_validation_never_raises_and_what_passes_is_a_row(damage: dict[str, Any]) -> None:
    data = changed(**damage)
    if not any(problem.severity == "error" for problem in validate(data)):
        Trace.from_json(data)


@given(sessions(), options)
@settings(max_examples=100, deadline=None)
def test_rows_of_the_builders_are_valid(completions: list[Completion], drawn: Options) -> None:
    for trace in PrefixMerging(drawn).build(Forest("s", completions), SESSION, DRAWN).traces:
        assert [problem for problem in validate(trace.to_json(), vocabulary=4) if problem.severity == "error"] == []
