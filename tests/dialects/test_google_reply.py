"""Google: answers, both stream forms and errors, and the public bug reports that concern them."""

from __future__ import annotations

import base64
import re
from typing import Any

import orjson
import pytest

from polar.chat import Answer, ChatRequest, FinishDelta, Message, TextDelta, Thinking, TokenLogprob, ToolCall, Usage
from polar.dialects.base import Operation, Reply, Route, replay
from polar.dialects.google import Google
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

GOOGLE = Google()
REF = "0123456789abcdef0123456789"
SIGNATURE = base64.b64encode(f"polar:{REF}".encode()).decode()


def request(alt: str = "sse", **config: Any) -> ChatRequest:
    route = Route(Operation.GENERATE, {"model": "m", "stream": "true", "alt": alt})
    return GOOGLE.parse({"contents": [{"parts": [{"text": "x"}]}], "generationConfig": config}, route)


def reply_to(asked: ChatRequest) -> Reply:
    return Reply(asked, REF, created=1_700_000_000, prompt_tokens=7)


def stream(asked: ChatRequest, *answers: Answer) -> bytes:
    return b"".join(replay(GOOGLE.encoder(reply_to(asked)), answers))


def events(asked: ChatRequest, *answers: Answer) -> list[Any]:
    return [orjson.loads(block.removeprefix("data: ")) for block in stream(asked, *answers).decode().split("\n\n") if block]


def body(asked: ChatRequest, *answers: Answer) -> Any:
    return GOOGLE.complete(reply_to(asked), answers)


def says(text: str = "", **fields: Any) -> Answer:
    finish = fields.pop("finish", "stop")
    message = {name: fields.pop(name) for name in ("thinking", "tool_calls") if name in fields}
    return Answer(Message("assistant", text, **message), finish, fields.pop("usage", Usage(7, 3)), **fields)


def calls(*pairs: tuple[str, str], **fields: Any) -> Answer:
    listed = tuple(ToolCall(f"bare{index}", name, text) for index, (name, text) in enumerate(pairs))
    return says(tool_calls=listed, finish="tool_calls", **fields)


def parts_of(chunks: list[Any]) -> list[Any]:
    return [part for chunk in chunks for candidate in chunk["candidates"] for part in candidate["content"].get("parts", [])]


def test_a_complete_answer_has_the_providers_shape() -> None:
    assert body(request(), says("hi")) == {
        "candidates": [
            {"content": {"parts": [{"text": "hi", "thoughtSignature": SIGNATURE}], "role": "model"}, "finishReason": "STOP", "index": 0}
        ],
        "usageMetadata": {
            "promptTokenCount": 7,
            "candidatesTokenCount": 3,
            "totalTokenCount": 10,
            "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 7}],
        },
        "modelVersion": "m",
        "responseId": REF,
    }


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (says(), "STOP"),
        (says("hi"), "STOP"),
        (calls(("f", "{}")), "STOP"),
        (says("hi", finish="stop_sequence"), "STOP"),
        (says("hi", finish="length"), "MAX_TOKENS"),
        (says(thinking=(Thinking("r"),), finish="length"), "MAX_TOKENS"),
        (says("hi", finish="content_filter"), "SAFETY"),
    ],
)
def test_b75_the_last_chunk_always_has_the_finish_reason_and_usage(answer: Answer, reason: str) -> None:
    chunks = events(request(), answer)
    assert [chunk["candidates"][0].get("finishReason") for chunk in chunks] == [None] * (len(chunks) - 1) + [reason]
    assert chunks[-1]["usageMetadata"]["totalTokenCount"] == 10
    assert all(part.get("text") != "" for part in parts_of(chunks))


def test_b75_the_last_chunk_has_a_part_where_the_answer_has_one() -> None:
    chunks = events(request(), says("hi", tool_calls=(ToolCall("x", "f", "{}"),)))
    assert len(chunks) == 2
    assert all(chunk["candidates"][0]["content"]["parts"] for chunk in chunks)
    assert events(request(), says())[0]["candidates"][0]["content"] == {"role": "model"}


def test_b77_usage_is_cumulative_and_counts_thoughts_apart() -> None:
    usage = Usage(100, 40, cached=80, thinking=30)
    chunks = events(request(), says("hi", tool_calls=(ToolCall("x", "f", "{}"),), usage=usage))
    assert chunks[0]["usageMetadata"] == {"promptTokenCount": 7, "totalTokenCount": 7}
    assert chunks[-1]["usageMetadata"] == {
        "promptTokenCount": 100,
        "candidatesTokenCount": 10,
        "thoughtsTokenCount": 30,
        "cachedContentTokenCount": 80,
        "totalTokenCount": 140,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 100}],
    }


def test_b09_thoughts_are_thought_parts_and_only_where_asked_for() -> None:
    answer = says("hi", thinking=(Thinking("plan"),))
    shown = events(request(thinkingConfig={"includeThoughts": True}), answer)
    assert parts_of(shown) == [{"text": "plan", "thought": True, "thoughtSignature": SIGNATURE}, {"text": "hi"}]
    assert parts_of(events(request(), answer)) == [{"text": "hi", "thoughtSignature": SIGNATURE}]


def test_b05_parallel_calls_have_their_own_ids_and_the_first_is_signed() -> None:
    listed = parts_of(events(request(), says("t", tool_calls=(ToolCall("x", "f", '{"a":1}'), ToolCall("y", "f", '{"a":2}')))))
    assert [part.get("functionCall") for part in listed] == [
        None,
        {"id": f"call_{REF}00", "name": "f", "args": {"a": 1}},
        {"id": f"call_{REF}01", "name": "f", "args": {"a": 2}},
    ]
    assert [part.get("thoughtSignature") for part in listed] == [SIGNATURE, SIGNATURE, None]


def test_the_signature_is_base64_and_holds_the_reference() -> None:
    assert re.fullmatch(r"[A-Za-z0-9+/]+={0,2}", SIGNATURE)
    assert len(SIGNATURE) % 4 == 0
    assert re.search(r"[0-9a-f]{26}", base64.b64decode(SIGNATURE).decode())


def test_malformed_tool_calls_arrive_as_the_text_that_was_sampled() -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"a":\n</tool_call>'
    for finish, reason in (("stop", "STOP"), ("length", "MAX_TOKENS")):
        chunks = events(request(), says(text, finish=finish))
        assert [part["text"] for part in parts_of(chunks)] == [text]
        assert chunks[-1]["candidates"][0]["finishReason"] == reason


@pytest.mark.parametrize(("arguments", "args"), [("", {}), ("[1]", {"arguments": "[1]"}), ('{"a":', {"arguments": '{"a":'})])
def test_arguments_that_are_no_object_are_kept_whole(arguments: str, args: Any) -> None:
    assert parts_of(events(request(), calls(("f", arguments))))[0]["functionCall"]["args"] == args


def test_b68_a_refusal_is_shown_and_ends_in_safety() -> None:
    chunks = events(request(), says(refusal="no", finish="content_filter"))
    assert [part["text"] for part in parts_of(chunks)] == ["no"]
    assert chunks[-1]["candidates"][0]["finishReason"] == "SAFETY"


def test_several_candidates_share_the_prompt() -> None:
    answers = (calls(("f", "{}")), calls(("f", "{}")))
    chunks = events(request(candidateCount=2), *answers)
    assert [(chunk["candidates"][0]["index"], chunk["candidates"][0]["finishReason"]) for chunk in chunks] == [(0, "STOP"), (1, "STOP")]
    assert chunks[-1]["usageMetadata"]["totalTokenCount"] == 7 + 6
    whole = body(request(candidateCount=2), *answers)
    assert whole["usageMetadata"] == chunks[-1]["usageMetadata"]
    ids = [candidate["content"]["parts"][0]["functionCall"]["id"] for candidate in whole["candidates"]]
    assert ids == [f"call_{REF}00", f"call_{REF}01"]


def test_log_probabilities_only_for_who_asked() -> None:
    logprobs = (TokenLogprob("h", -0.5, (("h", -0.5), ("H", -1.5))), TokenLogprob("i", -1.5))
    assert "logprobsResult" not in body(request(), says("hi", logprobs=logprobs))["candidates"][0]
    candidate = body(request(responseLogprobs=True, logprobs=1), says("hi", logprobs=logprobs))["candidates"][0]
    assert candidate["avgLogprobs"] == -1.0
    assert candidate["logprobsResult"] == {
        "chosenCandidates": [{"token": "h", "logProbability": -0.5}, {"token": "i", "logProbability": -1.5}],
        "topCandidates": [{"candidates": [{"token": "h", "logProbability": -0.5}]}, {"candidates": []}],
    }


def test_without_alt_sse_the_stream_is_one_json_array() -> None:
    asked = request(alt="json")
    answer = says("hi", tool_calls=(ToolCall("x", "f", "{}"),))
    assert orjson.loads(stream(asked, answer)) == events(request(), answer)
    assert GOOGLE.encoder(reply_to(asked)).content_type == "application/json"
    assert GOOGLE.encoder(reply_to(request())).content_type == "text/event-stream"


def test_b83_pings_are_blank_wherever_they_fall() -> None:
    for alt in ("json", "sse"):
        encoder = GOOGLE.encoder(reply_to(request(alt)))
        pieces = [encoder.start()]
        for delta in (TextDelta("a"), TextDelta("b"), FinishDelta("stop", Usage(1, 2))):
            pieces += [encoder.ping(), encoder.feed(delta), encoder.ping()]
        data = b"".join([*pieces, encoder.end()])
        chunks = orjson.loads(data) if alt == "json" else [orjson.loads(line[6:]) for line in data.splitlines() if line]
        assert "".join(part["text"] for part in parts_of(chunks)) == "ab"


def test_a_models_card_tells_its_length() -> None:
    card = GOOGLE.card("m", 4096)
    assert (card["inputTokenLimit"], card["outputTokenLimit"]) == (4096, 4096)
    assert GOOGLE.card("m", None) == GOOGLE.model("m")


def test_line_separators_that_break_clients_are_escaped() -> None:
    data = stream(request(), says("a\u2028b\u2029c\u0085d"))
    assert len(data.decode().splitlines()) == 2
    assert parts_of(events(request(), says("a\u2028b\u2029c\u0085d")))[0]["text"] == "a\u2028b\u2029c\u0085d"


def test_nothing_of_the_finish_goes_out_before_the_commit() -> None:
    early, late = replay(GOOGLE.encoder(reply_to(request())), [says("hi", tool_calls=(ToolCall("x", "f", "{}"),))])
    assert b"finishReason" not in early
    assert b'"hi"' in early
    assert late.count(b"finishReason") == 1


def test_b78_a_count_is_a_number() -> None:
    assert GOOGLE.count(5, request())["totalTokens"] == 5


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (EngineOverloaded("busy"), 503, "UNAVAILABLE"),
        (EngineOverloaded("busy", status=529), 503, "UNAVAILABLE"),
        (EngineBusy("slow down"), 429, "RESOURCE_EXHAUSTED"),
        (Unauthenticated("no key"), 401, "UNAUTHENTICATED"),
        (EngineUnavailable("gone"), 503, "UNAVAILABLE"),
        (EngineTimeout("late"), 504, "DEADLINE_EXCEEDED"),
        (EngineRejected("no", status=422), 422, "INVALID_ARGUMENT"),
        (EngineRejected("no", status=404), 404, "NOT_FOUND"),
        (NotFound("no such path"), 404, "NOT_FOUND"),
        (SessionClosed("over"), 410, "FAILED_PRECONDITION"),
        (TooLarge("big"), 413, "INVALID_ARGUMENT"),
        (BudgetExceeded("spent", code="max_turns"), 400, "FAILED_PRECONDITION"),
        (InvalidRequest("bad", param="n"), 400, "INVALID_ARGUMENT"),
    ],
)
def test_b84_errors_have_the_providers_shape(error: Any, code: int, status: str) -> None:
    reply = GOOGLE.error(error)
    assert reply.status == code
    assert reply.body == {"error": {"code": code, "message": error.message, "status": status}}


def test_b84_a_wait_is_said_in_header_and_body() -> None:
    reply = GOOGLE.error(EngineBusy("slow down", retry_after="7"))
    assert reply.headers == {"retry-after": "7"}
    assert reply.body["error"]["details"] == [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "7s"}]
    dated = GOOGLE.error(EngineBusy("slow down", retry_after="Wed, 21 Oct 2026 07:28:00 GMT"))
    assert "details" not in dated.body["error"]


@pytest.mark.parametrize(
    ("tokens", "limit", "message"),
    [
        (4200, 4096, "The input token count (4200) exceeds the maximum number of tokens allowed (4096)."),
        (None, 4096, "The input token count exceeds the maximum number of tokens allowed (4096)."),
    ],
)
def test_an_overflow_is_said_in_google_s_words(tokens: int | None, limit: int, message: str) -> None:
    reply = GOOGLE.error(ContextOverflow("engine's words", prompt_tokens=tokens, limit=limit))
    assert reply.body == {"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}


def test_an_error_in_a_stream_is_bare_json_or_the_array_s_last_element() -> None:
    error = EngineUnavailable("gone")
    assert orjson.loads(GOOGLE.encoder(reply_to(request())).error(error)) == GOOGLE.error(error).body
    encoder = GOOGLE.encoder(reply_to(request("json")))
    data = b"".join([encoder.start(), encoder.feed(TextDelta("a")), encoder.feed(TextDelta("b")), encoder.error(error)])
    assert orjson.loads(data)[-1] == GOOGLE.error(error).body
