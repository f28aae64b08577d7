"""Laws 6 and 7 for Chat Completions, over arbitrary bodies and answers."""

from __future__ import annotations

import copy
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.chat import Answer, Message, Thinking, TokenLogprob, ToolCall, Usage
from polar.dialects.base import Operation, Reply, Route, replay
from polar.dialects.openai_chat import OpenAIChat
from polar.errors import InvalidRequest

CHAT = OpenAIChat()
ROUTE = Route(Operation.GENERATE)
REF = "0123456789abcdef0123456789"

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)
SEED: dict[str, Any] = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True},
    "messages": [
        {"role": "developer", "content": "S"},
        {
            "role": "user",
            "name": "n",
            "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "r",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "o"}]},
        {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "r"},
        {"role": "user", "content": [{"type": "file", "file": {"filename": "a", "file_data": "data:text/plain;base64,aGk="}}]},
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        },
        {"type": "custom", "custom": {"name": "g", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "s"}}}},
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "parallel_tool_calls": True,
    "temperature": 0.5,
    "top_p": 0.9,
    "max_completion_tokens": 50,
    "stop": ["x"],
    "n": 2,
    "seed": 3,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": -1},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    "reasoning_effort": "low",
    "chat_template_kwargs": {"enable_thinking": True},
}
VERBATIM = {"parameters", "schema", "logit_bias"}
"""Values that are data of the caller's: what is added inside them is no unknown field."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


PLACES = places(SEED)


def at(body: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        body = body[key]
    return body


def refused(body: dict[str, Any]) -> InvalidRequest | None:
    """The refusal of a body, if it is refused; anything else that is raised fails the test."""
    try:
        CHAT.parse(body, ROUTE)
    except InvalidRequest as error:
        return error
    return None


@given(
    st.dictionaries(st.sampled_from([*SEED, "functions", "function_call", "max_tokens", "reasoning", "thinking"]), JSON, max_size=6), JSON
)
@settings(max_examples=300, deadline=None)
def test_any_json_object_parses_or_is_an_invalid_request(fields: dict[str, Any], message: Any) -> None:
    for body in (fields, {**fields, "messages": [message]}, {**SEED, **fields}):
        refused(body)


@given(st.sampled_from([place for place in PLACES if place]), JSON)
@settings(max_examples=600, deadline=None)
def test_a_mutated_request_parses_or_names_what_is_wrong(place: tuple[Any, ...], value: Any) -> None:
    body = copy.deepcopy(SEED)
    at(body, place[:-1])[place[-1]] = value
    error = refused(body)
    assert error is None or error.param


@given(st.sampled_from([place for place in PLACES if isinstance(at(SEED, place), dict) and not VERBATIM & set(place)]), JSON)
@settings(max_examples=300, deadline=None)
def test_unknown_fields_never_change_the_request(place: tuple[Any, ...], value: Any) -> None:
    body = copy.deepcopy(SEED)
    at(body, place)["zz_unknown"] = value
    assert CHAT.parse(body, ROUTE) == CHAT.parse(SEED, ROUTE)


def test_a_schema_nested_too_deep_is_an_invalid_request() -> None:
    deep: dict[str, Any] = {}
    for _ in range(400):
        deep = {"a": deep}
    for fields in (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}]},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": deep}}},
    ):
        error = refused({**SEED, **fields})
        assert error is not None
        assert "JSON" in error.message


TEXT = st.text(max_size=20)
LOGPROBS = st.lists(st.builds(TokenLogprob, st.text(max_size=3), st.floats(-10, 0)), max_size=3).map(tuple)
ARGUMENTS = st.dictionaries(st.text(max_size=5), SCALARS, max_size=3).map(lambda value: orjson.dumps(value).decode())


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    calls = tuple(
        ToolCall("bare", name, arguments) for name, arguments in draw(st.lists(st.tuples(st.sampled_from("fh"), ARGUMENTS), max_size=3))
    )
    thinking = tuple(Thinking(text) for text in draw(st.lists(TEXT.filter(bool), max_size=1)))
    finish = draw(st.sampled_from(["length", "tool_calls"] if calls else ["stop", "stop_sequence", "length", "content_filter"]))
    usage = Usage(draw(st.integers(1, 99)), draw(st.integers(1, 99)))
    return Answer(Message("assistant", draw(TEXT), thinking, calls), finish, usage, logprobs=draw(st.none() | LOGPROBS))


def added_up(stream: bytes) -> dict[str, Any]:
    """A complete body from a stream's events, as a client would build it."""
    *events, done = [block.removeprefix("data: ") for block in stream.decode().split("\n\n") if block]
    assert done == "[DONE]"
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in map(orjson.loads, events):
        usage = event.get("usage") or usage
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"message": {"content": ""}, "logprobs": None, "finish_reason": None})
            message = choice["message"]
            for key, value in piece["delta"].items():
                if key == "tool_calls":
                    for call in value:
                        items = message.setdefault("tool_calls", {})
                        item = items.setdefault(
                            call["index"], {"id": call.get("id"), "name": call["function"].get("name"), "arguments": ""}
                        )
                        item["arguments"] += call["function"]["arguments"]
                elif isinstance(value, str) and key != "role":
                    message[key] = message.get(key, "") + value
            if piece["logprobs"]:
                choice["logprobs"] = [*(choice["logprobs"] or []), *piece["logprobs"]["content"]]
            choice["finish_reason"] = piece["finish_reason"] or choice["finish_reason"]
    return {"choices": choices, "usage": usage}


@given(st.lists(answers(), min_size=1, max_size=3), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_stream_adds_up_to_the_body(listed: list[Answer], logprobs: bool) -> None:
    request = CHAT.parse(
        {"messages": [{"role": "user"}], "stream": True, "stream_options": {"include_usage": True}, "logprobs": logprobs}, ROUTE
    )
    reply = Reply(request, REF, created=1)
    whole = orjson.loads(orjson.dumps(CHAT.complete(reply, listed)))
    streamed = added_up(b"".join(replay(CHAT.encoder(reply), listed)))
    assert streamed["usage"] == whole["usage"]
    for choice in whole["choices"]:
        other = streamed["choices"][choice["index"]]
        message = choice["message"]
        assert other["message"]["content"] == (message["content"] or "")
        assert other["message"].get("reasoning_content") == message.get("reasoning_content")
        calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", [])]
        assert list(other["message"].get("tool_calls", {}).values()) == calls
        assert other["finish_reason"] == choice["finish_reason"]
        assert (other["logprobs"] or []) == ((choice["logprobs"] or {}).get("content") or [])


@given(answers())
@settings(max_examples=300, deadline=None)
def test_an_echoed_answer_parses_back_to_the_canonical_message(answer: Answer) -> None:
    request = CHAT.parse({"messages": [{"role": "user"}]}, ROUTE)
    whole = orjson.loads(orjson.dumps(CHAT.complete(Reply(request, REF, created=1), [answer])))
    echoed = CHAT.parse({"messages": [whole["choices"][0]["message"]]}, ROUTE).messages[0]
    assert (echoed.content, echoed.thinking) == (answer.message.content, answer.message.thinking)
    assert [(call.name, call.arguments) for call in echoed.tool_calls] == [
        (call.name, call.arguments) for call in answer.message.tool_calls
    ]
    assert [call.id for call in echoed.tool_calls] == [f"call_{REF}{index:02x}" for index in range(len(echoed.tool_calls))]


@given(st.lists(st.sampled_from(SEED["messages"]), min_size=1, max_size=10))
@settings(max_examples=200, deadline=None)
def test_a_longer_history_starts_with_the_messages_of_the_shorter(listed: list[Any]) -> None:
    full = CHAT.parse({"messages": listed}, ROUTE).messages
    assert len(full) == len(listed)
    for length in range(1, len(listed)):
        assert CHAT.parse({"messages": listed[:length]}, ROUTE).messages == full[:length]
