"""Chat Completions: answers, streams and errors, and the public bug reports that concern them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from polar.chat import Answer, ChatRequest, Message, Thinking, TokenLogprob, ToolCall, Usage
from polar.dialects.base import Operation, Reply, Route, replay
from polar.dialects.openai_chat import OpenAIChat
from polar.errors import (
    BudgetExceeded,
    ContextOverflow,
    EngineBusy,
    EngineOverloaded,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    SessionClosed,
    TooLarge,
    Unauthenticated,
)

CHAT = OpenAIChat()
ROUTE = Route(Operation.GENERATE)
REF = "0123456789abcdef0123456789"
USER = {"role": "user", "content": "x"}


def parse(**body: Any) -> ChatRequest:
    return CHAT.parse({"model": "m", "messages": [USER], **body}, ROUTE)


def history(*messages: Any) -> tuple[Message, ...]:
    return parse(messages=list(messages)).messages


def reply_to(request: ChatRequest) -> Reply:
    return Reply(request, REF, created=1_700_000_000, prompt_tokens=7)


def events(request: ChatRequest, *answers: Answer) -> list[Any]:
    """The stream's events, `[DONE]` as a plain string."""
    stream = b"".join(replay(CHAT.encoder(reply_to(request)), answers)).decode()
    blocks = [block.removeprefix("data: ") for block in stream.split("\n\n") if block]
    return [block if block == "[DONE]" else orjson.loads(block) for block in blocks]


def body(request: ChatRequest, *answers: Answer) -> Any:
    return CHAT.complete(reply_to(request), answers)


def says(text: str = "", **fields: Any) -> Answer:
    finish = fields.pop("finish", "stop")
    message = {name: fields.pop(name) for name in ("thinking", "tool_calls") if name in fields}
    return Answer(Message("assistant", text, **message), finish, fields.pop("usage", Usage(7, 3)), **fields)


def calls(*pairs: tuple[str, str]) -> Answer:
    return says(tool_calls=tuple(ToolCall(f"bare{index}", name, text) for index, (name, text) in enumerate(pairs)), finish="tool_calls")


# --- answers --------------------------------------------------------------------------------------------------------


def test_a_complete_answer_has_the_providers_shape() -> None:
    assert body(parse(), says("hi", usage=Usage(100, 40, cached=80, thinking=30))) == {
        "id": f"chatcmpl-{REF}",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "hi", "refusal": None}, "logprobs": None, "finish_reason": "stop"}
        ],
        "usage": {
            "prompt_tokens": 100,
            "completion_tokens": 40,
            "total_tokens": 140,
            "prompt_tokens_details": {"cached_tokens": 80, "audio_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 30,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
        "system_fingerprint": None,
    }


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_b60_no_usage_chunk_unless_asked(options: Any) -> None:
    chunks = events(parse(stream=True, stream_options=options), says("hi"))
    assert all(chunk["choices"] for chunk in chunks[:-1])
    assert all("usage" not in chunk for chunk in chunks[:-1])


def test_b61_usage_comes_alone_after_the_finish_and_before_done() -> None:
    chunks = events(parse(stream=True, stream_options={"include_usage": True}), says("hi"))
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["total_tokens"] == 10
    assert chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert all(chunk["usage"] is None for chunk in chunks[:-2])


def test_b63_parallel_calls_have_their_own_index_and_id_and_one_stream_id() -> None:
    chunks = events(parse(), calls(("read", '{"p":1}'), ("read", '{"p":2}')))
    assert {chunk["id"] for chunk in chunks[:-1]} == {f"chatcmpl-{REF}"}
    pieces = [piece for chunk in chunks[:-1] for piece in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [piece["index"] for piece in pieces] == [0, 0, 1, 1]
    assert [piece["id"] for piece in pieces if "id" in piece] == [f"call_{REF}00", f"call_{REF}01"]
    assert [piece["function"]["arguments"] for piece in pieces] == ["", '{"p":1}', "", '{"p":2}']
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


def test_b63_arguments_that_came_as_an_object_are_a_string() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"a": 1}}}
    assert history({"role": "assistant", "tool_calls": [call]})[0].tool_calls[0].arguments == '{"a":1}'


def test_the_first_chunk_has_the_role() -> None:
    first = events(parse(), says("hi"))[0]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert first["object"] == "chat.completion.chunk"


def test_b27_a_cut_tool_call_keeps_the_finish_reason_of_length() -> None:
    answer = says(tool_calls=(ToolCall("t", "write", '{"p":"a'),), finish="length")
    assert body(parse(), answer)["choices"][0]["finish_reason"] == "length"


def test_malformed_tool_calls_arrive_as_the_text_that_was_sampled() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a":\n</tool_call>'
    for finish in ("stop", "length"):
        choice = body(parse(tools=[{"type": "function", "function": {"name": "f"}}]), says(text, finish=finish))["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, finish)
        assert "tool_calls" not in choice["message"]


def test_a_finish_of_tool_calls_without_a_call_is_a_stop() -> None:
    assert body(parse(), says("text", finish="tool_calls"))["choices"][0]["finish_reason"] == "stop"


def test_b68_a_refusal_is_a_refusal_with_its_filter_reason() -> None:
    answer = says(refusal="no", finish="content_filter")
    choice = body(parse(), answer)["choices"][0]
    assert choice["message"]["refusal"] == "no"
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "content_filter"
    chunks = events(parse(), answer)
    assert chunks[1]["choices"][0]["delta"] == {"refusal": "no"}


LOGPROBS = (TokenLogprob("h", -0.5, (("h", -0.5), ("H", -1.5))), TokenLogprob("i", -9999.0, (("i", -9999.0), ("o", -0.1))))


@pytest.mark.parametrize(("fields", "shown", "top"), [({}, False, 0), ({"logprobs": False}, False, 0), ({"logprobs": True}, True, 0)])
def test_b67_log_probabilities_only_for_who_asked(fields: dict[str, Any], shown: bool, top: int) -> None:
    request = parse(**fields)
    choice = body(request, says("hi", logprobs=LOGPROBS))["choices"][0]
    assert (choice["logprobs"] is not None) is shown
    streamed = [chunk["choices"][0]["logprobs"] for chunk in events(request, says("hi", logprobs=LOGPROBS))[:-1]]
    assert [each for each in streamed if each] == ([choice["logprobs"]] if shown else [])
    if shown:
        assert [entry["top_logprobs"] for entry in choice["logprobs"]["content"]] == [[], []]


def test_b67_top_logprobs_are_as_many_as_asked_for() -> None:
    request = parse(logprobs=True, top_logprobs=1)
    assert request.top_logprobs == 1
    entries = body(request, says("hi", logprobs=LOGPROBS))["choices"][0]["logprobs"]["content"]
    assert entries[0] == {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": [{"token": "h", "logprob": -0.5, "bytes": [104]}]}
    assert entries[1]["logprob"] == -9999.0
    assert parse(logprobs=True, top_logprobs=None).top_logprobs == 0


def test_log_probabilities_of_an_answer_without_text_still_arrive() -> None:
    answer = Answer(calls(("f", "{}")).message, "tool_calls", Usage(1, 2), logprobs=LOGPROBS)
    shown = [chunk["choices"][0]["logprobs"] for chunk in events(parse(logprobs=True), answer)[:-1]]
    assert sum(each is not None for each in shown) == 1


def test_several_choices_share_the_prompt_and_differ_in_index_and_call_ids() -> None:
    request = parse(n=2, stream_options={"include_usage": True}, stream=True)
    answers = (calls(("f", "{}")), calls(("f", "{}")))
    whole = body(request, *answers)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1]
    assert whole["usage"]["prompt_tokens"] == 7
    assert whole["usage"]["completion_tokens"] == 6
    ids = [choice["message"]["tool_calls"][0]["id"] for choice in whole["choices"]]
    assert ids == [f"call_{REF}00", f"call_{REF}01"]
    chunks = events(request, *answers)
    assert [chunk["choices"][0]["index"] for chunk in chunks[:-2] if chunk["choices"][0]["finish_reason"]] == [0, 1]
    assert chunks[-2]["usage"] == whole["usage"]


def test_b35_reasoning_that_ate_the_budget_is_no_text() -> None:
    choice = body(parse(), says(thinking=(Thinking("r"),), finish="length"))["choices"][0]
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "r"
    assert choice["finish_reason"] == "length"


def test_b35_an_empty_answer_is_a_valid_stream() -> None:
    chunks = events(parse(), says())
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None, "stop"]
    assert chunks[-1] == "[DONE]"


def test_nothing_that_the_finish_brings_goes_out_before_the_commit() -> None:
    early, late = replay(CHAT.encoder(reply_to(parse())), [says("hi")])
    assert b'"hi"' in early
    assert b"stop" not in early
    assert late.endswith(b"data: [DONE]\n\n")


def test_b83_pings_are_comments() -> None:
    assert CHAT.encoder(reply_to(parse())).ping() == b": ping\n\n"


# --- errors ---------------------------------------------------------------------------------------------------------

OVERFLOW = (
    "This model's maximum context length is 4096 tokens. However, you requested 100 output tokens "
    "and your prompt contains 4200 input tokens."
)


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (EngineOverloaded("busy"), 503, "server_error", "server_is_overloaded"),
        (EngineOverloaded("busy", status=529), 503, "server_error", "server_is_overloaded"),
        (EngineBusy("slow down"), 429, "requests", "rate_limit_exceeded"),
        (Unauthenticated("no key"), 401, "invalid_request_error", "invalid_api_key"),
        (EngineUnavailable("gone"), 502, "server_error", "service_unavailable"),
        (EngineTimeout("late"), 504, "server_error", "timeout"),
        (EngineRejected("no", status=422), 422, "invalid_request_error", None),
        (NotFound("no such path"), 404, "invalid_request_error", None),
        (SessionClosed("over"), 410, "invalid_request_error", "session_closed"),
        (TooLarge("big"), 413, "invalid_request_error", "request_too_large"),
        (BudgetExceeded("spent", code="max_turns"), 400, "invalid_request_error", "max_turns"),
        (InvalidRequest("bad", param="n"), 400, "invalid_request_error", None),
    ],
)
def test_b84_errors_have_the_providers_shape(error: Any, status: int, kind: str, code: str | None) -> None:
    reply = CHAT.error(error)
    assert reply.status == status
    assert reply.body == {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def test_b84_retry_after_is_kept() -> None:
    assert CHAT.error(EngineBusy("slow down", retry_after="7")).headers == {"retry-after": "7"}


def test_b86_an_overflow_has_the_code_and_keeps_the_engines_words() -> None:
    reply = CHAT.error(ContextOverflow(OVERFLOW, prompt_tokens=4200, limit=4096))
    assert reply.status == 400
    assert reply.body["error"] == {
        "message": OVERFLOW,
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }


def test_b86_an_overflow_in_other_words_is_said_in_the_providers_too() -> None:
    message = CHAT.error(ContextOverflow("prompt does not fit", prompt_tokens=4200, limit=4096)).body["error"]["message"]
    assert "maximum context length is 4096 tokens" in message
    assert "4200" in message
    assert "prompt does not fit" in message


def test_an_error_in_a_stream_is_an_event() -> None:
    data = CHAT.encoder(reply_to(parse())).error(EngineUnavailable("gone"))
    assert data.startswith(b"data: ")
    assert orjson.loads(data.removeprefix(b"data: "))["error"]["message"] == "gone"


@pytest.mark.parametrize("arguments", ['{"path": 1}', '{"input": "x", "more": 1}', '{"input": 5}', '{"input": "\\ud800"}', "no json"])
def test_a_freeform_call_with_other_arguments_comes_back_as_it_was_sampled(arguments: str) -> None:
    request = parse(tools=[{"type": "custom", "custom": {"name": "patch"}}])
    called = Answer(Message("assistant", "", tool_calls=(ToolCall("", "patch", arguments),)), "tool_calls")
    message = CHAT.complete(reply_to(request), [called])["choices"][0]["message"]
    assert message["tool_calls"][0]["custom"]["input"] == arguments
    (echoed,) = history(message)[0].tool_calls
    assert (echoed.id, echoed.arguments) == (f"call_raw_{REF}00", arguments)
