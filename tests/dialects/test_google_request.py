"""Google: paths, keys and what real clients send, and the public bug reports that concern them."""

from __future__ import annotations

from typing import Any

import pytest

from polar.chat import ChatRequest, Image, Message, Text, Thinking, Tool, ToolChoice
from polar.dialects.base import Operation, Route
from polar.dialects.google import Google
from polar.errors import InvalidRequest

GOOGLE = Google()
ROUTE = Route(Operation.GENERATE, {"model": "m", "stream": "true", "alt": "sse"})
USER = {"role": "user", "parts": [{"text": "x"}]}


def parse(**body: Any) -> ChatRequest:
    return GOOGLE.parse({"contents": [USER], **body}, ROUTE)


def history(*contents: Any) -> tuple[Message, ...]:
    return parse(contents=list(contents)).messages


def model(*parts: Any) -> dict[str, Any]:
    return {"role": "model", "parts": list(parts)}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "parts": list(parts)}


def call(name: str, args: Any = None, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args or {}, **fields}}


def response(name: str, value: Any, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": value, **fields}}


# --- paths, keys ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resource", "name"),
    [
        ("models/m", "m"),
        ("models/org/name", "org/name"),
        ("models/org/name:tag", "org/name:tag"),
        ("models/models/x", "models/x"),
        ("tunedModels/x-123", "tunedModels/x-123"),
        ("publishers/google/models/m", "m"),
        ("projects/p/locations/l/publishers/google/models/m", "m"),
    ],
)
@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
def test_model_names_hold_slashes_and_colons(version: str, resource: str, name: str) -> None:
    route = GOOGLE.route("POST", f"/{version}/{resource}:streamGenerateContent", {"alt": "sse"}, {})
    assert route == Route(Operation.GENERATE, {"model": name, "stream": "true", "alt": "sse"})


def test_every_action_has_its_operation() -> None:
    whole = GOOGLE.route("POST", "/v1beta/models/m:generateContent", {}, {})
    array = GOOGLE.route("POST", "/v1beta/models/m:streamGenerateContent", {}, {})
    count = GOOGLE.route("POST", "/v1/models/m:countTokens", {}, {})
    assert whole == Route(Operation.GENERATE, {"model": "m", "stream": "false", "alt": "json"})
    assert array == Route(Operation.GENERATE, {"model": "m", "stream": "true", "alt": "json"})
    assert count is not None
    assert count.operation is Operation.COUNT


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1beta/models/m:embedContent"),
        ("POST", "/v1beta/models/m"),
        ("POST", "/v1beta/models"),
        ("GET", "/v1beta/models/m:generateContent/x/y:z/"),
        ("POST", "/v1beta/cachedContents"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1beta/files/x"),
        ("POST", "/models/m:generateContent"),
    ],
)
def test_no_other_path_is_a_generation(method: str, path: str) -> None:
    route = GOOGLE.route(method, path, {}, {})
    assert route is None or route.operation is Operation.MODEL


def test_models_are_google_s_under_v1beta_or_with_google_s_key() -> None:
    assert GOOGLE.route("GET", "/v1beta/models", {}, {}) == Route(Operation.MODELS)
    assert GOOGLE.route("GET", "/v1beta/models/org/x", {}, {}) == Route(Operation.MODEL, {"model": "org/x"})
    assert GOOGLE.route("GET", "/v1/models", {}, {"authorization": "Bearer k"}) is None
    assert GOOGLE.route("GET", "/v1/models", {"key": "k"}, {}) == Route(Operation.MODELS)
    assert GOOGLE.route("GET", "/v1/models", {}, {"x-goog-api-key": "k"}) == Route(Operation.MODELS)
    assert GOOGLE.models(["a/b"])["models"][0]["name"] == "models/a/b"


@pytest.mark.parametrize(
    ("headers", "query", "key"),
    [
        ({"x-goog-api-key": "k"}, {}, "k"),
        ({}, {"key": "k"}, "k"),
        ({"authorization": "Bearer k"}, {}, "k"),
        ({"x-goog-api-key": "k", "authorization": "Bearer other"}, {}, "k"),
        ({}, {}, None),
    ],
)
def test_key_in_header_or_query(headers: dict[str, str], query: dict[str, str], key: str | None) -> None:
    assert GOOGLE.key(headers, query) == key


# --- schemas and tools ----------------------------------------------------------------------------------------------


def test_b70_both_schema_forms() -> None:
    verbatim = {"type": "object", "properties": {"p": {"type": "string"}}, "required": ["p"]}
    openapi = {"type": "OBJECT", "properties": {"n": {"type": "ARRAY", "items": {"type": "STRING"}, "nullable": True}}}
    declarations = [
        {"name": "w", "parametersJsonSchema": verbatim},
        {"name": "o", "parameters": openapi},
        {"name": "z", "parametersJsonSchema": {}},
    ]
    assert parse(tools=[{"functionDeclarations": declarations}]).tools == (
        Tool("w", None, verbatim),
        Tool("o", None, {"type": "object", "properties": {"n": {"type": ["array", "null"], "items": {"type": "string"}}}}),
        Tool("z", None, {"type": "object", "properties": {}}),
    )


def test_b70_data_inside_a_schema_is_left_alone() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "enum": ["OBJECT", "STRING"], "default": "OBJECT", "example": {"type": "STRING", "nullable": True}},
            "many": {"anyOf": [{"type": "INTEGER"}, {"type": "TYPE_UNSPECIFIED", "description": "d"}], "minItems": "3"},
        },
        "propertyOrdering": ["type"],
    }
    assert parse(tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}]).tools[0].parameters == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "enum": ["OBJECT", "STRING"], "default": "OBJECT", "example": {"type": "STRING", "nullable": True}},
            "many": {"anyOf": [{"type": "integer"}, {"description": "d"}], "minItems": 3},
        },
    }


def test_snake_case_is_read_everywhere() -> None:
    camel = {
        "systemInstruction": {"parts": [{"text": "S"}]},
        "tools": [
            {"functionDeclarations": [{"name": "f", "parameters": {"type": "ARRAY", "minItems": "1", "anyOf": [{"type": "STRING"}]}}]}
        ],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["f"]}},
        "generationConfig": {
            "maxOutputTokens": 5,
            "topK": 3,
            "stopSequences": ["x"],
            "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 0},
            "responseMimeType": "application/json",
        },
        "contents": [
            USER,
            model({"functionCall": {"name": "f"}, "thoughtSignature": "s"}),
            user({"functionResponse": {"name": "f", "response": {}}}, {"inlineData": {"mimeType": "image/png", "data": "AA=="}}),
        ],
    }
    snake = {
        "system_instruction": {"parts": [{"text": "S"}]},
        "tools": [
            {"function_declarations": [{"name": "f", "parameters": {"type": "ARRAY", "min_items": "1", "any_of": [{"type": "STRING"}]}}]}
        ],
        "tool_config": {"function_calling_config": {"mode": "ANY", "allowed_function_names": ["f"]}},
        "generation_config": {
            "max_output_tokens": 5,
            "top_k": 3,
            "stop_sequences": ["x"],
            "thinking_config": {"include_thoughts": True, "thinking_budget": 0},
            "response_mime_type": "application/json",
        },
        "contents": [
            USER,
            model({"function_call": {"name": "f"}, "thought_signature": "s"}),
            user({"function_response": {"name": "f", "response": {}}}, {"inline_data": {"mime_type": "image/png", "data": "AA=="}}),
        ],
    }
    assert GOOGLE.parse(camel, ROUTE) == GOOGLE.parse(snake, ROUTE)


def test_hosted_tools_are_left_out() -> None:
    assert [
        tool.name for tool in parse(tools=[{"googleSearch": {}}, {"functionDeclarations": [{"name": "f"}]}, {"codeExecution": {}}]).tools
    ] == ["f"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"mode": "AUTO"}, ToolChoice("auto")),
        ({"mode": "VALIDATED"}, ToolChoice("auto")),
        ({"mode": "NONE"}, ToolChoice("none")),
        ({"mode": "ANY"}, ToolChoice("required")),
        ({"mode": "any", "allowedFunctionNames": ["f"]}, ToolChoice("named", "f")),
        ({"mode": "ANY", "allowedFunctionNames": ["f", "g"]}, ToolChoice("required")),
        ({}, ToolChoice("auto")),
    ],
)
def test_every_calling_mode(config: dict[str, Any], expected: ToolChoice) -> None:
    tools = [{"functionDeclarations": [{"name": "f"}, {"name": "g"}]}]
    assert parse(tools=tools, toolConfig={"functionCallingConfig": config}).tool_choice == expected


# --- contents -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "system",
    [
        {"systemInstruction": {"role": "system", "parts": [{"text": "A"}, {"text": "B"}]}},
        {"system_instruction": {"parts": [{"text": "A"}, {"text": "B"}]}},
        {"systemInstruction": {"parts": {"text": "A\nB"}}},
        {"systemInstruction": "A\nB"},
        {"systemInstruction": [{"text": "A"}, "B"]},
        {"systemInstruction": {"text": "A\nB"}},
    ],
)
def test_b71_every_spelling_of_the_system_instruction(system: dict[str, Any]) -> None:
    assert parse(**system).messages[0] == Message("system", "A\nB")


def test_b71_a_missing_role_is_the_user() -> None:
    assert history({"parts": [{"text": "hi"}]}) == (Message("user", "hi"),)


def test_b72_calls_and_responses_without_ids_pair_by_order() -> None:
    contents = [USER, model(call("w", {"c": "A"}), call("w", {"c": "B"})), user(response("w", {"r": 1}), response("w", {"r": 2}))]
    messages = history(*contents)
    ids = [each.id for each in messages[1].tool_calls]
    assert len(set(ids)) == 2
    assert [(each.tool_call_id, each.content) for each in messages[2:]] == [(ids[0], '{"r":1}'), (ids[1], '{"r":2}')]


def test_b72_made_ids_are_the_same_each_time_the_history_is_sent() -> None:
    first = [USER, model(call("w")), user(response("w", {"r": 1}))]
    later = [*first, model(call("w")), user(response("w", {"r": 2}))]
    assert history(*later)[: len(history(*first))] == history(*first)
    assert len({message.tool_call_id for message in history(*later) if message.role == "tool"}) == 2


def test_b72_ids_pair_out_of_order() -> None:
    messages = history(
        USER, model(call("w", id="a"), call("w", id="b")), user(response("w", {"r": 2}, id="b"), response("w", {"r": 1}, id="a"))
    )
    assert [message.tool_call_id for message in messages[2:]] == ["b", "a"]


def test_b72_an_id_that_no_call_has_pairs_by_name_and_is_kept_as_a_reference() -> None:
    tool = history(USER, model(call("v"), call("w")), user(response("w", {}, id="w_1700000000_0")))[2]
    assert tool == Message("tool", "", tool_call_id="gemini_call_1", name="w", refs=("w_1700000000_0",))


def test_a_call_that_was_never_answered_takes_no_later_response() -> None:
    messages = history(USER, model(call("w", id="old")), user({"text": "stop"}), model(call("w", id="new")), user(response("w", {"r": 1})))
    assert messages[-1].tool_call_id == "new"


def test_b74_every_part_is_read() -> None:
    messages = history(
        USER,
        model({"text": "plan", "thought": True}, {"text": "t"}, call("a"), call("b")),
        user(response("a", {"x": 1}), response("b", {"y": 2}), {"text": "also"}),
    )
    assert messages[1].thinking == (Thinking("plan"),)
    assert messages[1].content == "t"
    assert [each.name for each in messages[1].tool_calls] == ["a", "b"]
    assert [(message.role, message.content) for message in messages[2:]] == [("tool", '{"x":1}'), ("tool", '{"y":2}'), ("user", "also")]


def test_a_streamed_answer_echoed_chunk_by_chunk_is_one_message() -> None:
    messages = history(USER, model({"text": "a "}), model({"text": "b"}), model(call("f")), user(response("f", {})))
    assert [message.role for message in messages] == ["user", "assistant", "tool"]
    assert messages[1].content == "a b"
    assert len(messages[1].tool_calls) == 1


def test_signatures_are_kept_wherever_they_stand() -> None:
    parts = [
        {"text": "p", "thought": True, "thoughtSignature": "s1"},
        {"text": "t", "thoughtSignature": "s2"},
        {**call("f"), "thoughtSignature": "s3"},
    ]
    message = history(USER, model(*parts, {"text": "", "thoughtSignature": "s4"}))[1]
    assert message.thinking == (Thinking("p", "s1"),)
    assert message.refs == ("s1", "s2", "s3", "s4")
    assert message.content == "t"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"output": "o"}, "o"),
        ({"result": "o"}, "o"),
        ({"content": "o"}, "o"),
        ({"name": "f", "content": "o"}, "o"),
        ({"name": "other", "content": "o"}, '{"name":"other","content":"o"}'),
        ({"error": "e"}, '{"error":"e"}'),
        ({"output": 5}, '{"output":5}'),
        ({"output": "o", "exit": 0}, '{"output":"o","exit":0}'),
        ({}, ""),
    ],
)
def test_the_text_of_a_function_response(value: Any, text: str) -> None:
    assert history(USER, model(call("f")), user(response("f", value)))[2].content == text


def test_b17_images_inside_and_beside_a_function_response_arrive() -> None:
    png = {"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}}
    image = Image("data:image/png;base64,iVBORw0KGgo=")
    messages = history(USER, model(call("f")), user(response("f", {"output": "shot"}, parts=[png]), png))
    assert messages[2].content == (Text("shot"), image)
    assert messages[3] == Message("user", (image,))


@pytest.mark.parametrize(("data", "standard"), [("-_-_", "+/+/"), ("-_8", "+/8="), ("+/8=", "+/8=")])
def test_base64_in_either_alphabet_and_unpadded_becomes_the_standard_one(data: str, standard: str) -> None:
    part = {"inlineData": {"mimeType": "IMAGE/PNG", "data": data}}
    assert history(user(part))[0].content == (Image(f"data:image/png;base64,{standard}"),)


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"inlineData": {"mimeType": "text/plain", "data": "aGk="}}, "hi"),
        ({"inlineData": {"mimeType": "application/json; charset=utf-8", "data": "aGk"}}, "hi"),
        ({"inlineData": {"mimeType": "audio/mp3", "data": "AAAA"}}, "[audio/mp3 data: this model cannot read it]"),
        (
            {"fileData": {"mimeType": "application/pdf", "fileUri": "gs://b/f"}},
            "[file gs://b/f (application/pdf): this model cannot read it]",
        ),
        ({"executableCode": {"language": "PYTHON", "code": "1"}}, "```python\n1\n```"),
        ({"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "1"}}, "```\n1\n```"),
    ],
)
def test_other_parts_are_text_or_a_placeholder_that_names_them(part: dict[str, Any], expected: str) -> None:
    assert history(user(part))[0].content == expected


def test_files_that_are_images_are_images() -> None:
    part = {"fileData": {"mimeType": "image/png", "fileUri": "https://x/y.png"}}
    assert history(user(part))[0].content == (Image("https://x/y.png"),)


@pytest.mark.parametrize(
    ("contents", "param"),
    [
        ("x", "contents"),
        ([], "contents"),
        (None, "contents"),
        ([None], "contents[0]"),
        ([{"role": "robot", "parts": []}], "contents[0].role"),
        ([{"parts": "x"}], "contents[0].parts"),
        ([{"parts": [5]}], "contents[0].parts[0]"),
        ([user({"text": 5})], "contents[0].parts[0].text"),
        ([user(call("f"))], "contents[0].parts[0].functionCall"),
        ([model({"functionCall": {"args": {}}})], "contents[0].parts[0].functionCall.name"),
        ([model({"functionCall": {"name": "f", "args": "x"}})], "contents[0].parts[0].functionCall.args"),
        ([user({"functionResponse": {"name": "f", "response": "x"}})], "contents[0].parts[0].functionResponse.response"),
    ],
)
def test_b90_wrong_contents_name_their_field(contents: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GOOGLE.parse({"contents": contents}, ROUTE)
    assert caught.value.param == param


# --- configuration --------------------------------------------------------------------------------------------------


def test_the_whole_generation_config() -> None:
    request = parse(
        generationConfig={
            "temperature": 0.5,
            "topP": 0.9,
            "topK": 64.0,
            "maxOutputTokens": 9,
            "stopSequences": ["a", "b"],
            "candidateCount": 2,
            "seed": 3,
            "presencePenalty": 0.1,
            "frequencyPenalty": 0.2,
            "responseLogprobs": True,
            "logprobs": 4,
        }
    )
    assert request.sampling.as_dict() == {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 64,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "seed": 3,
        "stop": ["a", "b"],
    }
    assert (request.n, request.top_logprobs, request.model, request.stream) == (2, 4, "m", True)


def test_numbers_may_be_strings_as_proto_json_has_them() -> None:
    written = {"temperature": "0.5", "top_k": "64", "maxOutputTokens": "1e2", "seed": "-3", "thinkingConfig": {"thinkingBudget": "0"}}
    request = parse(generationConfig=written)
    assert request.sampling.as_dict() == {"temperature": 0.5, "top_k": 64, "max_tokens": 100, "seed": -3}
    assert request.thinking is False


@pytest.mark.parametrize("value", ["", "x", "true", "null", "NaN", "[1]", "1 2"])
def test_a_string_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest, match="maxOutputTokens: must be an integer, not a string"):
        parse(generationConfig={"maxOutputTokens": value})


@pytest.mark.parametrize(
    ("config", "thinking", "effort", "shown"),
    [
        ({}, None, None, False),
        ({"thinkingBudget": 0}, False, None, False),
        ({"thinkingBudget": -1, "includeThoughts": True}, None, None, True),
        ({"thinkingBudget": 512}, True, None, False),
        ({"thinkingLevel": "HIGH", "includeThoughts": True}, None, "high", True),
    ],
)
def test_b34_thinking_config(config: dict[str, Any], thinking: bool | None, effort: str | None, shown: bool) -> None:
    request = parse(generationConfig={"thinkingConfig": config})
    assert (request.thinking, request.effort, request.options["include_thoughts"]) == (thinking, effort, shown)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"responseMimeType": "text/plain"}, None),
        ({"responseMimeType": "application/json"}, {"type": "json_object"}),
        (
            {"responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"}},
            {"type": "json_schema", "json_schema": {"name": "response", "schema": {"type": "object"}}},
        ),
        (
            {"responseMimeType": "application/json", "responseJsonSchema": {"type": "object", "x": "OBJECT"}},
            {"type": "json_schema", "json_schema": {"name": "response", "schema": {"type": "object", "x": "OBJECT"}}},
        ),
    ],
)
def test_b37_structured_output(config: dict[str, Any], expected: Any) -> None:
    assert parse(generationConfig=config).response_format == expected


def test_b78_a_count_reads_either_body() -> None:
    route = Route(Operation.COUNT, {"model": "m"})
    inner = {"model": "models/other", "systemInstruction": "S", "contents": [USER]}
    assert GOOGLE.parse({"generateContentRequest": inner}, route) == GOOGLE.parse(inner, route)
    assert GOOGLE.parse({"contents": [USER]}, route).messages == (Message("user", "x"),)


def test_safety_settings_and_unknown_fields_are_ignored() -> None:
    extra = {"safetySettings": [{"category": "X", "threshold": "Y"}], "labels": {"a": "b"}, "zzz": [1], "serviceTier": "x"}
    assert parse(**extra, generationConfig={"mediaResolution": "HIGH", "responseModalities": ["TEXT"]}) == parse()


def test_a_cached_content_is_refused_not_left_out() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(cachedContent="cachedContents/x")
    assert caught.value.param == "cachedContent"
