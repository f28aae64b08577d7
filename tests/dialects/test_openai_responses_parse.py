"""OpenAI Responses: requests to canonical form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polar.chat import ChatRequest, Image, Message, Text, Thinking, ToolCall, ToolChoice
from polar.conversation import fold_system
from polar.dialects.base import Operation, Route
from polar.dialects.openai_responses import OpenAIResponses, compaction
from polar.errors import InvalidRequest

DIALECT = OpenAIResponses()
REF = "0123456789abcdef0123456789"
OTHER = "fedcba9876543210fedcba9876"
IMAGE = "data:image/png;base64,iVBORw0KGgo="


def parse(body: dict[str, Any], operation: Operation = Operation.GENERATE) -> ChatRequest:
    return DIALECT.parse({"model": "m", **body}, Route(operation))


def messages(*items: Any) -> tuple[Message, ...]:
    return parse({"input": list(items)}).messages


def refused(body: dict[str, Any]) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    return caught.value


def call(call_id: str = "c1", name: str = "f", arguments: str = "{}", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments, **more}


def output(call_id: str = "c1", value: Any = "o") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": value}


# --- routes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["/v1", ""])
@pytest.mark.parametrize(
    ("method", "path", "operation"),
    [
        ("POST", "/responses", Operation.GENERATE),
        ("POST", "/responses/compact", Operation.COMPACT),
        ("POST", "/responses/input_tokens", Operation.COUNT),
        ("GET", "/responses/resp_1", Operation.RETRIEVE),
        ("DELETE", "/responses/resp_1", Operation.DELETE),
        ("GET", "/responses/resp_1/input_items", Operation.INPUT_ITEMS),
    ],
)
def test_routes(prefix: str, method: str, path: str, operation: Operation) -> None:
    route = DIALECT.route(method, prefix + path, {}, {})
    assert route is not None
    assert route.operation is operation
    assert route.params.get("response_id") == ("resp_1" if "resp_1" in path else None)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses"),
        ("POST", "/v1/responses/resp_1"),
        ("PUT", "/v1/responses"),
        ("GET", "/v1/responses/compact"),
        ("POST", "/v1/responses/resp_1/other"),
        ("POST", "/v1/responses/a/b/c"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/"),
    ],
)
def test_other_paths_are_not_ours(method: str, path: str) -> None:
    assert DIALECT.route(method, path, {}, {}) is None


def test_a_cancel_is_refused_as_nothing_runs_in_the_background() -> None:
    route = DIALECT.route("POST", "/v1/responses/resp_1/cancel", {}, {})
    assert route is not None
    with pytest.raises(InvalidRequest, match="background"):
        DIALECT.parse({}, route)


def test_the_key_is_the_bearer_token() -> None:
    assert DIALECT.key({"authorization": "Bearer sk-1"}, {}) == "sk-1"
    assert DIALECT.key({"authorization": "bearer sk-1"}, {}) == "sk-1"
    assert DIALECT.key({"authorization": "Basic x"}, {}) is None
    assert DIALECT.key({}, {}) is None


# --- input -----------------------------------------------------------------------------------------------------


def test_b57_messages_instead_of_input_is_a_400_that_names_input() -> None:
    error = refused({"messages": [{"role": "user", "content": "x"}]})
    assert error.status == 400
    assert error.param == "input"
    assert "input" in error.message


def test_b57_string_and_item_input_are_the_same_request() -> None:
    plain = parse({"input": "x"}).messages
    assert plain == (Message("user", "x"),)
    assert messages({"role": "user", "content": "x"}) == plain
    assert messages({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]}) == plain
    assert DIALECT.parse({"input": [{"role": "user", "content": "x"}]}, Route(Operation.GENERATE)).messages == plain


def test_no_input_at_all_is_refused_but_a_previous_response_may_stand_alone() -> None:
    assert refused({}).param == "input"
    request = parse({"previous_response_id": "resp_1"})
    assert request.previous == "resp_1"
    assert request.messages == ()


def test_b49_developer_and_system_stay_where_they_stand_and_fold_to_one_leading_message() -> None:
    request = parse(
        {
            "instructions": "I",
            "input": [{"role": "developer", "content": [{"type": "input_text", "text": "D"}]}, {"role": "user", "content": "u"}],
        }
    )
    assert request.messages == (Message("system", "I"), Message("system", "D"), Message("user", "u"))
    assert fold_system(request.messages) == (Message("system", "I\n\nD"), Message("user", "u"))
    later = messages({"role": "user", "content": "u"}, {"role": "developer", "content": "L"})
    assert [message.role for message in later] == ["user", "system"]


def test_b41_reasoning_text_and_calls_of_a_turn_are_one_assistant_message() -> None:
    parsed = messages(
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        call(),
        output(),
    )
    assert parsed == (
        Message("user", "u"),
        Message("assistant", "t", (Thinking("r"),), (ToolCall("c1", "f", "{}"),)),
        Message("tool", "o", tool_call_id="c1"),
    )


def test_items_of_two_completions_are_two_turns() -> None:
    first = {"type": "message", "id": f"msg_{REF}", "role": "assistant", "content": "a"}
    second = {"type": "message", "id": f"msg_{OTHER}", "role": "assistant", "content": "b"}
    assert [message.content for message in messages(first, second)] == ["a", "b"]


def test_calls_and_outputs_in_turns_of_one_completion_are_one_turn() -> None:
    parsed = messages(call(f"call_{REF}00"), output(f"call_{REF}00"), call(f"call_{REF}01"), output(f"call_{REF}01"))
    assert [message.role for message in parsed] == ["assistant", "tool", "tool"]
    assert [made.id for made in parsed[0].tool_calls] == [f"call_{REF}00", f"call_{REF}01"]


def test_arguments_that_come_as_an_object_are_their_text() -> None:
    """BerriAI/litellm#13420: a history whose calls hold what the client had parsed."""
    (message,) = messages({**call("c1"), "arguments": {"q": "é", "n": 1}})
    assert message.tool_calls[0].arguments == '{"q":"é","n":1}'


def test_reasoning_keeps_its_sealed_content_and_its_ids() -> None:
    (message,) = messages(
        {"type": "reasoning", "id": f"rs_{REF}", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": f"enc_{REF}"},
        {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "gAAAA"},
    )
    assert message.thinking == (Thinking("s", f"enc_{REF}"), Thinking("", "gAAAA", redacted=True))
    assert message.refs == (f"rs_{REF}", "rs_x")


def test_item_references_become_pointers_and_foreign_ones_are_refused() -> None:
    (message,) = messages({"type": "item_reference", "id": f"rs_{REF}"}, {"id": f"fc_{REF}00"})
    assert message == Message("assistant", refs=(f"rs_{REF}", f"fc_{REF}00"))
    assert refused({"input": [{"type": "item_reference", "id": "msg_abc"}]}).param == "input[0].id"


@pytest.mark.parametrize(
    "kind", ["web_search_call", "file_search_call", "mcp_call", "image_generation_call", "ghost_snapshot", "brand_new_item"]
)
def test_hosted_and_unknown_items_stand_for_nothing(kind: str) -> None:
    assert messages({"type": kind, "id": "x", "action": 3}, {"role": "user", "content": "u"}) == (Message("user", "u"),)


def test_an_item_without_type_role_or_id_is_refused() -> None:
    assert refused({"input": [{"content": "x"}]}).param == "input[0].type"
    assert refused({"input": ["x"]}).param == "input[0]"
    assert refused({"input": [{"role": "robot", "content": "x"}]}).param == "input[0].role"


def test_parts_in_no_message_are_the_users() -> None:
    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_text", "text": "this"}, picture]
    assert messages(*parts) == messages({"role": "user", "content": parts})
    said = {"role": "user", "content": "go"}
    assert messages(said, *parts) == (*messages(said), *messages(*parts))


def test_b55_images_of_a_tool_output_follow_the_run_of_outputs() -> None:
    parts = [{"type": "input_text", "text": "view"}, {"type": "input_image", "image_url": IMAGE, "detail": "high"}]
    parsed = messages(call("a"), call("b"), output("a", parts), output("b", "plain"), {"role": "user", "content": "go"})
    assert [message.role for message in parsed] == ["assistant", "tool", "tool", "user", "user"]
    assert parsed[1] == Message("tool", "view", tool_call_id="a")
    assert parsed[3].images == (Image(IMAGE, "high"),)
    assert IMAGE not in parsed[1].text + parsed[2].text


def test_images_of_a_user_keep_their_detail_and_place() -> None:
    (message,) = messages(
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": IMAGE, "detail": "low"}]}
    )
    assert message.content == (Text("a"), Image(IMAGE, "low"))
    (message,) = messages({"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}}]})
    assert message.content == (Image(IMAGE, "low"),)


def test_b18_an_output_without_content_is_an_empty_tool_message() -> None:
    for value in (None, "", [], [{"type": "input_text", "text": ""}]):
        assert messages(call(), output(value=value))[1] == Message("tool", "", tool_call_id="c1")


def test_outputs_of_every_kind() -> None:
    parsed = messages(
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"], "timeout_ms": None}},
        {
            "type": "shell_call_output",
            "call_id": "s",
            "output": [{"stdout": "out", "stderr": "err", "outcome": {"type": "exit", "exit_code": 1}}],
        },
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "l", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "lsh_1", "output": "x"},
        {"type": "apply_patch_call", "call_id": "p", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "p", "status": "failed", "output": "no such file"},
        {"type": "custom_tool_call", "call_id": "q", "name": "exec", "namespace": "functions", "input": "1"},
        {"type": "custom_tool_call_output", "call_id": "q", "output": [{"type": "input_text", "text": "one"}]},
    )
    assert [(message.tool_call_id, message.text) for message in parsed if message.role == "tool"] == [
        ("s", "out\nerr\n[exit code 1]"),
        ("l", "x"),
        ("p", "failed: no such file"),
        ("q", "one"),
    ]
    assert [made.name for message in parsed for made in message.tool_calls] == ["shell", "local_shell", "apply_patch", "functions__exec"]


def test_a_part_of_an_unknown_kind_is_told_of() -> None:
    parts = [{"type": "input_text", "text": "see"}, {"type": "input_video", "video_url": "v"}, {"type": "later", "text": "words"}]
    assert messages({"role": "user", "content": parts}) == (Message("user", "see\n[input_video]\nwords"),)


def test_an_output_without_a_call_id_answers_the_oldest_open_call() -> None:
    parsed = messages(
        call("a"), call("b"), {"type": "function_call_output", "output": "1"}, {"type": "function_call_output", "output": "2"}
    )
    assert [message.tool_call_id for message in parsed if message.role == "tool"] == ["a", "b"]


def test_an_output_of_no_call_is_told_to_the_model_as_it_stands() -> None:
    """openai/codex#43296, router-for-me/CLIProxyAPI#5831: a thread's message reaches another as an output of no call, sealed or not."""
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    sealed = [{"type": "encrypted_content", "encrypted_content": "look at b.py"}]
    told = {"type": "function_call_output", "id": "fco_1", "name": "send_message_to_thread", "output": sealed}
    assert messages(told) == (Message("user", "look at b.py"),)
    assert messages({"type": "function_call_output", "output": "o"}) == (Message("user", "o"),)
    meanwhile = messages(call, told, {"type": "function_call_output", "call_id": "c1", "output": "o"})
    assert meanwhile[1:] == (Message("user", "look at b.py"), Message("tool", "o", tool_call_id="c1"))


def test_a_message_between_agents_is_told_to_the_model_payload_included() -> None:
    content = [{"type": "input_text", "text": "Payload:\n"}, {"type": "encrypted_content", "encrypted_content": "do it"}]
    item = {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": content}
    assert messages(item) == (Message("user", "Message from /root:\nPayload:\ndo it"),)
    item["content"] = [{"type": "encrypted_content", "encrypted_content": "gAAAAABnotours"}]
    assert messages(item) == (Message("user", "Message from /root:\n"),)


def test_text_files_are_read_and_others_named() -> None:
    (message,) = messages(
        {"role": "user", "content": [{"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}]}
    )
    assert message.content == "[file a.txt]\nhi"
    (message,) = messages(
        {"role": "user", "content": [{"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="}]}
    )
    assert message.content == "[file a.pdf]"


# --- tools -----------------------------------------------------------------------------------------------------


def test_b38_a_custom_tool_is_a_function_with_one_required_string() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
    request = parse({"input": "x", "tools": [{"type": "custom", "name": "apply_patch", "description": "d", "format": grammar}]})
    (tool,) = request.tools
    assert tool.kind == "custom"
    assert tool.parameters == {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert tool.description is not None
    assert tool.description.startswith("d")
    assert "start: /.+/" in tool.description


def test_b38_a_custom_call_in_the_history_has_the_arguments_that_were_sampled() -> None:
    sampled = '{"input":"*** Begin Patch\\n*** End Patch"}'
    item = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin Patch\n*** End Patch"}
    (message,) = messages(item)
    assert message.tool_calls == (ToolCall("c", "apply_patch", sampled),)


def test_b39_hosted_tools_are_left_out_and_never_break_the_call() -> None:
    kinds = [
        {"type": "web_search"},
        {"type": "local_shell"},
        {"type": "image_generation"},
        {"type": "tool_search"},
        {"type": "mcp", "server_label": "x"},
    ]
    tools = [*kinds, {"type": "function", "name": "f", "parameters": {"type": "object"}}]
    request = parse({"input": "x", "tools": tools, "tool_choice": {"type": "web_search"}})
    assert [tool.name for tool in request.tools] == ["local_shell", "f"]
    assert request.tool_choice == ToolChoice("auto")


def test_b40_a_namespace_is_flattened_in_tools_and_history() -> None:
    namespace = {"type": "namespace", "name": "mcp__fs", "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}}]}
    request = parse({"tools": [namespace], "input": [call("c", "read", namespace="mcp__fs")]})
    assert [(tool.name, tool.namespace, tool.wire_name) for tool in request.tools] == [("mcp__fs__read", "mcp__fs", "read")]
    assert request.messages[0].tool_calls[0].name == "mcp__fs__read"


def test_b40_a_collision_of_flat_names_is_refused() -> None:
    namespace = {"type": "namespace", "name": "a", "tools": [{"type": "function", "name": "b"}]}
    error = refused({"input": "x", "tools": [namespace, {"type": "function", "name": "a__b"}]})
    assert error.param == "tools[1]"
    assert "a__b" in error.message


def test_additional_tools_in_the_input_are_tools() -> None:
    functions = {
        "type": "namespace",
        "name": "functions",
        "tools": [{"type": "custom", "name": "exec"}, {"type": "function", "name": "wait"}],
    }
    item = {"type": "additional_tools", "role": "developer", "tools": [functions]}
    request = parse({"input": [item, {"role": "user", "content": "u"}], "tool_choice": "required"})
    assert [(tool.name, tool.kind) for tool in request.tools] == [("functions__exec", "custom"), ("functions__wait", "function")]
    assert request.messages == (Message("user", "u"),)
    assert request.tool_choice == ToolChoice("required")


def test_tools_found_by_a_search_are_told_in_its_output_and_leave_the_tool_set_alone() -> None:
    search = {
        "type": "tool_search",
        "execution": "client",
        "description": "find",
        "parameters": {"type": "object", "properties": {"q": {}}},
    }
    hidden = {"type": "function", "name": "later", "defer_loading": True}
    found = {"type": "namespace", "name": "mcp__cal", "tools": [{"type": "function", "name": "add", "description": "adds"}]}
    items = [
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {"q": "calendar"}},
        {"type": "tool_search_output", "call_id": "c", "status": "completed", "execution": "client", "tools": [found]},
    ]
    request = parse({"input": items, "tools": [search, hidden]})
    assert [tool.name for tool in request.tools] == ["tool_search"]
    assert request.messages[0].tool_calls[0].arguments == '{"q":"calendar"}'
    assert json.loads(request.messages[1].text)[0]["name"] == "mcp__cal__add"
    assert request.options["loaded"]["mcp__cal__add"]["namespace"] == "mcp__cal"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice()),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "f"}, ToolChoice("named", "f")),
        ({"type": "custom", "name": "g"}, ToolChoice("named", "g")),
        ({"type": "local_shell"}, ToolChoice("named", "local_shell")),
        ({"type": "web_search_preview"}, ToolChoice()),
        ({"type": "mcp", "server_label": "x"}, ToolChoice()),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}, ToolChoice()),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}, ToolChoice("named", "f")),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}]},
            ToolChoice("required"),
        ),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, ToolChoice()),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice) -> None:
    tools = [{"type": "function", "name": "f"}, {"type": "custom", "name": "g"}, {"type": "local_shell"}, {"type": "web_search"}]
    assert parse({"input": "x", "tools": tools, "tool_choice": choice}).tool_choice == expected


def test_a_choice_of_an_unknown_function_is_refused() -> None:
    assert refused({"input": "x", "tool_choice": {"type": "function", "name": "f"}}).param == "tool_choice.name"


# --- settings --------------------------------------------------------------------------------------------------


def test_b52_what_codex_sends_beside_the_input_changes_nothing() -> None:
    more = {
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "reasoning": {"effort": "high", "summary": "auto"},
        "parallel_tool_calls": False,
        "stream": True,
        "store": False,
    }
    request = parse({"input": "x", **more})
    assert request.messages == parse({"input": "x"}).messages
    assert (request.stream, request.store, request.effort, request.parallel_tool_calls) == (True, False, "high", False)


@pytest.mark.parametrize(("effort", "thinking"), [("none", False), ("minimal", None), ("high", None), (None, None)])
def test_thinking_is_switched_by_effort(effort: str | None, thinking: bool | None) -> None:
    assert parse({"input": "x", "reasoning": {"effort": effort}}).thinking is thinking


def test_sampling_and_logprobs() -> None:
    request = parse({"input": "x", "max_output_tokens": 16, "temperature": 0.5, "top_p": 0.9, "max_tool_calls": 3, "truncation": "auto"})
    assert request.sampling.as_dict() == {"max_tokens": 16, "temperature": 0.5, "top_p": 0.9}
    assert request.top_logprobs is None
    assert parse({"input": "x", "top_logprobs": 0}).top_logprobs is None
    assert parse({"input": "x", "include": ["message.output_text.logprobs"]}).top_logprobs == 0
    assert parse({"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 5}).top_logprobs == 5


def test_structured_output() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert parse({"input": "x", "text": {"format": form}}).response_format == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": schema, "strict": True},
    }
    assert parse({"input": "x", "text": {"format": {"type": "json_object"}}}).response_format == {"type": "json_object"}
    assert parse({"input": "x", "text": {"format": {"type": "text"}}}).response_format is None
    assert refused({"input": "x", "text": {"format": {"type": "yaml"}}}).param == "text.format.type"


def test_responses_are_stored_unless_the_client_says_otherwise() -> None:
    assert parse({"input": "x"}).store
    assert not parse({"input": "x", "store": False}).store
    assert not parse({"input": "x"}, Operation.COUNT).store


@pytest.mark.parametrize(("name", "value"), [("background", True), ("conversation", "conv_1"), ("prompt", {"id": "p"})])
def test_what_would_silently_lose_a_conversation_is_refused(name: str, value: Any) -> None:
    assert refused({"input": "x", name: value}).param == name


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", 3, "input"),
        ("instructions", [], "instructions"),
        ("temperature", "hot", "temperature"),
        ("max_output_tokens", 0, "max_output_tokens"),
        ("max_output_tokens", 10**30, "max_output_tokens"),
        ("stream", "yes", "stream"),
        ("tools", {}, "tools"),
        ("tools", [{"type": "function"}], "tools[0].name"),
        ("reasoning", "high", "reasoning"),
        ("text", [], "text"),
        ("include", "x", "include"),
        ("metadata", {"a": 10**30}, "body"),
        ("input", [{"type": "function_call", "call_id": 1, "name": "f"}], "input[0].call_id"),
        ("input", [{"type": "function_call_output", "call_id": "c", "output": {"a": 1}}], "input[0].output"),
        ("input", [{"type": "shell_call", "call_id": "c"}], "input[0].action"),
        ("input", [{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
    ],
)
def test_a_wrong_type_names_its_field(field: str, value: Any, param: str) -> None:
    assert refused({"input": "x", field: value}).param == param


# --- compaction ------------------------------------------------------------------------------------------------


def test_b54_a_trigger_at_the_end_asks_for_a_summary_and_keeps_the_tools() -> None:
    tools = [{"type": "function", "name": "f"}]
    request = parse({"input": [{"role": "user", "content": "h"}, {"type": "compaction_trigger"}], "tools": tools, "stream": True})
    assert request.options["compaction"] == "trigger"
    assert request.messages == (Message("user", "h"), Message("user", compaction.REQUEST))
    assert [tool.name for tool in request.tools] == ["f"]
    assert request.tool_choice == ToolChoice("none")
    assert request.stream
    assert not request.store


def test_b54_a_stored_compaction_is_context_and_no_trigger() -> None:
    sealed = compaction.seal("Résumé: do it", REF)
    request = parse(
        {"input": [{"type": "compaction", "id": f"cmp_{REF}", "encrypted_content": sealed}, {"role": "user", "content": "next"}]}
    )
    assert "compaction" not in request.options
    assert "Résumé: do it" in request.messages[0].text
    assert request.messages[0].role == "user"
    assert request.messages[0].refs == (f"cmp_{REF}",)
    assert request.messages[1] == Message("user", "next")


def test_b54_an_old_trigger_has_done_its_work() -> None:
    request = parse({"input": [{"type": "compaction_trigger"}, {"role": "user", "content": "next"}]})
    assert "compaction" not in request.options
    assert request.messages == (Message("user", "next"),)


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
@pytest.mark.parametrize("sealed", ["gAAAAABforeign", "cmp1.x.%%%", "cmp1", None])
def test_a_foreign_compaction_is_told_of_and_never_an_error(kind: str, sealed: str | None) -> None:
    (message,) = messages({"type": kind, "encrypted_content": sealed})
    assert "cannot be read" in message.text


def test_the_compact_endpoint_asks_for_a_summary() -> None:
    request = parse({"input": [{"role": "user", "content": "h"}], "instructions": "I", "stream": True}, Operation.COMPACT)
    assert request.options["compaction"] == "endpoint"
    assert request.messages == (Message("system", "I"), Message("user", "h"), Message("user", compaction.REQUEST))
    assert not request.stream
