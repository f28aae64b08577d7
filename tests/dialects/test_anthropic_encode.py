"""Anthropic Messages, the way out: events, bodies, errors. B-numbers are public bug reports of other gateways."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from polar.chat import (
    Answer,
    ChatRequest,
    FinishDelta,
    LogprobsDelta,
    Message,
    Sampling,
    TextDelta,
    Thinking,
    ThinkingDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from polar.dialects.anthropic import Anthropic
from polar.dialects.base import Reply, replay
from polar.errors import (
    BudgetExceeded,
    CallError,
    ContextOverflow,
    EngineBusy,
    EngineOverloaded,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    SessionClosed,
    StoreError,
    TooLarge,
    Unauthenticated,
)

DIALECT = Anthropic()
REF = "0123456789abcdef0123456789"


def reply(*, max_tokens: int | None = 99, context: int | None = None, **options: Any) -> Reply:
    request = ChatRequest("m", (Message("user", "u"),), sampling=Sampling(max_tokens=max_tokens), options=options)
    return Reply(request, REF, 0, prompt_tokens=5, context=context)


def answer(text: str = "", thinking: str = "", calls: list[ToolCall] | None = None, finish: Any = "stop", **fields: Any) -> Answer:
    thoughts = (Thinking(thinking),) if thinking else ()
    return Answer(Message("assistant", text, thoughts, tuple(calls or ())), finish, fields.pop("usage", Usage(5, 3)), **fields)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    events = []
    for chunk in raw.decode().split("\n\n")[:-1]:
        name, data = chunk.split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def stream(answer: Answer, to: Reply | None = None) -> list[dict[str, Any]]:
    return events_of(b"".join(replay(DIALECT.encoder(to or reply()), [answer])))


def body(answer: Answer, to: Reply | None = None) -> dict[str, Any]:
    return DIALECT.complete(to or reply(), [answer])


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["delta"]["type"] if event["type"] == "content_block_delta" else event["type"] for event in events]


# --- event order ------------------------------------------------------------------------------------------------------


def test_b09_thinking_comes_before_text_in_a_signed_block_of_its_own() -> None:
    events = stream(answer("done", "plan"))
    assert kinds(events) == [
        "message_start",
        "content_block_start",
        "thinking_delta",
        "signature_delta",
        "content_block_stop",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[1] == {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}}
    assert events[3]["delta"]["signature"] == f"polar_{REF}"
    assert [event["index"] for event in events if "index" in event] == [0, 0, 0, 0, 1, 1, 1]


def test_b01_text_alone_has_no_tool_events() -> None:
    assert kinds(stream(answer("Hi"))) == [
        "message_start",
        "content_block_start",
        "text_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


def test_b02_an_answer_without_text_ends_with_usage_and_stop() -> None:
    events = stream(answer(usage=Usage(3, 1)))
    assert kinds(events) == ["message_start", "message_delta", "message_stop"]
    assert events[1]["usage"]["output_tokens"] == 1


def test_b05_parallel_calls_of_one_function_are_blocks_of_their_own() -> None:
    calls = [ToolCall("a", "read", '{"p":1}'), ToolCall("b", "read", '{"p":2}')]
    starts = [event for event in stream(answer(calls=calls, finish="tool_calls")) if event["type"] == "content_block_start"]
    assert [event["index"] for event in starts] == [0, 1]
    assert [event["content_block"]["id"] for event in starts] == [f"toolu_{REF}00", f"toolu_{REF}01"]
    assert [block["input"] for block in body(answer(calls=calls))["content"]] == [{"p": 1}, {"p": 2}]


def test_b06_b07_the_input_starts_empty_and_comes_whole_by_delta_as_sampled() -> None:
    sampled = '{"b": 2, "a": "\\u00e9"}'
    events = stream(answer(calls=[ToolCall("x", "Bash", sampled)], finish="tool_calls"))
    assert kinds(events)[1:4] == ["content_block_start", "input_json_delta", "content_block_stop"]
    assert events[1]["content_block"]["input"] == {}
    assert events[2]["delta"]["partial_json"] == sampled


def test_a_call_without_arguments_has_an_empty_object() -> None:
    assert body(answer(calls=[ToolCall("x", "ls", "")]))["content"][0]["input"] == {}


def test_b11_usage_numbers_are_always_there() -> None:
    events = stream(answer("a", usage=Usage()))
    assert events[0]["message"]["usage"]["input_tokens"] == 5
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    assert events[-2]["usage"]["input_tokens"] == 5
    assert events[-2]["usage"]["output_tokens"] == 0


def test_cached_tokens_are_counted_apart_from_the_input() -> None:
    usage = body(answer("a", usage=Usage(prompt=100, completion=40, cached=80, thinking=30)))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (20, 80, 0)
    assert (usage["output_tokens"], usage["output_tokens_details"]) == (40, {"thinking_tokens": 30})


def test_b20_no_empty_text_block_stands_beside_a_tool_call() -> None:
    encoder = DIALECT.encoder(reply())
    raw = encoder.feed(TextDelta("")) + encoder.feed(ThinkingDelta("")) + encoder.feed(ToolCallDelta(0, ToolCall("x", "ls", "{}")))
    assert kinds(events_of(raw)) == ["content_block_start", "input_json_delta", "content_block_stop"]


def test_live_pieces_of_one_kind_share_a_block() -> None:
    encoder = DIALECT.encoder(reply())
    pieces = [ThinkingDelta("a"), ThinkingDelta("b"), TextDelta("c"), LogprobsDelta((TokenLogprob("c", -1.0),)), TextDelta("d")]
    events = events_of(b"".join(encoder.feed(piece) for piece in pieces))
    assert [event["index"] for event in events] == [0, 0, 0, 0, 0, 1, 1, 1]


def test_b35_thinking_that_ate_the_limit_is_not_disguised_as_text() -> None:
    message = body(answer(thinking="think...", finish="length"))
    assert [block["type"] for block in message["content"]] == ["thinking"]
    assert message["stop_reason"] == "max_tokens"
    assert body(answer())["content"] == []


def test_thinking_is_left_out_where_the_caller_said_so_but_still_signed() -> None:
    message = body(answer("a", "plan"), reply(thinking_omitted=True))
    assert message["content"][0] == {"type": "thinking", "thinking": "", "signature": f"polar_{REF}"}
    assert message["content"][1]["text"] == "a"


def test_what_the_finish_brings_is_all_that_waits_for_the_commit() -> None:
    early, late = replay(DIALECT.encoder(reply()), [answer("a")])
    assert kinds(events_of(early))[-1] == "text_delta"
    assert kinds(events_of(late)) == ["content_block_stop", "message_delta", "message_stop"]


def test_ping_and_error_are_events() -> None:
    encoder = DIALECT.encoder(reply())
    assert encoder.ping() == b'event: ping\ndata: {"type":"ping"}\n\n'
    (event,) = events_of(encoder.error(EngineOverloaded("busy")))
    assert event == {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}, "request_id": f"req_{REF}"}


# --- stop reasons -----------------------------------------------------------------------------------------------------

CALL = [ToolCall("x", "ls", "{}")]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (answer("a"), "end_turn"),
        (answer("a", finish="length"), "max_tokens"),
        (answer(calls=CALL, finish="length"), "max_tokens"),
        (answer(calls=CALL, finish="tool_calls"), "tool_use"),
        (answer(calls=CALL, finish="stop"), "tool_use"),
        (answer("a", finish="tool_calls"), "end_turn"),
        (answer("a", finish="stop_sequence", stop_sequence="</x>"), "stop_sequence"),
        (answer("a", finish="content_filter"), "refusal"),
        (answer(refusal="no"), "refusal"),
    ],
)
def test_stop_reasons(given: Answer, reason: str) -> None:
    assert body(given)["stop_reason"] == reason
    assert stream(given)[-2]["delta"]["stop_reason"] == reason


def test_b25_the_matched_stop_sequence_is_returned() -> None:
    assert body(answer("a", finish="stop_sequence", stop_sequence="</x>"))["stop_sequence"] == "</x>"
    assert body(answer("a", finish="stop"))["stop_sequence"] is None


def test_b68_a_refusal_keeps_its_words_and_is_no_normal_end() -> None:
    message = body(answer(refusal="no", finish="content_filter"))
    assert message["content"] == [{"type": "text", "text": "no"}]
    assert message["stop_details"]["type"] == "refusal"


def test_a_full_context_window_is_told_apart_from_the_limit_asked_for() -> None:
    given = answer("a", finish="length", usage=Usage(60, 40))
    assert body(given, reply(context=100, tells_full_context=True))["stop_reason"] == "model_context_window_exceeded"
    assert body(given, reply(context=101, tells_full_context=True))["stop_reason"] == "max_tokens"
    assert body(given, reply(context=100))["stop_reason"] == "max_tokens", "a client that did not ask for it fails on it"


@pytest.mark.parametrize("arguments", ['{"p":"a', "[1]", '"x"', "null", '{"a": NaN}'])
@pytest.mark.parametrize("finish", ["length", "tool_calls", "stop"])
def test_b27_a_call_without_an_object_as_arguments_is_text_and_never_a_call(arguments: str, finish: Any) -> None:
    given = answer("so:", calls=[ToolCall("t", "write", arguments)], finish=finish)
    message = body(given)
    assert [block["type"] for block in message["content"]] == ["text"]
    assert arguments in message["content"][0]["text"]
    assert message["stop_reason"] == ("max_tokens" if finish == "length" else "end_turn")


def test_b27_such_a_call_at_the_token_limit_counts_as_cut() -> None:
    given = answer(calls=[ToolCall("t", "write", '{"p":"a')], finish="tool_calls", usage=Usage(5, 16))
    assert body(given, reply(max_tokens=16))["stop_reason"] == "max_tokens"


def test_context_management_is_answered_where_it_was_asked_for() -> None:
    to = reply(context_management=True)
    assert body(answer("a"), to)["context_management"] == {"applied_edits": []}
    assert stream(answer("a"), to)[-2]["context_management"] == {"applied_edits": []}
    assert "context_management" not in body(answer("a"))


def test_further_choices_have_no_place() -> None:
    encoder = DIALECT.encoder(reply())
    assert encoder.feed(TextDelta("b", choice=1)) == b""
    assert encoder.feed(FinishDelta("stop", Usage(), choice=1)) == b""


def test_numbers_and_duplicates_in_arguments_read_as_any_client_reads_them() -> None:
    arguments = '{"a": 1, "a": 2, "f": 1.0, "u": "\\u00e9", "big": 123456789012345678901234567890}'
    (block,) = body(answer(calls=[ToolCall("x", "f", arguments)]))["content"]
    assert block["input"] == {"a": 2, "f": 1.0, "u": "é", "big": 1.2345678901234568e29}
    orjson.dumps(block)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error"),
        (InvalidRequest("x", status=415), 415, "invalid_request_error"),
        (Unauthenticated("x"), 401, "authentication_error"),
        (NotFound("x"), 404, "not_found_error"),
        (SessionClosed("x"), 410, "invalid_request_error"),
        (TooLarge("x"), 413, "request_too_large"),
        (BudgetExceeded("x", code="max_turns"), 400, "invalid_request_error"),
        (StoreError("x"), 529, "overloaded_error"),
        (EngineBusy("x"), 429, "rate_limit_error"),
        (EngineOverloaded("x"), 529, "overloaded_error"),
        (EngineUnavailable("x"), 500, "api_error"),
        (EngineTimeout("x"), 504, "timeout_error"),
        (CallError("x"), 500, "api_error"),
        (EngineRejected("x", status=422), 400, "invalid_request_error"),
        (EngineRejected("x", status=404), 404, "not_found_error"),
        (EngineRejected("x", status=413), 413, "request_too_large"),
        (EngineRejected("x", status=401), 500, "api_error"),
    ],
)
def test_b84_every_error_has_the_providers_shape(error: CallError, status: int, kind: str) -> None:
    shape = DIALECT.error(error)
    assert shape.status == status
    assert shape.body == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": shape.headers["request-id"]}


def test_b84_retry_after_is_kept() -> None:
    assert DIALECT.error(EngineBusy("x", retry_after="7")).headers["retry-after"] == "7"
    assert "retry-after" not in DIALECT.error(EngineBusy("x")).headers


def test_b85_an_overflow_is_worded_as_harnesses_expect() -> None:
    shape = DIALECT.error(ContextOverflow("maximum context length is 4096", prompt_tokens=4200, limit=4096))
    assert (shape.status, shape.body["error"]["type"]) == (400, "invalid_request_error")
    assert shape.body["error"]["message"] == "prompt is too long: 4200 tokens > 4096 maximum"
    vague = DIALECT.error(ContextOverflow("maximum context length is 4096", prompt_tokens=None, limit=4096))
    assert vague.body["error"]["message"] == "prompt is too long: maximum context length is 4096"


def test_a_closed_session_and_a_spent_budget_are_not_retried() -> None:
    for error in (SessionClosed("x"), BudgetExceeded("x")):
        assert DIALECT.error(error).headers["x-should-retry"] == "false"


def test_models() -> None:
    listed = DIALECT.models(["a", "b"])
    assert [entry["id"] for entry in listed["data"]] == ["a", "b"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("a", "b", False)
    assert DIALECT.models([])["first_id"] is None
