"""Laws 6 and 7 for Google's API, over arbitrary bodies and answers."""

from __future__ import annotations

import copy
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.chat import Answer, Message, Thinking, TokenLogprob, ToolCall, Usage
from polar.dialects.base import Operation, Reply, Route, replay
from polar.dialects.google import Google
from polar.errors import InvalidRequest

GOOGLE = Google()
ROUTE = Route(Operation.GENERATE, {"model": "m", "stream": "true", "alt": "sse"})
ARRAY = Route(Operation.GENERATE, {"model": "m", "stream": "true", "alt": "json"})
COUNT = Route(Operation.COUNT, {"model": "m"})
REF = "0123456789abcdef0123456789"

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4), max_leaves=12
)
SEED: dict[str, Any] = {
    "systemInstruction": {"role": "system", "parts": [{"text": "S"}]},
    "contents": [
        {
            "role": "user",
            "parts": [{"text": "a"}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}, {"fileData": {"fileUri": "gs://x"}}],
        },
        {
            "role": "model",
            "parts": [
                {"text": "t", "thought": True},
                {"functionCall": {"id": "c", "name": "f", "args": {"a": 1}}, "thoughtSignature": "c2ln"},
                {"functionCall": {"name": "f", "args": {}}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {
                    "functionResponse": {
                        "id": "c",
                        "name": "f",
                        "response": {"output": "o"},
                        "parts": [{"inlineData": {"mimeType": "image/png", "data": "AA"}}],
                    }
                },
                {"functionResponse": {"name": "f", "response": {"x": 1}}},
                {"executableCode": {"code": "1"}},
                {"codeExecutionResult": {"output": "1"}},
            ],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {
                    "name": "f",
                    "description": "d",
                    "parameters": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER", "nullable": True}}},
                },
                {"name": "g", "parametersJsonSchema": {"type": "object"}},
            ]
        },
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
    "safetySettings": [{"category": "X"}],
    "generationConfig": {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 3,
        "maxOutputTokens": 5,
        "stopSequences": ["x"],
        "candidateCount": 2,
        "responseMimeType": "application/json",
        "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "STRING", "enum": ["A"]}}},
        "responseLogprobs": True,
        "logprobs": 2,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 5, "thinkingLevel": "LOW"},
    },
}
VERBATIM = {"parameters", "parametersJsonSchema", "responseSchema", "args", "response"}
"""Values that are data of the caller's: what is added inside them is no unknown field."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


PLACES = places(SEED)


def at(body: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        body = body[key]
    return body


def refused(body: dict[str, Any], route: Route = ROUTE) -> InvalidRequest | None:
    """The refusal of a body, if it is refused; anything else that is raised fails the test."""
    try:
        GOOGLE.parse(body, route)
    except InvalidRequest as error:
        return error
    return None


@given(st.dictionaries(st.sampled_from([*SEED, "cachedContent", "generateContentRequest", "system_instruction"]), JSON, max_size=6), JSON)
@settings(max_examples=300, deadline=None)
def test_any_json_object_parses_or_is_an_invalid_request(fields: dict[str, Any], content: Any) -> None:
    for body in (fields, {**fields, "contents": [content]}, {**SEED, **fields}):
        refused(body)
        refused(body, COUNT)


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
    assert GOOGLE.parse(body, ROUTE) == GOOGLE.parse(SEED, ROUTE)


def test_what_is_nested_too_deep_is_an_invalid_request() -> None:
    deep: dict[str, Any] = {"type": "OBJECT"}
    for _ in range(600):
        deep = {"items": deep}
    for fields in (
        {"tools": [{"functionDeclarations": [{"name": "f", "parameters": deep}]}]},
        {"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"default": deep}}]}]},
        {"tools": [{"functionDeclarations": [{"name": "f", "parametersJsonSchema": deep}]}]},
        {"generationConfig": {"responseJsonSchema": deep}},
        {"contents": [{"role": "model", "parts": [{"functionCall": {"name": "f", "args": deep}}]}]},
        {"contents": [{"role": "user", "parts": [{"functionResponse": {"name": "f", "response": deep}}]}]},
    ):
        assert refused({**SEED, **fields}) is not None


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
    completion = draw(st.integers(1, 99))
    usage = Usage(draw(st.integers(1, 99)), completion, thinking=draw(st.integers(0, completion)))
    return Answer(Message("assistant", draw(TEXT), thinking, calls), finish, usage, logprobs=draw(st.none() | LOGPROBS))


@given(st.lists(answers(), min_size=1, max_size=3), st.sampled_from([ROUTE, ARRAY]), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_stream_adds_up_to_the_body(listed: list[Answer], route: Route, thoughts: bool, logprobs: bool) -> None:
    config = {"thinkingConfig": {"includeThoughts": thoughts}, "responseLogprobs": logprobs}
    request = GOOGLE.parse({"contents": [{}], "generationConfig": config}, route)
    reply = Reply(request, REF, created=1, prompt_tokens=9)
    whole = orjson.loads(orjson.dumps(GOOGLE.complete(reply, listed)))
    data = b"".join(replay(GOOGLE.encoder(reply), listed))
    chunks = orjson.loads(data) if route is ARRAY else [orjson.loads(each[6:]) for each in data.split(b"\n\n") if each]
    assert chunks[-1]["usageMetadata"] == whole["usageMetadata"]
    for candidate in whole["candidates"]:
        pieces = [each for chunk in chunks for each in chunk["candidates"] if each["index"] == candidate["index"]]
        parts = [part for each in pieces for part in each["content"].get("parts", [])]
        assert parts == candidate["content"].get("parts", [])
        assert pieces[-1] == {**candidate, "content": pieces[-1]["content"]}
        assert not any("finishReason" in each for each in pieces[:-1])
        assert all(part.get("text") != "" for part in parts)


@given(answers(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_an_echoed_answer_parses_back_to_the_canonical_message(answer: Answer, chunked: bool) -> None:
    request = GOOGLE.parse({"contents": [{}], "generationConfig": {"thinkingConfig": {"includeThoughts": True}}}, ROUTE)
    whole = orjson.loads(orjson.dumps(GOOGLE.complete(Reply(request, REF, created=1), [answer])))
    content = whole["candidates"][0]["content"]
    contents = [{"role": "model", "parts": [part]} for part in content.get("parts", [])] if chunked and "parts" in content else [content]
    (echoed,) = GOOGLE.parse({"contents": contents}, ROUTE).messages
    assert echoed.content == answer.message.content
    assert echoed.reasoning == answer.message.reasoning
    assert [call.name for call in echoed.tool_calls] == [call.name for call in answer.message.tool_calls]
    assert [orjson.loads(call.arguments) for call in echoed.tool_calls] == [
        orjson.loads(call.arguments) for call in answer.message.tool_calls
    ]
    assert [call.id for call in echoed.tool_calls] == [f"call_{REF}{index:02x}" for index in range(len(echoed.tool_calls))]
    assert bool(echoed.refs) == bool(content.get("parts"))


@st.composite
def turns(draw: st.DrawFn) -> list[Any]:
    """One user content, or a model content with calls (with ids or not) and the responses to some of them, in some order."""
    if draw(st.booleans()):
        return [{"role": "user", "parts": [{"text": draw(TEXT)}]}]
    with_ids = draw(st.booleans())
    named = [(name, f"{name}{draw(st.integers(0, 99))}") for name in draw(st.lists(st.sampled_from("fg"), min_size=1, max_size=3))]
    answered = draw(st.lists(st.sampled_from(named), max_size=3))
    ids = [{"id": call_id} if with_ids else {} for _, call_id in named]
    called = [{"functionCall": {"name": name, "args": {}, **own}} for (name, _), own in zip(named, ids, strict=True)]
    responses = [
        {"functionResponse": {"name": name, "response": {}, **({"id": call_id} if with_ids else {})}} for name, call_id in answered
    ]
    return [{"role": "model", "parts": [{"text": draw(TEXT)}, *called]}, {"role": "user", "parts": [*responses, {"text": "go on"}]}]


@given(st.lists(turns(), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_a_longer_history_starts_with_the_messages_of_the_shorter(listed: list[list[Any]]) -> None:
    contents = [content for turn in listed for content in turn]
    full = GOOGLE.parse({"contents": contents}, ROUTE).messages
    for length in range(1, len(contents) + 1):
        if contents[length - 1]["role"] == "user":
            part = GOOGLE.parse({"contents": contents[:length]}, ROUTE).messages
            assert full[: len(part)] == part
    for message in full:
        ids = [call.id for call in message.tool_calls]
        assert all(ids)
