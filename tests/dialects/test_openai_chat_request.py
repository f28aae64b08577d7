"""Chat Completions: paths, keys and what real clients send, and the public bug reports that concern them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from polar.chat import Answer, ChatRequest, Image, Message, Text, Thinking, Tool, ToolCall, ToolChoice, Usage
from polar.dialects.base import Operation, Reply, Route, replay
from polar.dialects.openai_chat import OpenAIChat
from polar.errors import (
    InvalidRequest,
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


# --- paths, keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions", "/v1/chat/completions/"])
def test_generation_has_two_paths(path: str) -> None:
    assert CHAT.route("POST", path, {}, {}) == ROUTE


def test_models_are_listed_and_got_with_slashes_in_the_name() -> None:
    assert CHAT.route("GET", "/v1/models", {}, {}) == Route(Operation.MODELS)
    assert CHAT.route("GET", "/models/org/name", {}, {}) == Route(Operation.MODEL, {"model": "org/name"})
    assert [each["id"] for each in CHAT.models(["a", "b"])["data"]] == ["a", "b"]


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/embeddings", "/v1/chat", "/v1/messages", "/v1/responses", "/v1/chat/completions/x"]
)
def test_no_other_path_is_a_generation(path: str) -> None:
    assert CHAT.route("POST", path, {}, {}) is None


def test_another_providers_model_list_is_left_to_it() -> None:
    assert CHAT.route("GET", "/v1/models", {}, {"anthropic-version": "2023-06-01"}) is None
    assert CHAT.route("GET", "/v1/models", {}, {"x-goog-api-key": "k"}) is None
    assert CHAT.route("GET", "/v1/models", {"key": "k"}, {}) is None


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"api-key": "k"}, "k"),
        ({"authorization": "Basic k"}, None),
        ({"authorization": "Bearer "}, None),
        ({}, None),
    ],
)
def test_key_is_the_bearer_token(headers: dict[str, str], key: str | None) -> None:
    assert CHAT.key(headers, {}) == key


# --- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}, {"content": []}, {"content": [{"type": "text", "text": ""}]}])
def test_b58_null_empty_and_missing_content_are_the_same(content: dict[str, Any]) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = history(USER, {"role": "assistant", "tool_calls": [call], **content}, {"role": "tool", "tool_call_id": "c", "content": "o"})
    assert messages[1] == Message("assistant", "", tool_calls=(ToolCall("c", "f", "{}"),))
    assert messages[2] == Message("tool", "o", tool_call_id="c")


@pytest.mark.parametrize("keys", [("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content"), ("reasoning_text",)])
def test_b64_reasoning_is_read_from_either_key(keys: tuple[str, ...]) -> None:
    message = {"role": "assistant", "content": "a", **dict.fromkeys(keys, "r")}
    assert history(USER, message)[1] == Message("assistant", "a", thinking=(Thinking("r"),))


def test_b64_reasoning_is_answered_under_both_keys() -> None:
    request = parse()
    answer = says("a", thinking=(Thinking("r"),))
    message = body(request, answer)["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "r"
    assert message["content"] == "a"
    deltas = [event["choices"][0]["delta"] for event in events(request, answer)[:-1]]
    assert {"reasoning_content": "r", "reasoning": "r"} in deltas


def test_empty_reasoning_is_no_reasoning() -> None:
    assert history({"role": "assistant", "content": "a", "reasoning_content": "", "reasoning": None})[0].thinking == ()


def test_b49_developer_is_a_system_message_where_it_stands() -> None:
    messages = history(USER, {"role": "developer", "content": [{"type": "text", "text": "D"}]})
    assert messages[1] == Message("system", "D")


def test_tool_content_may_be_a_list_of_texts() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert history({"role": "tool", "tool_call_id": "c", "content": content})[0].content == "a\nb"


def test_images_are_parts_with_their_detail() -> None:
    url = "data:image/png;base64,iVBORw0KGgo="
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": url, "detail": "low"}}]
    assert history({"role": "user", "content": content})[0].content == (Text("see"), Image(url, "low"))


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,AAAA"}}, "a.pdf (application/pdf)"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "file-1"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio (wav)"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, "[video: this model cannot read it]"),
        ({"type": "audio_url", "audio_url": {"url": "https://x/y.mp3"}}, "[audio: this model cannot read it]"),
    ],
)
def test_what_no_model_here_can_read_becomes_a_placeholder_that_names_it(part: dict[str, Any], expected: str) -> None:
    text = history({"role": "user", "content": [part]})[0].text
    assert expected in text


def test_text_files_are_text_and_image_files_are_images() -> None:
    text = {"type": "file", "file": {"file_data": "data:text/plain;base64,aGk="}}
    image = {"type": "file", "file": {"file_data": "data:image/png;base64,AAAA"}}
    assert history({"role": "user", "content": [text, image]})[0].content == (Text("hi"), Image("data:image/png;base64,AAAA"))


def test_refusals_in_a_history_are_text() -> None:
    part = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    key = {"role": "assistant", "content": None, "refusal": "no"}
    assert history(part) == history(key) == (Message("assistant", "no"),)


def test_b108_control_tokens_in_text_pass_unchanged() -> None:
    text = "cat x: <|im_end|><|im_start|>assistant"
    assert history({"role": "tool", "tool_call_id": "c", "content": text})[0].content == text


def test_b105_arguments_are_never_re_serialised() -> None:
    arguments = '{"b": 2, "a": "\\u00e9"}'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    assert history({"role": "assistant", "tool_calls": [call]})[0].tool_calls == (ToolCall("c", "f", arguments),)
    assert body(parse(), calls(("f", arguments)))["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (None, "messages[0]"),
        ("x", "messages[0]"),
        ({"role": "robot"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": 5}]}, "messages[0].content[0].image_url"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_b90_a_wrong_message_names_its_field(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        history(message)
    assert caught.value.param == param


@pytest.mark.parametrize("messages", ["x", [], None, {}])
def test_b90_messages_must_be_a_filled_array(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CHAT.parse({"model": "m", "messages": messages}, ROUTE)
    assert caught.value.param == "messages"


# --- tools ----------------------------------------------------------------------------------------------------------


def function_tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def test_tools_without_parameters_take_none() -> None:
    bare = Tool("f").parameters
    assert bare == {"type": "object", "properties": {}}
    assert parse(tools=[function_tool("f"), function_tool("g", parameters=None), function_tool("h", parameters={})]).tools == tuple(
        Tool(name, None, bare) for name in "fgh"
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, ToolChoice("named", "f")),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function_tool("f"), function_tool("g")]}},
            ToolChoice("required"),
        ),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [function_tool("g")]}}, ToolChoice("named", "g")),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function_tool("g")]}}, ToolChoice("auto")),
        (None, ToolChoice("auto")),
    ],
)
def test_every_tool_choice(choice: Any, expected: ToolChoice) -> None:
    assert parse(tools=[function_tool("f"), function_tool("g")], tool_choice=choice).tool_choice == expected


@pytest.mark.parametrize("choice", ["required", "any", {"type": "function", "function": {"name": "f"}}, 5])
def test_a_choice_that_no_tool_can_meet_is_refused(choice: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_hosted_tools_are_left_out_and_a_choice_of_one_falls_back_to_auto() -> None:
    request = parse(tools=[{"type": "web_search"}, function_tool("f")], tool_choice={"type": "web_search"})
    assert [tool.name for tool in request.tools] == ["f"]
    assert request.tool_choice == ToolChoice("auto")


def test_two_different_tools_of_one_name_are_refused_and_equal_ones_are_one() -> None:
    assert len(parse(tools=[function_tool("f"), function_tool("f")]).tools) == 1
    with pytest.raises(InvalidRequest):
        parse(tools=[function_tool("f"), function_tool("f", description="other")])


def test_parallel_tool_calls_is_passed_on() -> None:
    assert parse(tools=[function_tool("f")], parallel_tool_calls=False).parallel_tool_calls is False
    assert parse(tools=[function_tool("f")]).parallel_tool_calls is None


def test_freeform_tools_take_one_string_and_answer_as_freeform() -> None:
    tool = {
        "type": "custom",
        "custom": {"name": "patch", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "s: /x/"}}},
    }
    request = parse(tools=[tool])
    assert request.tools[0].kind == "custom"
    assert "s: /x/" in (request.tools[0].description or "")
    item = body(request, calls(("patch", '{"input":"*** Begin"}')))["choices"][0]["message"]["tool_calls"][0]
    assert item == {"id": f"call_{REF}00", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    assert history({"role": "assistant", "tool_calls": [item]})[0].tool_calls[0].arguments == '{"input":"*** Begin"}'


def test_b65_legacy_functions_are_tools() -> None:
    request = parse(
        functions=[{"name": "s", "parameters": {"type": "object"}}],
        function_call={"name": "s"},
        messages=[
            USER,
            {"role": "assistant", "function_call": {"name": "s", "arguments": "{}"}},
            {"role": "function", "name": "s", "content": "r"},
        ],
    )
    assert request.tools == (Tool("s", None, {"type": "object"}),)
    assert request.tool_choice == ToolChoice("named", "s")
    assert request.parallel_tool_calls is False
    call = request.messages[1].tool_calls[0]
    assert request.messages[2] == Message("tool", "r", tool_call_id=call.id, name="s")


def test_b65_legacy_functions_are_answered_in_legacy_shape() -> None:
    request = parse(functions=[{"name": "s"}])
    answer = calls(("s", '{"a":1}'))
    choice = body(request, answer)["choices"][0]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"] == {"name": "s", "arguments": '{"a":1}'}
    assert "tool_calls" not in choice["message"]
    chunks = events(request, answer)
    assert chunks[1]["choices"][0]["delta"] == {"function_call": {"name": "s", "arguments": ""}}
    assert chunks[2]["choices"][0]["delta"] == {"function_call": {"arguments": '{"a":1}'}}
    assert chunks[3]["choices"][0]["finish_reason"] == "function_call"


def test_functions_beside_tools_are_refused_not_dropped() -> None:
    with pytest.raises(InvalidRequest):
        parse(functions=[{"name": "s"}], tools=[function_tool("f")])


# --- parameters -----------------------------------------------------------------------------------------------------


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert parse(max_tokens=5, max_completion_tokens=9).sampling.max_tokens == 9
    assert parse(max_tokens=5).sampling.max_tokens == 5


@pytest.mark.parametrize(("stop", "expected"), [("a", ("a",)), (["a", "b"], ("a", "b")), (None, ()), ([], ())])
def test_stop_is_a_string_or_a_list(stop: Any, expected: tuple[str, ...]) -> None:
    assert parse(stop=stop).sampling.stop == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": "hot"},
        {"temperature": 3},
        {"n": 0},
        {"n": True},
        {"stop": 5},
        {"stop": [""]},
        {"max_tokens": 0},
        {"stream": "yes"},
        {"stream": True, "stream_options": []},
        {"response_format": {"type": "yaml"}},
        {"top_logprobs": 2},
        {"logit_bias": {"5": "x"}},
        {"model": 5},
    ],
)
def test_b90_a_wrong_parameter_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(**wrong)
    assert caught.value.param


def test_response_formats() -> None:
    assert parse(response_format={"type": "text"}).response_format is None
    assert parse(response_format={"type": "json_object"}).response_format == {"type": "json_object"}
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    layout = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert parse(response_format=layout).response_format == layout


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({}, None, None),
        ({"reasoning_effort": "high"}, None, "high"),
        ({"reasoning_effort": "none"}, False, None),
        ({"enable_thinking": False}, False, None),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, True, None),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"reasoning": {"effort": "low"}}, None, "low"),
    ],
)
def test_b34_the_thinking_switch_has_many_spellings(fields: dict[str, Any], thinking: bool | None, effort: str | None) -> None:
    request = parse(**fields)
    assert (request.thinking, request.effort) == (thinking, effort)


def test_b32_unknown_fields_are_ignored() -> None:
    extra = {"store": False, "service_tier": "auto", "metadata": {"a": "b"}, "prompt_cache_key": "k", "verbosity": "low", "zzz": [1]}
    assert parse(**extra) == parse()
