"""A `generateContent` or `countTokens` body as a canonical request. Raises `InvalidRequest` and nothing else.

Every field is read in camelCase and in snake_case, every number also where it is written as a string, as proto JSON has both
(https://protobuf.dev/programming-guides/json). Safety settings, hosted tools (search, code execution, ...) and output
modalities are set aside: a self-hosted model has none of them. Messages are read in `contents`.

`allowedFunctionNames` with mode ANY: one name forces that tool; with several, any tool may be called, since leaving the
others out would change the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import orjson

from polar.chat import ChatRequest, JsonObject, Sampling, Tool, ToolChoice
from polar.dialects.base import Operation, Route, as_list, as_object, as_str, bad, optional_bool, optional_float, optional_int, optional_str
from polar.dialects.google.contents import Fields, fields, messages, plural
from polar.dialects.google.schema import check_depth, json_schema

_NUMBERS = (
    "temperature",
    "topP",
    "topK",
    "maxOutputTokens",
    "candidateCount",
    "seed",
    "presencePenalty",
    "frequencyPenalty",
    "logprobs",
    "thinkingBudget",
)
_CONFIG = (
    *_NUMBERS[:-1],
    "stopSequences",
    "responseLogprobs",
    "responseMimeType",
    "responseSchema",
    "responseJsonSchema",
    "thinkingConfig",
)


def parse_request(body: JsonObject, route: Route) -> ChatRequest:
    """See the module's docstring. `options` holds `alt` (`sse` or `json`) and `include_thoughts`."""
    if route.operation is Operation.COUNT:
        inner = fields(body, "", "generateContentRequest").get("generateContentRequest")
        body = body if inner is None else as_object(inner, "generateContentRequest")
    request = fields(body, "", "contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "cachedContent")
    if request.get("cachedContent"):
        raise bad("cached contents are not kept here; send the contents themselves", "cachedContent")
    config = _numbers(fields(request.get("generationConfig", {}), "generationConfig", *_CONFIG))
    thinking_config = _numbers(
        fields(config.get("thinkingConfig", {}), "thinkingConfig", "includeThoughts", "thinkingBudget", "thinkingLevel")
    )
    thinking, effort = _thinking(thinking_config)
    tools = _tools(request.get("tools"))
    return ChatRequest(
        model=route.params.get("model", ""),
        messages=messages(request.get("systemInstruction"), request.get("contents")),
        tools=tools,
        tool_choice=_tool_choice(request.get("toolConfig", {}), tools),
        sampling=_sampling(config),
        thinking=thinking,
        effort=effort,
        response_format=_response_format(config),
        stream=route.params.get("stream") == "true",
        n=optional_int(config, "candidateCount", minimum=1, maximum=8) or 1,
        top_logprobs=_top_logprobs(config),
        options={
            "alt": route.params.get("alt", "json"),
            "include_thoughts": optional_bool(thinking_config, "includeThoughts") or False,
        },
    )


def _numbers(config: Fields) -> Fields:
    return {name: _number(value) if name in _NUMBERS else value for name, value in config.items()}


def _number(value: Any) -> Any:
    """The number that a string holds; anything else as it is, for whoever reads it to take or refuse."""
    if not isinstance(value, str):
        return value
    try:
        number = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return number if type(number) in (int, float) else value


def _tools(value: Any) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for index, item in enumerate(plural(value, "tools")):
        declared = fields(item, f"tools[{index}]", "functionDeclarations").get("functionDeclarations")
        for position, declaration in enumerate(plural(declared, f"tools[{index}].functionDeclarations")):
            param = f"tools[{index}].functionDeclarations[{position}]"
            tool = _tool(declaration, param)
            if tools.setdefault(tool.name, tool) != tool:
                raise bad(f"two different functions are called {tool.name!r}", f"{param}.name")
    return tuple(tools.values())


def _tool(value: Any, param: str) -> Tool:
    declaration = fields(value, param, "name", "description", "parameters", "parametersJsonSchema")
    name = as_str(declaration.get("name"), f"{param}.name")
    description = optional_str(declaration, "description")
    if schema := as_object(declaration.get("parametersJsonSchema", {}), f"{param}.parametersJsonSchema"):
        check_depth(schema, f"{param}.parametersJsonSchema")
        return Tool(name, description, schema)
    if declaration.get("parameters"):
        return Tool(name, description, json_schema(declaration["parameters"], f"{param}.parameters"))
    return Tool(name, description)


def _tool_choice(value: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    calling = fields(value, "toolConfig", "functionCallingConfig").get("functionCallingConfig", {})
    param = "toolConfig.functionCallingConfig"
    config = fields(calling, param, "mode", "allowedFunctionNames")
    mode = (optional_str(config, "mode") or "AUTO").upper()
    listed = as_list(config.get("allowedFunctionNames", []), f"{param}.allowedFunctionNames")
    allowed = [as_str(name, f"{param}.allowedFunctionNames") for name in listed]
    choices: dict[str, Literal["auto", "none", "required"]] = {
        "AUTO": "auto",
        "VALIDATED": "auto",
        "MODE_UNSPECIFIED": "auto",
        "NONE": "none",
        "ANY": "required",
    }
    if mode not in choices:
        raise bad(f"must be AUTO, ANY, NONE or VALIDATED, not {mode!r}", f"{param}.mode")
    if choices[mode] != "required":
        return ToolChoice(choices[mode])
    if not tools:
        raise bad("mode ANY needs function_declarations", param)
    if unknown := set(allowed) - {tool.name for tool in tools}:
        raise bad(f"no function is called {min(unknown)!r}", f"{param}.allowedFunctionNames")
    return ToolChoice("named", allowed[0]) if len(set(allowed)) == 1 else ToolChoice("required")


def _sampling(config: Fields) -> Sampling:
    top_k = optional_float(config, "topK", minimum=0, maximum=1_000_000)
    stops = as_list(config.get("stopSequences", []), "stopSequences")
    return Sampling(
        max_tokens=optional_int(config, "maxOutputTokens", minimum=1),
        temperature=optional_float(config, "temperature", minimum=0, maximum=2),
        top_p=optional_float(config, "topP", minimum=0, maximum=1),
        top_k=int(top_k) if top_k and top_k >= 1 else None,
        presence_penalty=optional_float(config, "presencePenalty", minimum=-2, maximum=2),
        frequency_penalty=optional_float(config, "frequencyPenalty", minimum=-2, maximum=2),
        seed=optional_int(config, "seed"),
        stop=tuple(stop for stop in (as_str(each, "stopSequences") for each in stops) if stop),
    )


def _top_logprobs(config: Fields) -> int | None:
    top = optional_int(config, "logprobs", minimum=0, maximum=20)
    return top or 0 if optional_bool(config, "responseLogprobs") else None


def _response_format(config: Mapping[str, Any]) -> JsonObject | None:
    """A schema asks for JSON even where no MIME type says so."""
    mime = (optional_str(config, "responseMimeType") or "").lower()
    schema: JsonObject | None = None
    if "responseJsonSchema" in config:
        schema = as_object(config["responseJsonSchema"], "responseJsonSchema")
        check_depth(schema, "responseJsonSchema")
    elif "responseSchema" in config:
        schema = json_schema(config["responseSchema"], "responseSchema")
    if mime not in ("", "text/plain", "application/json"):
        raise bad(f"must be text/plain or application/json, not {mime!r}", "responseMimeType")
    if schema:
        return {"type": "json_schema", "json_schema": {"name": "response", "schema": schema}}
    return {"type": "json_object"} if mime == "application/json" else None


def _thinking(config: Fields) -> tuple[bool | None, str | None]:
    """A budget of 0 turns thinking off, a positive one on, -1 (dynamic) leaves it to the model; a level is the effort."""
    budget = optional_int(config, "thinkingBudget", minimum=-1)
    level = (optional_str(config, "thinkingLevel") or "").lower()
    effort = None if level in ("", "thinking_level_unspecified") else level
    return (None if budget is None or budget < 0 else budget > 0), effort
