"""Laws of the Anthropic dialect, as properties."""

from __future__ import annotations

from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.chat import Answer, ChatRequest, Message, Sampling, Thinking, ToolCall, Usage
from polar.dialects.anthropic import Anthropic
from polar.dialects.base import Operation, Reply, Route, replay
from polar.errors import InvalidRequest

DIALECT = Anthropic()
GENERATE = Route(Operation.GENERATE)
REF = "0123456789abcdef0123456789"

scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
json_values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=8
)

# --- valid bodies, built block by block ---------------------------------------------------------------------------------

texts = st.text(max_size=12)
text_blocks = st.builds(lambda text: {"type": "text", "text": text}, texts)
image_blocks = st.sampled_from(
    [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}},
        {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
    ]
)
document_blocks = st.builds(lambda text: {"type": "document", "source": {"type": "text", "data": text}}, texts)
reference_blocks = st.just({"type": "tool_reference", "tool_name": "late"})
result_contents = texts | st.lists(text_blocks | image_blocks | document_blocks | reference_blocks, max_size=3)
result_blocks = st.builds(
    lambda identifier, content, failed: {"type": "tool_result", "tool_use_id": identifier, "content": content, "is_error": failed},
    texts,
    result_contents,
    st.booleans(),
)
objects = st.dictionaries(st.text(max_size=6), json_values, max_size=3)
assistant_blocks = st.one_of(
    text_blocks,
    st.builds(lambda text, signature: {"type": "thinking", "thinking": text, "signature": signature}, texts, texts),
    st.builds(lambda data: {"type": "redacted_thinking", "data": data}, texts),
    st.builds(lambda identifier, value: {"type": "tool_use", "id": identifier, "name": "ls", "input": value}, texts, objects),
)
messages = st.one_of(
    st.builds(
        lambda content: {"role": "user", "content": content}, texts | st.lists(text_blocks | image_blocks | result_blocks, max_size=4)
    ),
    st.builds(lambda content: {"role": "assistant", "content": content}, texts | st.lists(assistant_blocks, max_size=4)),
    st.builds(lambda content: {"role": "system", "content": content}, texts | st.lists(text_blocks, max_size=2)),
)
TOOLS = [
    {"name": "ls", "description": "d", "input_schema": {"type": "object"}},
    {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True},
    {"type": "web_search_20250305", "name": "web_search"},
]
bodies = st.fixed_dictionaries(
    {"model": texts, "max_tokens": st.integers(1, 9), "messages": st.lists(messages, min_size=1, max_size=5)},
    optional={
        "system": texts | st.lists(text_blocks, max_size=3),
        "tools": st.just(TOOLS),
        "tool_choice": st.sampled_from([{"type": "auto"}, {"type": "any"}, {"type": "none", "disable_parallel_tool_use": True}]),
        "thinking": st.sampled_from([{"type": "adaptive"}, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 9}]),
        "output_config": st.just({"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}}),
        "stream": st.booleans(),
        "stop_sequences": st.lists(st.text(min_size=1, max_size=3), max_size=2),
    },
)

OPAQUE = ("input", "input_schema", "schema")
"""Values that are the caller's own: a field added there is content, not an unknown field."""


def with_unknown_fields(value: Any, draw: Any) -> Any:
    if isinstance(value, list):
        return [with_unknown_fields(item, draw) for item in value]
    if not isinstance(value, dict):
        return value
    known = {key: item if key in OPAQUE else with_unknown_fields(item, draw) for key, item in value.items()}
    return known | draw(st.dictionaries(st.sampled_from(["x_new", "cache_control", "citations", "caller", "zz"]), json_values, max_size=2))


def assert_parsed_or_refused(body: dict[str, Any]) -> None:
    """Any exception but an `InvalidRequest` that names a field fails the test."""
    refusal = None
    try:
        DIALECT.parse(body, GENERATE)
    except InvalidRequest as error:
        refusal = error
    assert refusal is None or refusal.param


@given(json_values | st.dictionaries(st.sampled_from(["model", "messages", "system", "tools", "max_tokens", "thinking"]), json_values))
@settings(deadline=None)
def test_parse_raises_nothing_but_invalid_request_for_any_json(value: Any) -> None:
    body = value if isinstance(value, dict) else {"model": "m", "max_tokens": 1, "messages": value}
    assert_parsed_or_refused(body)


@given(bodies, st.data())
@settings(deadline=None)
def test_parse_raises_nothing_but_invalid_request_for_a_damaged_body(body: dict[str, Any], data: st.DataObject) -> None:
    node: Any = body
    while True:
        key = data.draw(st.sampled_from(sorted(node)) if isinstance(node, dict) else st.integers(0, len(node) - 1))
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node[key] = node[key].copy()
            node = node[key]
            continue
        node[key] = data.draw(json_values)
        break
    assert_parsed_or_refused(body)


@given(bodies, st.data())
@settings(deadline=None)
def test_unknown_fields_at_any_level_change_nothing(body: dict[str, Any], data: st.DataObject) -> None:
    assert DIALECT.parse(with_unknown_fields(body, data.draw), GENERATE) == DIALECT.parse(body, GENERATE)


@given(bodies)
@settings(deadline=None)
def test_a_body_parses_to_the_same_each_time_it_is_sent(body: dict[str, Any]) -> None:
    again = orjson.loads(orjson.dumps(body))
    assert DIALECT.parse(again, GENERATE) == DIALECT.parse(body, GENERATE)


@given(bodies, st.lists(messages, min_size=1, max_size=3))
@settings(deadline=None)
def test_what_comes_after_an_answer_leaves_what_was_before_it_unchanged(body: dict[str, Any], new: list[Any]) -> None:
    answered = {**body, "messages": [*body["messages"], {"role": "user", "content": "q"}]}
    first = DIALECT.parse(answered, GENERATE).messages
    reply = {"role": "assistant", "content": "done"}
    longer = [*answered["messages"], reply, {"role": "user", "content": "next"}, *new]
    second = DIALECT.parse({**body, "messages": longer}, GENERATE).messages
    assert second[: len(first)] == first


# --- answers ------------------------------------------------------------------------------------------------------------

calls = st.builds(lambda name, value: ToolCall("", name, orjson.dumps(value).decode()), st.text(min_size=1, max_size=5), objects)
spaced_calls = st.builds(
    lambda name, value: ToolCall("", name, orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()), st.just("f"), objects
)
malformed = st.sampled_from([ToolCall("", "f", text) for text in ('{"a', "[1]", "nonsense", "null")])
finishes = st.sampled_from(["stop", "stop_sequence", "length", "tool_calls", "content_filter"])
counts = st.integers(0, 99)


def answers(call: st.SearchStrategy[ToolCall]) -> st.SearchStrategy[Answer]:
    thoughts = st.lists(st.builds(Thinking, st.text(min_size=1, max_size=8)), max_size=1).map(tuple)
    message = st.builds(lambda t, th, c: Message("assistant", t, th, c), texts, thoughts, st.lists(call, max_size=3).map(tuple))
    usage = st.builds(Usage, counts, counts, counts, counts)
    return st.builds(Answer, message, finishes, usage, st.none() | st.just("</x>"), st.none() | texts)


def reply_for(**options: Any) -> Reply:
    return Reply(ChatRequest("m", (), sampling=Sampling(max_tokens=9), options=options), REF, 0, prompt_tokens=4, context=150)


@given(answers(calls | spaced_calls | malformed), st.booleans())
@settings(deadline=None)
def test_the_stream_adds_up_to_the_body(answer: Answer, omitted: bool) -> None:
    reply = reply_for(thinking_omitted=omitted)
    message: dict[str, Any] = {}
    inputs: dict[int, str] = {}
    for chunk in b"".join(replay(DIALECT.encoder(reply), [answer])).decode().split("\n\n")[:-1]:
        event = orjson.loads(chunk.split("\ndata: ", 1)[1])
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block["text"] += delta["text"]
                    case "thinking_delta":
                        block["thinking"] += delta["thinking"]
                    case "signature_delta":
                        block["signature"] += delta["signature"]
                    case "input_json_delta":
                        inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
            case "content_block_stop":
                if event["index"] in inputs:
                    message["content"][event["index"]]["input"] = orjson.loads(inputs[event["index"]])
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert message == DIALECT.complete(reply, [answer])


@given(answers(calls | spaced_calls))
@settings(deadline=None)
def test_an_echoed_answer_parses_back_to_the_canonical_message(answer: Answer) -> None:
    content = DIALECT.complete(reply_for(), [answer])["content"]
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]}
    echoed = DIALECT.parse(body, GENERATE).messages[1]
    assert echoed.text == answer.message.text + (answer.refusal or "")
    assert echoed.reasoning == answer.message.reasoning
    assert all(block.signature == f"polar_{REF}" for block in echoed.thinking)
    assert [call.id for call in echoed.tool_calls] == [f"toolu_{REF}{index:02x}" for index in range(len(echoed.tool_calls))]
    assert [(call.name, orjson.loads(call.arguments)) for call in echoed.tool_calls] == [
        (call.name, orjson.loads(call.arguments)) for call in answer.message.tool_calls
    ]


@given(answers(calls | malformed))
@settings(deadline=None)
def test_no_sampled_text_is_swallowed_and_no_half_call_goes_out(answer: Answer) -> None:
    content = DIALECT.complete(reply_for(), [answer])["content"]
    shown = "".join(block.get("text", "") for block in content)
    assert answer.message.text in shown
    sent = [block for block in content if block["type"] == "tool_use"]
    for call in answer.message.tool_calls:
        assert call.arguments in shown or any(block["input"] == orjson.loads(call.arguments) for block in sent)
    assert all(isinstance(block["input"], dict) for block in sent)
