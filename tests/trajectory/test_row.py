"""The row: what cannot be made, and what its JSON form keeps."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_samples import ids, row

from polar.chat import Image, Message, Text, Thinking, Tool, ToolCall
from polar.trajectory import Ledger, Line, Span, Trace, Trajectory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mask": np.zeros(4, np.bool_)}, "5 ids and 4 entries of mask"),
        ({"logprobs": np.zeros(6, np.float32)}, "5 ids and 6 entries of logprobs"),
        ({"ids": np.zeros(5, np.int64)}, "ids must be int32"),
        ({"ids": [1, 2, 3, 4, 5]}, "ids must be int32"),
        ({"mask": np.zeros(5, np.int8)}, "mask must be bool"),
        ({"logprobs": np.zeros(5, np.float64)}, "logprobs must be float32"),
        ({"logprobs": np.zeros((5, 1), np.float32)}, "logprobs must be float32"),
        ({"logprobs": np.array([0, 0, np.nan, 0, 0], np.float32)}, "log-probability at 2 is not finite"),
        ({"logprobs": np.array([0, 0, -1, -1, 0], np.float32)}, "must be 0 there"),
        ({"mask": np.array([1, 0, 1, 0, 1], np.bool_)}, "the id at 0 is trained, but no trained span"),
        ({"spans": (Span(0, 2, 3, trained=False), Span(1, 4, 5))}, "the id at 2 is trained"),
        ({"spans": (Span(0, 2, 3), Span(1, 4, 6))}, "leaves the row of 5 ids"),
        ({"spans": (Span(0, 2, 5), Span(1, 4, 5))}, "overlaps"),
        ({"spans": (Span(0, 4, 5), Span(1, 2, 3))}, "overlaps"),
        ({"reward": float("nan")}, "reward nan is not finite"),
    ],
)
def test_a_row_that_contradicts_itself_cannot_be_made(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row(**change)


def test_prompt_and_response_are_divided_before_the_first_sampled_id() -> None:
    one = row()
    assert (one.prompt_ids.tolist(), one.response_ids.tolist(), one.trained, len(one)) == ([1, 2], [3, 4, 5], 2, 5)
    assert one.trained_messages == (False, True, False, True)


def test_the_json_form_is_the_reference_systems() -> None:
    assert row(reward=1.0, tools=(Tool("run", "Runs."),)).to_json() == {
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5],
        "loss_mask": [1, 0, 1],
        "response_logprobs": [-0.1, 0, -0.3],
        "prompt_messages": [{"role": "user", "content": "q"}],
        "response_messages": [
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": "r"},
            {"role": "assistant", "content": "b"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "run", "description": "Runs.", "parameters": {"type": "object", "properties": {}}}}
        ],
        "finish_reason": "stop",
        "reward": 1.0,
        "metadata": {
            "session_id": "s",
            "rollout_id": "s",
            "group_id": None,
            "role": "main",
            "tags": [],
            "spans": [
                {
                    "completion": 0,
                    "start": 2,
                    "end": 3,
                    "trained": True,
                    "policy_version": None,
                    "sampling": {},
                    "finish": "stop",
                    "message": 1,
                },
                {
                    "completion": 1,
                    "start": 4,
                    "end": 5,
                    "trained": True,
                    "policy_version": None,
                    "sampling": {},
                    "finish": "stop",
                    "message": 3,
                },
            ],
            "faithful": True,
            "cut": None,
        },
    }


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@settings(deadline=None)
def test_float32_survives_json_bit_by_bit(values: list[float]) -> None:
    logprobs = np.array(values, np.float32)
    one = Trace("s", np.arange(len(values), dtype=np.int32), np.ones(len(values), np.bool_), logprobs, (Span(0, 0, len(values)),))
    assert Trace.loads(one.dumps()).logprobs.tobytes() == logprobs.tobytes()
    assert np.array(json.loads(one.dumps())["response_logprobs"], np.float32).tobytes() == logprobs.tobytes()


texts = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates included
messages = st.builds(
    Message,
    role=st.sampled_from(["system", "user", "assistant", "tool"]),
    content=texts | st.lists(texts.map(Text) | st.builds(Image, texts, st.none() | texts), min_size=1, max_size=2).map(tuple),
    thinking=st.just(()) | texts.filter(bool).map(lambda text: (Thinking(text),)),
    tool_calls=st.lists(st.builds(ToolCall, texts, texts, texts), max_size=2).map(tuple),
    tool_call_id=st.none() | texts,
    name=st.none() | texts,
)


@given(st.lists(messages, max_size=4).map(tuple), st.text(max_size=4))
@settings(max_examples=200, deadline=None)
def test_conversations_survive_json_whatever_they_hold(drawn: tuple[Message, ...], name: str) -> None:
    one = row(messages=drawn, spans=(Span(0, 2, 3), Span(1, 4, 5)), tools=(Tool("t", name, {"type": "object"}),), metadata={"x": name})
    line = one.dumps()
    json.loads(line)
    assert b"\n" not in line
    assert Trace.loads(line) == one


def test_a_row_of_another_system_is_read_with_a_span_for_each_run_of_its_mask() -> None:
    foreign = {
        "prompt_ids": [1],
        "response_ids": [2, 3, 4],
        "loss_mask": [1, 0, 1],
        "response_logprobs": [-1.0, -9.0, -2.0],
        "prompt_messages": [],
        "response_messages": [],
        "tools": None,
        "finish_reason": "length",
        "reward": 0.5,
        "metadata": {"group_id": "g", "policy_version": 3},
    }
    one = Trace.from_json(foreign)
    assert [(span.start, span.end) for span in one.spans] == [(1, 2), (3, 4)]
    assert one.logprobs.tolist() == [0, -1, 0, -2]
    assert (one.group_id, one.metadata, one.truncated) == ("g", {"policy_version": 3}, True)


@pytest.mark.parametrize(
    "change",
    [
        {"loss_mask": [1, 0]},
        {"loss_mask": [2, 0, 0]},
        {"response_ids": [1.5, 2, 3]},
        {"response_ids": [2**40, 2, 3]},
        {"response_logprobs": None},
    ],
)
def test_a_damaged_row_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Trace.from_json({**row().to_json(), **change})


def test_two_rows_differ_if_any_field_does() -> None:
    assert row() == row()
    for change in ({"ids": ids(1, 2, 3, 4, 6)}, {"reward": 0.0}, {"role": "title"}, {"faithful": False}, {"metadata": {"a": 1}}):
        assert row(**change) != row()
    assert {f.name for f in fields(Trace)} >= {"ids", "mask", "logprobs", "spans"}


def test_a_ledger_sums_up_by_reason() -> None:
    ledger = Ledger((Line(0, 0, 3, "title", "r"), Line(1, 0, 5, "aborted", "r"), Line(1, 5, 6, "title", "r")))
    assert ledger.by_reason() == {"aborted": 5, "title": 4}
    assert (ledger.tokens, len(ledger)) == (9, 3)


def test_a_trajectory_is_the_reference_systems_json() -> None:
    made = Trajectory("s", (row(),), Ledger((Line(2, 0, 1, "title", "r"),)), sampled=3, metadata={"task": "t"})
    data = made.to_json()
    assert set(data) == {"status", "error", "metadata", "traces"}
    assert data["metadata"]["task"] == "t"
    assert data["metadata"]["ledger"] == [{"completion": 2, "start": 0, "end": 1, "reason": "title", "rule": "r"}]
    assert Trajectory.from_json(data) == made
    assert made.in_rows + made.ledger.tokens == made.sampled
    assert replace(made, traces=()) != made
