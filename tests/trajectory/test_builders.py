"""Builders by name, and what their rows carry besides ids."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from trajectory_samples import MAIN, SESSION, TOOLS, call, merge, streams, trained

import polar.trajectory
from polar.chat import Message, Thinking, Tool, ToolCall
from polar.errors import ConfigError
from polar.records import Session
from polar.trajectory import Builder, Forest, Options, PerRequest, PrefixMerging, Rows, build, builder, builders
from polar.trajectory.assemble import Job

TALK = (call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6, 7], parent=0))


class Nothing(Builder):
    name = "nothing"

    def rows(self, job: Job) -> Rows:
        return Rows([], [])


def test_the_public_names_are_these() -> None:
    assert polar.trajectory.__all__ == [
        "Builder", "ConservationError", "DriftLine", "DriftTotal", "FaithfulnessError", "Forest", "Group", "LawBroken", "Ledger", "Line",
        "Options", "PerRequest", "PrefixMerging", "Problem", "Reason", "Recipe", "Rows", "Span", "Trace", "Trajectory", "advantages",
        "aggregate", "build", "builder", "check", "credit", "groups", "recipe", "validate",
    ]  # fmt: skip


def test_per_request_makes_a_row_of_every_completion() -> None:
    made = PerRequest().build(Forest("s", TALK), SESSION, MAIN)
    assert streams(made) == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7]]
    assert trained(made) == [[3, 4], [6, 7]]


def test_per_request_cuts_at_the_same_length() -> None:
    made = PerRequest(Options(max_length=6, cut="token")).build(Forest("s", TALK), SESSION, MAIN)
    assert streams(made) == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]]
    assert [row.cut for row in made.traces] == [None, "over_length"]


def test_builders_are_found_by_name_with_their_options() -> None:
    assert isinstance(builder(), PrefixMerging)
    made = builder("per_request", {"max_length": 9})
    assert isinstance(made, PerRequest)
    assert made.options.max_length == 9


def test_others_come_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("nothing", f"{__name__}:Nothing", builders.GROUP)
    monkeypatch.setattr(builders, "entry_points", lambda group: [entry] if group == "polar.builders" else [])
    assert isinstance(builder("nothing"), Nothing)


def test_an_entry_point_that_is_no_builder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("wrong", "json:loads", builders.GROUP)
    monkeypatch.setattr(builders, "entry_points", lambda group: [entry])
    with pytest.raises(ConfigError, match="not a subclass of Builder"):
        builder("wrong")


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no builder is called 'merge'; there are: prefix_merging, per_request"):
        builder("merge")


def test_a_trajectory_says_how_it_was_made() -> None:
    made = PrefixMerging(Options(max_length=100)).build(Forest("s", TALK), SESSION, MAIN)
    assert made.builder["strategy"] == "prefix_merging"
    assert made.builder["options"]["max_length"] == 100
    assert made.builder["harness"] == "test"
    assert made.metadata == SESSION.metadata


def test_build_is_the_short_way() -> None:
    assert streams(build(SESSION, TALK)) == [[1, 2, 3, 4, 5, 6, 7]]


def test_rows_carry_what_identifies_their_task() -> None:
    session = Session("s", b"", b"", metadata={"group_id": "g", "rollout_id": "r", "task": "t", "repository": "o/n", "secret": "no"})
    (row,) = merge(*TALK, session=session).traces
    assert (row.group_id, row.rollout_id, row.session) == ("g", "r", "s")
    assert row.metadata == {
        "task": "t",
        "repository": "o/n",
        "model": "",
        "dialect": "openai_chat",
        "mode": "tokens",
        "policy_version": None,
        "harness": "test",
    }


def test_tools_are_as_the_model_saw_them() -> None:
    """A missing description is an empty one, and nothing of the harness's own naming is left."""
    (row,) = merge(call(0, [1], [2], tools=(Tool("run", kind="custom", namespace="n", wire_name="w"),))).traces
    assert row.tools == (Tool("run", ""),)


# --- the conversation -----------------------------------------------------------------------------------------------------------


def test_messages_are_the_conversation_with_the_answers_as_sampled() -> None:
    call_tool = (ToolCall("c", "run", '{"a":  1}'),)
    answer = Message("assistant", "first", thinking=(Thinking("so", signature="sig"),), tool_calls=call_tool, refs=("item_1",))
    echoed = Message("assistant", " first\n", tool_calls=(ToolCall("c", "run", '{"a": 1}'),))
    question, result, more = Message("user", "q"), Message("tool", "r", tool_call_id="c"), Message("user", "more")
    made = merge(
        call(0, [1, 2], [3, 4], messages=(question,), answer=answer),
        call(1, [1, 2, 3, 4, 5], [6], parent=0, messages=(question, echoed, result, more), answer=Message("assistant", "second")),
    )
    (row,) = made.traces
    plain = Message("assistant", "first", thinking=(Thinking("so"),), tool_calls=call_tool)
    assert row.messages == (question, plain, result, more, Message("assistant", "second"))
    assert [span.message for span in row.spans] == [1, 4]
    assert row.trained_messages == (False, True, False, False, True)
    assert row.tools == TOOLS


def test_a_side_branchs_answer_is_not_among_the_messages_of_the_row_beside_it() -> None:
    q, a = Message("user", "q"), Message("assistant", "answer 0")
    made = merge(
        call(0, [1], [2], messages=(q,)),
        call(1, [1, 2, 3], [4], parent=0, messages=(q, a, Message("user", "left"))),
        call(2, [1, 2, 5], [6], parent=0, messages=(q, a, Message("user", "right"))),
    )
    assert [[message.text for message in row.messages] for row in made.traces] == [
        ["q", "answer 0", "left", "answer 1"],
        ["q", "answer 0", "right", "answer 2"],
    ]
    assert [row.trained_messages for row in made.traces] == [(False, True, False, True), (False, False, False, True)]


def test_a_request_of_another_shape_keeps_its_own_messages_and_places_are_not_guessed() -> None:
    made = merge(
        call(0, [1], [2], messages=(Message("user", "q"),)),
        call(1, [1, 2, 3], [4], parent=0, messages=(Message("user", "all in one message"),)),
    )
    (row,) = made.traces
    assert [message.text for message in row.messages] == ["all in one message", "answer 1"]
    assert [span.message for span in row.spans] == [None, 1]
