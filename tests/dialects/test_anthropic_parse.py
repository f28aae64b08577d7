"""Anthropic Messages, the way in: bodies to canonical requests. B-numbers are public bug reports of other gateways."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from polar.chat import ChatRequest, Image, Message, Text, Thinking, ToolCall, ToolChoice
from polar.conversation import fold_system
from polar.dialects.anthropic import Anthropic
from polar.dialects.base import Operation, Route
from polar.errors import InvalidRequest

DIALECT = Anthropic()
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
LS = {"name": "ls", "description": "d", "input_schema": {"type": "object", "properties": {"p": {"type": "string"}}}}


def parse(messages: list[Any] | None = None, **fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}] if messages is None else messages, **fields}
    return DIALECT.parse(body, Route(Operation.GENERATE))


def result(identifier: str = "t1", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": identifier, **fields}


def call(identifier: str = "t1", name: str = "ls", arguments: Any = None) -> dict[str, Any]:
    return {"type": "tool_use", "id": identifier, "name": name, "input": {} if arguments is None else arguments}


def refused(param: str, messages: list[Any] | None = None, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(messages, **fields)
    assert caught.value.param == param
    return caught.value


# --- routes and keys --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "headers", "expected"),
    [
        ("POST", "/v1/messages", {}, Route(Operation.GENERATE)),
        ("POST", "/messages", {}, Route(Operation.GENERATE)),
        ("POST", "/v1/messages/", {}, Route(Operation.GENERATE)),
        ("POST", "/v1/messages/count_tokens", {}, Route(Operation.COUNT)),
        ("GET", "/v1/models", {"anthropic-version": "2023-06-01"}, Route(Operation.MODELS)),
        ("GET", "/v1/models/org/name", {"anthropic-version": "2023-06-01"}, Route(Operation.MODEL, {"model": "org/name"})),
        ("GET", "/v1/models", {}, None),
        ("HEAD", "/api/hello", {}, Route(Operation.PROBE)),
        ("HEAD", "/", {}, Route(Operation.PROBE)),
        ("GET", "/", {}, None),
        ("GET", "/v1/messages", {}, None),
        ("POST", "/v1/messages/batches", {}, None),
        ("POST", "/v1/chat/completions", {"anthropic-version": "2023-06-01"}, None),
    ],
)
def test_routes(method: str, path: str, headers: dict[str, str], expected: Route | None) -> None:
    assert DIALECT.route(method, path, {"beta": "true"}, headers) == expected


def test_b29_count_tokens_takes_any_query_and_no_max_tokens() -> None:
    route = DIALECT.route("POST", "/v1/messages/count_tokens", {"beta": "true"}, {})
    assert route is not None
    request = DIALECT.parse({"model": "m", "messages": [{"role": "user", "content": "hi"}], "compaction": {"type": "summarize"}}, route)
    assert request.sampling.max_tokens is None
    assert DIALECT.count(7, request) == {"input_tokens": 7}


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"x-api-key": "k"}, "k"),
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k "}, "k"),
        ({"x-api-key": "a", "authorization": "Bearer b"}, "a"),
        ({"x-api-key": "", "authorization": "Bearer b"}, "b"),
        ({"authorization": "Basic k"}, None),
        ({"authorization": "Bearer"}, None),
        ({}, None),
    ],
)
def test_key_is_found_where_clients_put_it(headers: dict[str, str], key: str | None) -> None:
    assert DIALECT.key(headers, {"key": "q"}) == key


def test_an_unknown_path_is_recognised_by_header_or_path() -> None:
    assert DIALECT.speaks("/v1/organizations", {"anthropic-version": "2023-06-01"})
    assert DIALECT.speaks("/v1/messages/batches", {})
    assert not DIALECT.speaks("/v1/chat/completions", {"authorization": "Bearer k"})


# --- system -----------------------------------------------------------------------------------------------------------


def test_system_string_and_list_give_one_message() -> None:
    assert parse(system="S").messages[0] == Message("system", "S")
    both = parse(system=[{"type": "text", "text": "A"}, {"type": "text", "text": ""}, {"type": "text", "text": "B"}])
    assert both.messages[0] == Message("system", "A\n\nB")
    assert parse(system=[]).messages[0].role == "user"


def test_b21_system_in_mid_conversation_is_accepted_and_can_be_folded_into_one() -> None:
    messages = parse(
        [{"role": "user", "content": "go"}, {"role": "system", "content": "agents"}], system=[{"type": "text", "text": "S"}]
    ).messages
    assert messages == (Message("system", "S"), Message("user", "go"), Message("system", "agents"))
    assert fold_system(messages) == (Message("system", "S"), Message("user", "go\n\nagents"))


def test_b22_a_later_system_message_leaves_everything_before_it_as_it_was() -> None:
    history = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [call()]},
        {"role": "user", "content": [result(content="o")]},
        {"role": "system", "content": "<total_tokens>9"},
    ]
    longer = [
        *history,
        {"role": "assistant", "content": [call("t2")]},
        {"role": "user", "content": [result("t2", content="p")]},
        {"role": "system", "content": "<total_tokens>8"},
    ]
    first, second = fold_system(parse(history).messages), fold_system(parse(longer).messages)
    assert second[: len(first)] == first
    assert [message.role for message in second] == ["user", "assistant", "tool", "assistant", "tool"]


HEADER = "x-anthropic-billing-header: cc_version=2.1.9.ab1; cch="


@pytest.mark.parametrize("rest", ["You are", "\nYou are", "  You are\n\nx-anthropic-billing-header: kept, not at the start"])
def test_b23_billing_header_is_removed_and_the_rest_is_byte_equal(rest: str) -> None:
    as_line = parse(system=f"{HEADER}aaaaa;\n{rest}")
    as_block = parse(system=[{"type": "text", "text": f"{HEADER}bbbbb;"}, {"type": "text", "text": rest}])
    assert as_line.messages[0] == as_block.messages[0] == Message("system", rest)


def test_b23_billing_header_alone_leaves_no_system_message() -> None:
    assert parse(system=[{"type": "text", "text": f"{HEADER}a;"}]).messages == (Message("user", "hi"),)


def test_b24_cache_control_changes_nothing_but_stays_inside_schemas_and_inputs() -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}

    def body(mark: dict[str, Any]) -> Any:
        return parse(
            [
                {"role": "user", "content": [{"type": "text", "text": "hi", **mark}]},
                {"role": "assistant", "content": [{**call(arguments={"cache_control": "x"}), **mark}]},
                {"role": "user", "content": [{**result(content=[{"type": "text", "text": "o", **mark}]), **mark}]},
            ],
            system=[{"type": "text", "text": "A", **mark}, {"type": "text", "text": "B"}],
            tools=[{"name": "ls", "input_schema": schema, **mark}],
            **mark,
        )

    assert body(mark) == body({})
    assert body(mark).tools[0].parameters == schema
    assert body(mark).messages[2].tool_calls[0].arguments == '{"cache_control":"x"}'


# --- content ----------------------------------------------------------------------------------------------------------


def test_string_and_list_content_are_the_same_message() -> None:
    assert parse([{"role": "user", "content": "a"}]) == parse([{"role": "user", "content": [{"type": "text", "text": "a"}]}])


def test_text_blocks_are_joined_by_a_line_break_and_images_stand_between_them() -> None:
    content = [
        {"type": "text", "text": "a"},
        {"type": "text", "text": "b"},
        {"type": "image", "source": PNG},
        {"type": "text", "text": "c"},
    ]
    (message,) = parse([{"role": "user", "content": content}]).messages
    assert message.content == (Text("a\nb"), Image("data:image/png;base64,iVBORw0KGgo="), Text("c"))


def test_image_by_url_and_by_file() -> None:
    content = [
        {"type": "image", "source": {"type": "url", "url": "https://x/y.png"}},
        {"type": "image", "source": {"type": "file", "file_id": "f"}},
    ]
    (message,) = parse([{"role": "user", "content": content}]).messages
    assert message.content == (Image("https://x/y.png"), Text("[image: file f, which cannot be shown]"))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ({"type": "text", "media_type": "text/plain", "data": "body"}, "body"),
        ({"type": "content", "content": "body"}, "body"),
        ({"type": "content", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}, "[document: application/pdf, which cannot be shown]"),
        ({"type": "url", "url": "https://x/d.pdf"}, "[document: https://x/d.pdf, which cannot be shown]"),
        ({"type": "file", "file_id": "f"}, "[document: file f, which cannot be shown]"),
    ],
)
def test_documents_become_text_or_say_that_they_cannot(source: dict[str, Any], text: str) -> None:
    (message,) = parse([{"role": "user", "content": [{"type": "document", "title": "T", "source": source}]}]).messages
    assert message.content == f"T\n{text}"


def test_search_result_and_unknown_blocks_become_text() -> None:
    found = {"type": "search_result", "title": "T", "source": "U", "content": [{"type": "text", "text": "body"}]}
    (message,) = parse([{"role": "user", "content": [found, {"type": "container_upload", "file_id": "f"}]}]).messages
    assert message.content == "T\nU\nbody\n[container_upload]"


def test_b14_thinking_in_history_is_reasoning_never_content() -> None:
    content = [{"type": "thinking", "thinking": "secret", "signature": "S"}, {"type": "text", "text": "ok"}]
    message = parse([{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]).messages[1]
    assert message == Message("assistant", "ok", (Thinking("secret", "S"),))


def test_b15_redacted_thinking_keeps_its_neighbours_and_shows_nothing() -> None:
    content = [{"type": "redacted_thinking", "data": "AAAA"}, {"type": "text", "text": "hi"}]
    message = parse([{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]).messages[1]
    assert message == Message("assistant", "hi", (Thinking("", "AAAA", redacted=True),))
    assert message.reasoning == ""


def test_thinking_without_signature_is_plain_reasoning() -> None:
    for block in ({"type": "thinking", "thinking": "t"}, {"type": "thinking", "thinking": "t", "signature": ""}):
        message = parse([{"role": "user", "content": "u"}, {"role": "assistant", "content": [block]}]).messages[1]
        assert message.thinking == (Thinking("t"),)


def test_b17_images_of_tool_results_follow_all_tool_messages_of_the_turn() -> None:
    shot = result(content=[{"type": "text", "text": "shot"}, {"type": "image", "source": PNG}])
    content = [shot, {"type": "text", "text": "also"}, result("t2", content="o")]
    messages = parse([{"role": "user", "content": content}]).messages
    assert messages == (
        Message("tool", "shot", tool_call_id="t1"),
        Message("tool", "o", tool_call_id="t2"),
        Message("user", (Image("data:image/png;base64,iVBORw0KGgo="), Text("also"))),
    )


@pytest.mark.parametrize("fields", [{}, {"content": ""}, {"content": []}, {"content": [{"type": "text", "text": ""}]}, {"content": None}])
def test_b18_an_empty_tool_result_is_one_empty_tool_message(fields: dict[str, Any]) -> None:
    assert parse([{"role": "user", "content": [result(**fields)]}]).messages == (Message("tool", "", tool_call_id="t1"),)


def test_failed_tool_results_are_marked_in_a_stable_form() -> None:
    texts = [
        parse([{"role": "user", "content": [result(is_error=failed, content=text)]}]).messages[0].content
        for failed, text in [(True, "no"), (True, ""), (False, "no")]
    ]
    assert texts == ["[Tool Error] no", "[Tool Error]", "no"]


def test_b20_empty_text_beside_a_tool_call_is_accepted_and_whitespace_kept() -> None:
    for text, kept in [("", ""), ("\n", "\n")]:
        content = [{"type": "text", "text": text}, call()]
        message = parse([{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]).messages[1]
        assert message == Message("assistant", kept, tool_calls=(ToolCall("t1", "ls", "{}"),))


def test_an_answer_split_over_messages_is_one_message_but_two_texts_are_two() -> None:
    split = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": "S"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        {"role": "assistant", "content": [call("t1")]},
        {"role": "assistant", "content": [call("t2")]},
    ]
    whole = Message("assistant", "a", (Thinking("t", "S"),), (ToolCall("t1", "ls", "{}"), ToolCall("t2", "ls", "{}")))
    assert parse(split).messages[1:] == (whole,)
    two = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert parse(two).messages[1:] == (Message("assistant", "a"), Message("assistant", "b"))


def test_neighbouring_user_messages_are_one_turn_with_its_results_first() -> None:
    split = parse(
        [
            {"role": "user", "content": [result(content="o"), {"type": "text", "text": "a"}]},
            {"role": "system", "content": [], "output_config": {"effort": "low"}},
            {"role": "user", "content": [result("t2", content="p")]},
            {"role": "user", "content": "b"},
        ]
    )
    whole = parse([{"role": "user", "content": [result(content="o"), result("t2", content="p"), {"type": "text", "text": "a\nb"}]}])
    assert split.messages == whole.messages


def test_assistant_text_blocks_are_joined_by_nothing() -> None:
    content = [{"type": "text", "text": "a "}, {"type": "text", "text": "b", "citations": [{"type": "char_location"}]}]
    assert parse([{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]).messages[1].content == "a b"


def test_tool_arguments_keep_key_order_floats_and_unicode() -> None:
    body = orjson.loads('{"b": 2, "a": 1.0, "c": "\\u00e9", "d": -0.0, "e": 0.5}')
    message = parse([{"role": "user", "content": "u"}, {"role": "assistant", "content": [call(arguments=body)]}]).messages[1]
    assert message.tool_calls[0].arguments == '{"b":2,"a":1.0,"c":"é","d":-0.0,"e":0.5}'


def test_server_tool_blocks_in_history_are_named() -> None:
    content = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}, {"type": "text", "text": "x"}]
    message = parse([{"role": "user", "content": "u"}, {"role": "assistant", "content": content}]).messages[1]
    assert message.content == "[server_tool_use: web_search]x"


def test_deep_nesting_and_wide_integers_are_no_failure() -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    wide = {"n": 2**70}
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": [call(arguments=deep), call("t2", arguments=wide)]}]
    calls = parse(messages).messages[1].tool_calls
    assert calls[0].arguments == '{"a":' * 300 + "{}" + "}" * 300
    assert calls[1].arguments == '{"n":1180591620717411303424}'
    for _ in range(100_000):
        deep = {"a": deep}
    refused("messages.0.content.0.input", [{"role": "assistant", "content": [call(arguments=deep)]}])


# --- tools ------------------------------------------------------------------------------------------------------------


def test_custom_tools_are_taken_as_they_are() -> None:
    (tool,) = parse(tools=[{**LS, "type": "custom", "strict": True, "eager_input_streaming": True}]).tools
    assert (tool.name, tool.description, tool.parameters) == ("ls", "d", LS["input_schema"])


def test_server_tools_are_withheld_and_client_tools_get_their_schema() -> None:
    tools = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "code_execution_20260120", "name": "code_execution"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {"type": "thing_of_tomorrow_20300101", "name": "thing"},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "memory_20250818", "name": "memory"},
        {"type": "computer_20250124", "name": "computer", "display_width_px": 1, "display_height_px": 1},
        {"type": "future_20300101", "name": "future", "input_schema": {"type": "object"}},
    ]
    request = parse(tools=tools, tool_choice={"type": "tool", "name": "web_search"})
    assert [tool.name for tool in request.tools] == ["bash", "str_replace_based_edit_tool", "memory", "computer", "future"]
    assert "command" in request.tools[0].parameters["properties"]
    assert request.tool_choice == ToolChoice("auto")


def test_a_tool_in_another_providers_form_is_refused_not_withheld() -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(tools=[{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}])
    assert refused.value.param == "tools.0.type"


def test_a_deferred_tool_stands_where_it_is_referred_to_and_not_in_the_head() -> None:
    tools = [LS, {"name": "DeferredToolPlaceholder", "input_schema": {"type": "object"}, "defer_loading": True}]
    reference = {"type": "tool_reference", "tool_name": "mcp__fs"}
    before = [{"role": "user", "content": "u"}, {"role": "assistant", "content": [call(name="ls")]}]
    first = parse(before, tools=tools)
    loaded = {"name": "mcp__fs", "description": "d", "input_schema": {"type": "object"}, "defer_loading": True}
    second = parse([*before, {"role": "user", "content": [result(content=[reference])]}], tools=[*tools, loaded])
    assert first.tools == second.tools
    assert [tool.name for tool in first.tools] == ["ls"]
    assert '"name":"mcp__fs"' in second.messages[-1].text
    assert [tool.name for tool in second.options["loaded_tools"]] == ["mcp__fs"]
    unknown = parse([*before, {"role": "user", "content": [result(content=[reference])]}], tools=tools)
    assert unknown.messages[-1].content == "[tool: mcp__fs]"


def test_deferred_tools_are_all_shown_where_only_the_provider_could_search_them() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    request = parse(tools=[search, LS, {"name": "x", "input_schema": {"type": "object"}, "defer_loading": True}])
    assert [tool.name for tool in request.tools] == ["ls", "x"]


def test_tools_added_and_removed_in_mid_conversation_are_text_at_their_place() -> None:
    definition = {"type": "tool_definition", "definition": {"name": "new", "input_schema": {"type": "object"}}}
    content = [{"type": "tool_addition", "tool": definition}, {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "ls"}}]
    request = parse([{"role": "user", "content": "u"}, {"role": "system", "content": content}], tools=[LS])
    assert request.tools == parse(tools=[LS]).tools
    assert '"name":"new"' in request.messages[1].text
    assert request.messages[1].text.endswith("The tool ls can no longer be called.")


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto"), False),
        ({"type": "auto", "disable_parallel_tool_use": False}, ToolChoice("auto"), None),
        ({"type": "any"}, ToolChoice("required"), None),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolChoice("required"), False),
        ({"type": "tool", "name": "ls"}, ToolChoice("named", "ls"), None),
        ({"type": "none"}, ToolChoice("none"), None),
        (None, ToolChoice("auto"), None),
    ],
)
def test_b31_every_tool_choice(choice: Any, expected: ToolChoice, parallel: bool | None) -> None:
    request = parse(tools=[LS], tool_choice=choice)
    assert (request.tool_choice, request.parallel_tool_calls) == (expected, parallel)


def test_a_deferred_tool_that_is_forced_moves_to_the_head() -> None:
    request = parse(tools=[{**LS, "defer_loading": True}], tool_choice={"type": "tool", "name": "ls"})
    assert request.tool_choice == ToolChoice("named", "ls")
    assert [tool.name for tool in request.tools] == ["ls"]


# --- parameters -------------------------------------------------------------------------------------------------------


def test_b25_stop_sequences_are_the_stop_strings() -> None:
    assert parse(stop_sequences=["</x>"]).sampling.stop == ("</x>",)


def test_b32_unknown_and_beta_fields_are_ignored_and_an_empty_system_message_adds_nothing() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": [], "output_config": {"effort": "low"}}]
    request = parse(
        messages,
        context_management={"edits": []},
        output_config={"effort": "high"},
        metadata={"user_id": "u"},
        service_tier="auto",
        mcp_servers=[],
    )
    assert request.messages == (Message("user", "x"),)
    assert request.effort == "low"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"type": "disabled"}, False),
        ({"type": "enabled", "budget_tokens": 31999, "display": "omitted"}, True),
        ({"type": "adaptive"}, True),
        ({"type": "between_tools"}, True),
        (None, None),
    ],
)
def test_b34_the_thinking_switch(config: Any, expected: bool | None) -> None:
    assert parse(thinking=config).thinking is expected


def test_adaptive_thinking_comes_with_its_effort() -> None:
    request = parse(thinking={"type": "adaptive"}, output_config={"effort": "high"})
    assert (request.thinking, request.effort) == (True, "high")


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_b37_structured_output(field: str) -> None:
    output = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    request = parse(**{field: {"format": output} if field == "output_config" else output})
    assert request.response_format == {"type": "json_schema", "json_schema": {"name": "output", "schema": output["schema"], "strict": True}}


def test_sampling_parameters() -> None:
    sampling = parse(temperature=1, top_p=0.5, top_k=3).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 1.0, 0.5, 3)
    assert parse(stream=True).stream
    assert not parse().stream


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("messages", [[result()], []])
def test_a_thread_is_begun_but_never_held(messages: list[Any]) -> None:
    """Who continues one sends no history: it must not be answered without. On this code the official SDKs send all of it again."""
    assert parse(thread={"type": "create"}) == parse(thread=None) == parse()
    new = [{"role": "user", "content": messages}] if messages else []
    error = refused("thread", new, thread={"type": "continue", "previous_message_id": "msg_x"})
    shape = DIALECT.error(error)
    assert (shape.status, shape.body["error"]["type"]) == (404, "not_found_error")
    assert shape.body["error"]["details"] == {"error_code": "thread_not_found"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([None], "messages.0"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [result(content=5)]}], "messages.0.content.0.content"),
        ([{"role": "user", "content": [call()]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [result()]}], "messages.0.content.0.type"),
        ([{"role": "assistant", "content": [call(arguments=[])]}], "messages.0.content.0.input"),
        ([{"role": "user", "content": [{"type": "image", "source": {"type": "x"}}]}], "messages.0.content.0.source.type"),
    ],
)
def test_b90_a_wrong_message_is_refused_by_its_place(messages: list[Any], param: str) -> None:
    assert param in str(refused(param, messages))


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("max_tokens", {"max_tokens": None}),
        ("max_tokens", {"max_tokens": 0}),
        ("max_tokens", {"max_tokens": "9"}),
        ("model", {"model": 5}),
        ("messages", {"messages": "x"}),
        ("messages", {"messages": []}),
        ("temperature", {"temperature": 2}),
        ("stop_sequences.1", {"stop_sequences": ["a", ""]}),
        ("stream", {"stream": "yes"}),
        ("thinking.type", {"thinking": {"type": "sometimes"}}),
        ("tool_choice.type", {"tool_choice": {"type": "maybe"}}),
        ("tool_choice.name", {"tool_choice": {"type": "tool", "name": "x"}}),
        ("tools.0.input_schema", {"tools": [{"name": "x"}]}),
        ("tools.1.name", {"tools": [LS, LS]}),
        ("output_config.format.type", {"output_config": {"format": {"type": "xml"}}}),
        ("thread.type", {"thread": {"type": "fork"}}),
        ("thread", {"thread": "create"}),
        ("compaction", {"compaction": {"type": "summarize"}}),
    ],
)
def test_b90_a_wrong_parameter_is_refused_by_its_name(param: str, fields: dict[str, Any]) -> None:
    refused(param, **fields)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"properties": schema}
    return schema


@pytest.mark.parametrize("levels", [255, 900])
def test_a_schema_nested_beyond_what_can_be_written_is_refused(levels: int) -> None:
    refused("tools.0.input_schema", tools=[{**LS, "input_schema": nested(levels)}])
    refused("output_config.format.schema", output_config={"format": {"type": "json_schema", "schema": nested(levels)}})


def test_a_deep_schema_and_huge_integers_in_one_are_taken() -> None:
    schema = {"const": 10**40, "properties": nested(200)}
    assert parse(tools=[{**LS, "input_schema": schema}]).tools[0].parameters == schema
