"""OpenAI Responses: answers to events and bodies, and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai_responses_samples import CALLS, DIALECT, REF, TOOLS, USAGE, added_up, answer, events, reply, request, stream

from polar.chat import (
    Answer,
    ChatDelta,
    FinishDelta,
    LogprobsDelta,
    Message,
    Text,
    TextDelta,
    ThinkingDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from polar.dialects.base import Operation, Reply, Route, replay
from polar.dialects.openai_responses import compaction
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


def kinds(found: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in found]


# --- events ----------------------------------------------------------------------------------------------------


def test_b45_the_full_event_sequence_of_reasoning_text_and_a_call() -> None:
    found = stream(reply(), answer("t", CALLS["function"], thinking="r"))
    assert kinds(found) == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [item["id"] for item in found[-1]["response"]["output"]] == [f"rs_{REF}", f"msg_{REF}", f"fc_{REF}00"]
    assert found[-1]["response"]["output"][2]["call_id"] == f"call_{REF}00"
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []


def test_the_end_of_a_calls_arguments_names_the_function() -> None:
    """openai/openai-java#682, 64bit/async-openai#472: clients made from the reference fail where the event has no name."""
    (done,) = [event for event in stream(reply(), answer("", CALLS["function"])) if event["type"].endswith("arguments.done")]
    assert done["name"] == "read"


@pytest.mark.parametrize("kind", CALLS)
def test_b44_completed_carries_the_items_of_the_stream_and_of_the_body(kind: str) -> None:
    made = answer("abc", CALLS[kind], thinking="r")
    found = stream(reply(), made)
    response = found[-1]["response"]
    assert response["output"] == added_up(found)
    assert response["output"] == [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert DIALECT.complete(reply(), [made]) == response


def test_b47_a_cut_answer_is_incomplete_in_item_status_and_last_event() -> None:
    found = stream(reply(max_output_tokens=16), answer("abc", finish="length"))
    response = found[-1]["response"]
    assert found[-1]["type"] == "response.incomplete"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"


def test_b35_reasoning_that_ate_the_budget_is_no_text() -> None:
    response = DIALECT.complete(reply(), [answer(thinking="long", finish="length")])
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    assert response["output"][0]["status"] == "incomplete"
    assert response["status"] == "incomplete"


def test_b27_half_a_call_is_never_presented_as_complete() -> None:
    response = DIALECT.complete(reply(), [answer("", ("read", '{"p":"a'), finish="length")])
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["arguments"] == '{"p":"a'
    evil = DIALECT.complete(reply(), [answer("", ("read", '{"p":"a'), finish="tool_calls")])
    assert evil["output"][0]["status"] == "incomplete"


def test_b68_a_refusal_is_a_refusal_part_of_an_incomplete_response() -> None:
    found = stream(reply(), answer("", refusal="no", finish="content_filter"))
    response = found[-1]["response"]
    assert response["output"][0]["content"] == [{"type": "refusal", "refusal": "no"}]
    assert response["incomplete_details"] == {"reason": "content_filter"}
    assert "refusal.delta" in kinds(found)
    assert "refusal.done" in kinds(found)
    assert added_up(found) == response["output"]


def test_text_and_then_a_refusal_are_two_parts_of_one_message() -> None:
    found = stream(reply(), answer("well", refusal="no", finish="content_filter"))
    assert [part["type"] for part in found[-1]["response"]["output"][0]["content"]] == ["output_text", "refusal"]
    assert added_up(found) == found[-1]["response"]["output"]


def test_no_empty_message_stands_beside_a_call() -> None:
    output = DIALECT.complete(reply(), [answer("", CALLS["function"], CALLS["custom"])])["output"]
    assert [item["type"] for item in output] == ["function_call", "custom_tool_call"]
    assert [item["call_id"] for item in output] == [f"call_{REF}00", f"call_{REF}01"]


def test_an_empty_answer_is_still_a_turn() -> None:
    output = DIALECT.complete(reply(), [answer("")])["output"]
    assert [(item["type"], item["content"][0]["text"]) for item in output] == [("message", "")]


def test_live_deltas_and_a_replay_give_the_same_response() -> None:
    encoder = DIALECT.encoder(reply())
    pieces = [ThinkingDelta("r1"), ThinkingDelta("r2"), TextDelta("a"), TextDelta("b"), FinishDelta("stop", USAGE)]
    live = events(encoder.start() + b"".join(encoder.feed(piece) for piece in pieces) + encoder.end())
    assert live[-1]["response"] == DIALECT.complete(reply(), [answer("ab", thinking="r1r2")])
    assert added_up(live) == live[-1]["response"]["output"]


def test_nothing_says_that_the_text_is_whole_before_the_commit() -> None:
    early, late = replay(DIALECT.encoder(reply()), [answer("abc", thinking="r")])
    assert b"response.output_text.delta" in early
    for kind in (b"output_text.done", b"content_part.done", b"response.completed"):
        assert kind not in early
        assert kind in late


def test_pings_are_comments_and_take_no_sequence_number() -> None:
    encoder = DIALECT.encoder(reply())
    assert encoder.ping().startswith(b":")
    found = events(
        encoder.start() + encoder.ping() + encoder.feed(TextDelta("a")) + encoder.ping() + encoder.feed(FinishDelta("stop", USAGE))
    )
    assert found[-1]["type"] == "response.completed"


def test_logprobs_belong_to_the_text() -> None:
    asked = reply(include=["message.output_text.logprobs"], top_logprobs=1)
    entries = (TokenLogprob("é", -0.5, (("é", -0.5),)), TokenLogprob("b", -9999.0))
    made = Answer(Message("assistant", "éb"), "stop", USAGE, logprobs=entries)
    found = stream(asked, made)
    part = found[-1]["response"]["output"][0]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["é", "b"]
    assert part["logprobs"][0]["bytes"] == [195, 169]
    assert part["logprobs"][0]["top_logprobs"] == [{"token": "é", "bytes": [195, 169], "logprob": -0.5}]
    assert part["logprobs"][1]["logprob"] == -9999.0
    assert found[-1]["response"]["top_logprobs"] == 1
    assert added_up(found) == found[-1]["response"]["output"]


def test_logprobs_of_a_live_stream_go_with_their_text() -> None:
    encoder = DIALECT.encoder(reply(include=["message.output_text.logprobs"]))
    pieces = [
        LogprobsDelta((TokenLogprob("a", -1.0),)),
        TextDelta("a"),
        LogprobsDelta((TokenLogprob("b", -2.0),)),
        TextDelta("b"),
        FinishDelta("stop", USAGE),
    ]
    found = events(encoder.start() + b"".join(encoder.feed(piece) for piece in pieces))
    assert [len(event["logprobs"]) for event in found if event["type"] == "response.output_text.delta"] == [1, 1]
    assert added_up(found) == found[-1]["response"]["output"]


@pytest.mark.parametrize("after", [[], [ToolCallDelta(0, ToolCall("", "f", "{}"))]], ids=["at the end", "before a call"])
def test_logprobs_that_come_after_the_last_of_their_text_stand_in_its_part(after: list[ChatDelta]) -> None:
    encoder = DIALECT.encoder(reply(include=["message.output_text.logprobs"]))
    late = LogprobsDelta((TokenLogprob("a", -1.0), TokenLogprob("b", -2.0)))
    pieces = [TextDelta("a"), TextDelta("b"), late, *after, FinishDelta("stop", USAGE)]
    found = events(encoder.start() + b"".join(encoder.feed(piece) for piece in pieces))
    (part,) = found[-1]["response"]["output"][0]["content"]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b"]
    assert added_up(found) == found[-1]["response"]["output"]


# --- calls -----------------------------------------------------------------------------------------------------


def item_of(name: str, arguments: str) -> dict[str, Any]:
    item: dict[str, Any] = DIALECT.complete(reply(), [answer("", (name, arguments))])["output"][0]
    return item


def test_b38_a_call_of_a_custom_tool_is_a_custom_tool_call() -> None:
    found = stream(reply(), answer("", ("patch", '{"input":"*** Begin Patch\\n*** End Patch"}')))
    assert "custom_tool_call_input.delta" in kinds(found)
    assert "custom_tool_call_input.done" in kinds(found)
    item = found[-1]["response"]["output"][0]
    assert item == {
        "id": f"ctc_{REF}00",
        "type": "custom_tool_call",
        "status": "completed",
        "call_id": f"call_{REF}00",
        "name": "patch",
        "input": "*** Begin Patch\n*** End Patch",
    }


@pytest.mark.parametrize("arguments", ['{"patch": "x"}', '{"input": 3}', '{"input": "a", "more": 1}', "not json", "[]", ""])
def test_other_arguments_of_a_custom_tool_are_its_input_as_they_stand(arguments: str) -> None:
    item = item_of("patch", arguments)
    assert item["type"] == "custom_tool_call"
    assert item["input"] == arguments
    parsed = DIALECT.parse({"input": [item]}, Route(Operation.GENERATE)).messages[0].tool_calls[0]
    assert parsed.arguments == arguments


def test_b40_a_call_of_a_namespaced_tool_has_name_and_namespace() -> None:
    item = item_of(*CALLS["namespaced"])
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "read", "mcp__fs")
    item = item_of(*CALLS["namespaced custom"])
    assert (item["type"], item["name"], item["namespace"]) == ("custom_tool_call", "exec", "mcp__fs")


def test_calls_of_other_kinds_have_their_item_types() -> None:
    assert item_of(*CALLS["shell"])["action"] == {"commands": ["ls", "pwd"], "timeout_ms": 5, "max_output_length": None}
    assert item_of(*CALLS["local_shell"])["action"] == {
        "type": "exec",
        "command": ["ls", "-a"],
        "env": {"A": "b"},
        "working_directory": "/x",
    }
    assert item_of(*CALLS["apply_patch"])["operation"] == {"type": "update_file", "path": "a", "diff": "+x"}
    search = item_of(*CALLS["tool_search"])
    assert (search["type"], search["execution"], search["arguments"]) == ("tool_search_call", "client", {"q": "calendar"})


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("shell", '{"commands": "ls"}'),
        ("shell", '{"commands": ["ls"], "timeout_ms": "soon"}'),
        ("shell", '{"commands": ["ls"], "cwd": "/"}'),
        ("local_shell", '{"command": ["ls"], "env": {"A": 1}}'),
        ("apply_patch", '{"type": "create_file", "path": "a"}'),
        ("apply_patch", '{"type": "rename_file", "path": "a"}'),
        ("local_shell", "not json"),
    ],
)
def test_arguments_that_fit_no_item_type_go_out_as_a_function_call(name: str, arguments: str) -> None:
    item = item_of(name, arguments)
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", name, arguments)


def test_a_call_of_an_unknown_tool_is_a_function_call() -> None:
    assert item_of("nope", "{}")["name"] == "nope"


def test_a_tool_found_by_a_search_is_called_by_its_namespace() -> None:
    found = {"type": "namespace", "name": "mcp__cal", "tools": [{"type": "function", "name": "add"}]}
    items = [
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}},
        {"type": "tool_search_output", "call_id": "c", "tools": [found]},
    ]
    item = DIALECT.complete(reply(input=items), [answer("", ("mcp__cal__add", "{}"))])["output"][0]
    assert (item["name"], item["namespace"]) == ("add", "mcp__cal")


# --- the response object ---------------------------------------------------------------------------------------


def test_the_response_repeats_its_request() -> None:
    body = DIALECT.complete(
        reply(
            instructions="I",
            temperature=0.5,
            metadata={"a": "b"},
            tool_choice="required",
            previous_response_id="resp_x",
            text={"verbosity": "low"},
        ),
        [answer("t")],
    )
    assert body["id"] == f"resp_{REF}"
    assert body["tools"] == TOOLS
    assert (body["instructions"], body["temperature"], body["top_p"], body["metadata"]) == ("I", 0.5, 1.0, {"a": "b"})
    assert (body["tool_choice"], body["previous_response_id"], body["model"], body["store"]) == ("required", "resp_x", "m", True)
    assert body["text"] == {"format": {"type": "text"}, "verbosity": "low"}


def test_usage_has_cached_and_reasoning_tokens() -> None:
    assert DIALECT.complete(reply(), [answer("t")])["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 80, "cache_write_tokens": 0},
        "output_tokens": 40,
        "output_tokens_details": {"reasoning_tokens": 30},
        "total_tokens": 140,
    }


def test_options_survive_storage_as_json() -> None:
    asked = request(instructions="I")
    assert json.loads(json.dumps(dict(asked.options))) == asked.options


def test_count_models_and_deletion() -> None:
    assert DIALECT.count(7, request()) == {"object": "response.input_tokens", "input_tokens": 7}
    assert DIALECT.models(["a"])["data"][0]["id"] == "a"
    assert DIALECT.deleted("resp_1") == {"id": "resp_1", "object": "response", "deleted": True}


def test_input_items_of_a_stored_response_read_back_as_its_messages() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "data:x", "detail": "low"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "r"}], "encrypted_content": "e"},
        {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"role": "assistant", "content": "bye"},
    ]
    asked = request(input=items, instructions="I")
    listed = DIALECT.items(asked)
    assert listed["has_more"] is False
    assert [item["type"] for item in listed["data"]] == ["message", "reasoning", "custom_tool_call", "custom_tool_call_output", "message"]
    again = [{**item, "id": None} for item in listed["data"]]
    assert DIALECT.parse({"input": again, "tools": TOOLS}, Route(Operation.GENERATE)).messages == asked.messages[1:]


def test_input_items_come_in_pages_newest_first() -> None:
    asked = request(input=[{"role": "user", "content": str(number)} for number in range(5)])
    first = DIALECT.items(asked, {"limit": "2"})
    assert [item["content"][0]["text"] for item in first["data"]] == ["4", "3"]
    assert first["has_more"] is True
    rest = DIALECT.items(asked, {"limit": "10", "after": first["last_id"]})
    assert [item["content"][0]["text"] for item in rest["data"]] == ["2", "1", "0"]
    assert rest["has_more"] is False
    assert DIALECT.items(asked, {"order": "asc"})["data"][0]["content"][0]["text"] == "0"


# --- compaction ------------------------------------------------------------------------------------------------


def test_b54_a_trigger_is_answered_with_exactly_one_compaction_item() -> None:
    asked = reply(input=[{"role": "user", "content": "h"}, {"type": "compaction_trigger"}], stream=True)
    found = stream(asked, answer("the summary", thinking="hm"))
    assert kinds(found) == ["created", "in_progress", "output_item.added", "compaction.compacting", "output_item.done", "completed"]
    (item,) = found[-1]["response"]["output"]
    assert item["type"] == "compaction"
    assert item["id"] == f"cmp_{REF}"
    assert compaction.unseal(item["encrypted_content"]) == "the summary"
    (context, _) = DIALECT.parse({"input": [item, {"role": "user", "content": "next"}]}, Route(Operation.GENERATE)).messages
    assert "the summary" in context.text


def test_the_compact_endpoint_returns_the_users_messages_and_the_summary() -> None:
    body = {
        "model": "m",
        "input": [{"role": "user", "content": "u1"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "u2"}],
    }
    asked = Reply(DIALECT.parse(body, Route(Operation.COMPACT)), REF, 1_700_000_000)
    compacted = DIALECT.complete(asked, [answer("sum")])
    assert compacted["object"] == "response.compaction"
    assert [item["type"] for item in compacted["output"]] == ["message", "message", "compaction"]
    assert [item["content"][0]["text"] for item in compacted["output"][:2]] == ["u1", "u2"]
    assert compacted["usage"]["total_tokens"] == 140
    again = DIALECT.parse({"input": compacted["output"]}, Route(Operation.GENERATE)).messages
    assert [message.role for message in again] == ["user", "user", "user"]


def test_no_sampled_text_of_a_compaction_is_lost() -> None:
    asked = reply(input=[{"role": "user", "content": "h"}, {"type": "compaction_trigger"}])
    (item,) = DIALECT.complete(asked, [answer("s", ("read", '{"p": 1}'))])["output"]
    assert compaction.unseal(item["encrypted_content"]) == "s" + 'read({"p": 1})'
    (item,) = DIALECT.complete(asked, [answer(thinking="only thoughts")])["output"]
    assert compaction.unseal(item["encrypted_content"]) == "only thoughts"


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (InvalidRequest("x", param="input"), 400, "invalid_request_error", None),
        (Unauthenticated("x"), 401, "authentication_error", "invalid_api_key"),
        (NotFound("x"), 404, "invalid_request_error", None),
        (
            NotFound("x", code="previous_response_not_found", param="previous_response_id"),
            400,
            "invalid_request_error",
            "previous_response_not_found",
        ),
        (SessionClosed("x"), 410, "invalid_request_error", None),
        (TooLarge("x"), 413, "invalid_request_error", None),
        (BudgetExceeded("x", code="max_turns"), 400, "invalid_request_error", "max_turns"),
        (StoreError("x"), 503, "server_error", None),
        (EngineRejected("x", status=422), 422, "invalid_request_error", None),
        (EngineBusy("x", retry_after="7"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (EngineOverloaded("x", status=529), 503, "server_error", None),
        (EngineUnavailable("x"), 502, "server_error", None),
        (EngineTimeout("x"), 504, "server_error", None),
        (ContextOverflow("x", prompt_tokens=9, limit=4), 400, "invalid_request_error", "context_length_exceeded"),
    ],
)
def test_b84_errors_have_openais_shape(error: CallError, status: int, kind: str, code: str | None) -> None:
    answered = DIALECT.error(error)
    assert answered.status == status
    assert answered.body["error"].keys() == {"message", "type", "param", "code"}
    assert answered.body["error"]["type"] == kind
    assert answered.body["error"]["code"] == code
    assert answered.headers.get("retry-after") == error.retry_after


def overflow() -> ContextOverflow:
    return ContextOverflow("This model's maximum context length is 4096 tokens.", prompt_tokens=4200, limit=4096)


def test_b87_an_overflow_of_a_stream_is_an_event_of_it() -> None:
    asked = reply(stream=True)
    assert DIALECT.errors_in_stream(overflow(), asked.request)
    encoder = DIALECT.encoder(asked)
    found = events(encoder.start() + encoder.error(overflow()))
    assert kinds(found) == ["created", "in_progress", "error", "failed"]
    failed = found[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["id"] == f"resp_{REF}"
    assert failed["error"]["code"] == "context_length_exceeded"
    assert "context window" in failed["error"]["message"]
    assert "4096" in failed["error"]["message"]


def test_b87_an_overflow_without_a_stream_is_a_400_with_the_code() -> None:
    assert not DIALECT.errors_in_stream(overflow(), request())
    answered = DIALECT.error(overflow())
    assert answered.status == 400
    assert answered.body["error"]["code"] == "context_length_exceeded"
    assert answered.body["error"]["message"] == "This model's maximum context length is 4096 tokens."


def test_other_errors_keep_their_http_status_while_nothing_was_sent() -> None:
    for error in (EngineBusy("x"), EngineOverloaded("x"), StoreError("x")):
        assert not DIALECT.errors_in_stream(error, reply(stream=True).request)


def test_a_rate_limit_in_a_stream_says_when_to_try_again() -> None:
    encoder = DIALECT.encoder(reply(stream=True))
    found = events(encoder.start() + encoder.feed(TextDelta("a")) + encoder.error(EngineBusy("slow down", retry_after="3")))
    error = found[-1]["response"]["error"]
    assert error["code"] == "rate_limit_exceeded"
    assert "try again in 3s" in error["message"]


@pytest.mark.parametrize(
    ("error", "code"),
    [(EngineUnavailable("x"), "server_error"), (StoreError("x"), "server_error"), (EngineRejected("x"), "invalid_prompt")],
)
def test_a_failed_stream_says_whether_to_try_again(error: CallError, code: str) -> None:
    encoder = DIALECT.encoder(reply(stream=True))
    found = events(encoder.start() + encoder.error(error))
    assert found[-1]["response"]["error"]["code"] == code


def test_a_part_of_a_content_with_images_is_shown_as_text() -> None:
    made = Answer(Message("assistant", (Text("a"),)), "stop", Usage())
    assert DIALECT.complete(reply(), [made])["output"][0]["content"][0]["text"] == "a"
