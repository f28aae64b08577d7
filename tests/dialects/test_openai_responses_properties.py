"""OpenAI Responses: the laws, for any input."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai_responses_samples import CALLS, DIALECT, REF, TOOLS, USAGE, added_up, events, reply, request

from polar.chat import Answer, ChatRequest, FinishDelta, Message, TextDelta, Thinking, ThinkingDelta, ToolCall, ToolCallDelta, deltas
from polar.dialects.base import Operation, Reply, Route
from polar.dialects.openai_responses.calls import ID_PREFIX
from polar.errors import InvalidRequest

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALAR = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT
JSON = st.recursive(SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)
ITEM_TYPES = [
    "message",
    "reasoning",
    *ID_PREFIX,
    "function_call_output",
    "custom_tool_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "tool_search_output",
    "additional_tools",
    "agent_message",
    "compaction",
    "configuration_update",
    "compaction_trigger",
    "item_reference",
    "web_search_call",
]
FIELDS = [
    *("id", "role", "content", "summary", "encrypted_content", "call_id", "name", "namespace", "arguments", "input", "action"),
    *("operation", "output", "tools", "status", "author", "reasoning"),
]
TOOL_TYPES = ["function", "custom", "namespace", "shell", "local_shell", "apply_patch", "tool_search", "web_search"]
TOOL_FIELDS = ["name", "description", "parameters", "format", "tools", "execution", "defer_loading"]


def typed(kinds: list[str], names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    likely = (
        JSON
        | TEXT
        | st.sampled_from(["user", "assistant", "system"])
        | st.lists(st.fixed_dictionaries({"type": TEXT, "text": TEXT}), max_size=2)
    )
    values = st.dictionaries(st.sampled_from(names), likely, max_size=6)
    return st.builds(lambda kind, rest: {"type": kind, **rest}, st.sampled_from(kinds), values)


BODY = st.dictionaries(
    st.sampled_from(
        [
            *("model", "instructions", "previous_response_id", "stream", "store", "tool_choice", "parallel_tool_calls", "temperature"),
            *("max_output_tokens", "top_logprobs", "include", "text", "reasoning", "metadata", "background", "messages"),
        ]
    ),
    JSON,
    max_size=5,
).flatmap(
    lambda rest: st.fixed_dictionaries(
        {},
        optional={
            "input": JSON | st.lists(typed(ITEM_TYPES, FIELDS) | JSON, max_size=4),
            "tools": JSON | st.lists(typed(TOOL_TYPES, TOOL_FIELDS), max_size=3),
        },
    ).map(lambda known: {**rest, **known})
)


def parse_or_refusal(body: dict[str, Any], operation: Operation) -> ChatRequest | InvalidRequest:
    try:
        return DIALECT.parse(body, Route(operation))
    except InvalidRequest as refusal:
        return refusal


@settings(max_examples=600, deadline=None)
@given(BODY, st.sampled_from([Operation.GENERATE, Operation.COMPACT, Operation.COUNT]))
def test_parsing_raises_only_invalid_request_and_what_it_takes_can_be_answered(body: dict[str, Any], operation: Operation) -> None:
    before = repr(body)
    parsed = parse_or_refusal(body, operation)
    assert repr(body) == before
    if isinstance(parsed, InvalidRequest):
        assert parsed.param
        return
    encoder = DIALECT.encoder(Reply(parsed, REF, 1))
    sent = encoder.start() + encoder.feed(TextDelta("t")) + encoder.feed(FinishDelta("stop", USAGE))
    assert events(sent)[-1]["response"]["output"]
    assert DIALECT.items(parsed)["object"] == "list"


def valid_body() -> dict[str, Any]:
    ref = "fedcba9876543210fedcba9876"
    return {
        "model": "m",
        "instructions": "I",
        "tools": copy.deepcopy(TOOLS),
        "reasoning": {"effort": "high"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
        "tool_choice": {"type": "function", "name": "read"},
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:x"}]},
            {"type": "reasoning", "id": f"rs_{ref}", "summary": [{"type": "summary_text", "text": "r"}], "encrypted_content": "e"},
            {"type": "message", "id": f"msg_{ref}", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
            {"type": "function_call", "id": f"fc_{ref}00", "call_id": f"call_{ref}00", "name": "read", "arguments": "{}"},
            {"type": "custom_tool_call", "id": f"ctc_{ref}01", "call_id": f"call_{ref}01", "name": "patch", "input": "x"},
            {"type": "function_call_output", "call_id": f"call_{ref}00", "output": [{"type": "input_text", "text": "o"}]},
            {"type": "custom_tool_call_output", "call_id": f"call_{ref}01", "output": "p"},
        ],
    }


def objects(value: Any) -> list[dict[str, Any]]:
    """All objects of a body that are ours to extend: a JSON schema's and metadata's keys mean something."""
    if isinstance(value, list):
        return [found for item in value for found in objects(item)]
    if isinstance(value, dict):
        inner = [found for name, item in value.items() if name not in ("parameters", "schema") for found in objects(item)]
        return [value, *inner]
    return []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_unknown_fields_never_change_the_parse(data: st.DataObject) -> None:
    plain = DIALECT.parse(valid_body(), Route(Operation.GENERATE))
    mutated = valid_body()
    places = objects(mutated)
    for index in data.draw(st.lists(st.integers(0, len(places) - 1), min_size=1, max_size=4)):
        places[index]["x_" + data.draw(TEXT)] = data.draw(TEXT | st.integers(0, 9) | st.lists(TEXT, max_size=2))
    parsed = DIALECT.parse(mutated, Route(Operation.GENERATE))
    assert (parsed.messages, parsed.tools, parsed.tool_choice) == (plain.messages, plain.tools, plain.tool_choice)
    assert (parsed.sampling, parsed.response_format, parsed.effort) == (plain.sampling, plain.response_format, plain.effort)


def test_the_same_body_parses_the_same_each_time() -> None:
    assert DIALECT.parse(valid_body(), Route(Operation.GENERATE)) == DIALECT.parse(valid_body(), Route(Operation.GENERATE))


ARGUMENTS = st.dictionaries(TEXT, st.integers(0, 9) | TEXT | st.lists(TEXT, max_size=2), max_size=3).map(json.dumps) | TEXT
MADE_CALLS = st.lists(
    st.sampled_from(list(CALLS.values())) | st.tuples(st.sampled_from([name for name, _ in CALLS.values()]), ARGUMENTS), max_size=4
)
MESSAGES = st.builds(
    lambda text, thinking, calls: Message(
        "assistant",
        text,
        (Thinking(thinking),) if thinking else (),
        tuple(ToolCall(f"{REF}{index:02x}", name, arguments) for index, (name, arguments) in enumerate(calls)),
    ),
    TEXT,
    TEXT,
    MADE_CALLS,
)


def value_of(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@settings(max_examples=300, deadline=None)
@given(MESSAGES)
def test_echoed_output_items_are_the_canonical_message_again(message: Message) -> None:
    output = DIALECT.complete(reply(), [Answer(message, "stop", USAGE)])["output"]
    (again,) = DIALECT.parse({"input": output, "tools": TOOLS}, Route(Operation.GENERATE)).messages
    assert (again.role, again.content, again.reasoning) == ("assistant", message.content, message.reasoning)
    assert [(made.name, value_of(made.arguments)) for made in again.tool_calls] == [
        (made.name, value_of(made.arguments)) for made in message.tool_calls
    ]
    assert all(sampled.id in made.id for made, sampled in zip(again.tool_calls, message.tool_calls, strict=True))
    assert all(REF in ref for ref in again.refs)
    assert all(REF in (block.signature or "") for block in again.thinking)


@settings(max_examples=200, deadline=None)
@given(MESSAGES, st.sampled_from(["stop", "length", "content_filter"]), st.data())
def test_any_cut_of_a_live_stream_adds_up_to_the_body(message: Message, finish: Any, data: st.DataObject) -> None:
    encoder = DIALECT.encoder(reply())
    sent = [encoder.start()]
    for delta in deltas(Answer(message, finish, USAGE)):
        if isinstance(delta, TextDelta | ThinkingDelta):
            cut = data.draw(st.integers(0, len(delta.text)))
            pieces = [type(delta)(text) for text in (delta.text[:cut], delta.text[cut:]) if text]
            sent += [encoder.feed(piece) for piece in pieces]
        else:
            sent.append(encoder.feed(delta))
    found = events(b"".join(sent) + encoder.end())
    response = found[-1]["response"]
    assert response["output"] == added_up(found)
    assert response == json.loads(json.dumps(DIALECT.complete(reply(), [Answer(message, finish, USAGE)])))


@pytest.mark.parametrize("kind", CALLS)
def test_every_kind_of_call_opens_in_progress_and_empty(kind: str) -> None:
    encoder = DIALECT.encoder(reply())
    name, arguments = CALLS[kind]
    found = events(
        encoder.start()
        + encoder.feed(ToolCallDelta(0, ToolCall(f"{REF}00", name, arguments)))
        + encoder.feed(FinishDelta("tool_calls", USAGE))
    )
    opened = next(event["item"] for event in found if event["type"] == "response.output_item.added")
    assert opened["status"] == "in_progress"
    assert request().tool(name) is not None
