"""A Chat Completions body as a canonical request. Raises `InvalidRequest` and nothing else.

Decisions, where the protocol leaves a choice or a self-hosted model cannot follow it:

* `content` null, `""` and missing are one and the same: empty text.
* Text parts of one message are joined by a newline.
* Audio, video, and files that are neither image nor text, become a placeholder that names them: the model is told, never silently cut off.
* `functions`/`function_call` become tools; the calls of such a history get ids made from their position.
* A hosted tool that only OpenAI can run is left out of the tools; a choice that names it falls back to `auto`.
* `n`, `stop`, `max_completion_tokens` and the sampling parameters of vLLM (`top_k`, `min_p`, ...) are taken as written.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from polar.chat import (
    ChatRequest,
    Content,
    Image,
    JsonObject,
    Message,
    Part,
    Sampling,
    Text,
    Thinking,
    Tool,
    ToolCall,
    ToolChoice,
    join_parts,
)
from polar.dialects.base import as_list, as_object, as_str, bad, json_text, optional_bool, optional_float, optional_int, optional_str

CUSTOM_PARAMETERS: JsonObject = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
"""What the model sees of a freeform (`custom`) tool: one string."""

RAW_CALL = "call_raw_"
"""How the id of a freeform call begins whose arguments are no `{"input": string}`: its input is the arguments as they were sampled."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "reasoning_text")


def parse_request(body: JsonObject) -> ChatRequest:
    """See the module's docstring. `options` may hold `include_usage` and `legacy_functions`, both true where they stand."""
    tools, dropped, legacy = _tools(body)
    stream = optional_bool(body, "stream") or False
    options: JsonObject = {}
    if stream and _object(body, "stream_options") and optional_bool(body["stream_options"], "include_usage"):
        options["include_usage"] = True
    if legacy:
        options["legacy_functions"] = True
    thinking, effort = _thinking(body)
    return ChatRequest(
        model=optional_str(body, "model") or "",
        messages=_messages(body),
        tools=tools,
        tool_choice=_tool_choice(body, tools, dropped, legacy),
        parallel_tool_calls=False if legacy else optional_bool(body, "parallel_tool_calls"),
        sampling=_sampling(body),
        thinking=thinking,
        effort=effort,
        response_format=_response_format(body),
        stream=stream,
        n=optional_int(body, "n", minimum=1, maximum=128) or 1,
        top_logprobs=_top_logprobs(body),
        options=options,
    )


# --- messages -------------------------------------------------------------------------------------------------------


def _messages(body: JsonObject) -> tuple[Message, ...]:
    values = as_list(body.get("messages"), "messages")
    if not values:
        raise bad("must hold at least one message", "messages")
    open_functions: dict[str, str] = {}
    return tuple(_message(value, index, open_functions) for index, value in enumerate(values))


def _message(value: Any, index: int, open_functions: dict[str, str]) -> Message:
    """`open_functions` maps the name of each legacy call that awaits its result to the id that the call was given."""
    param = f"messages[{index}]"
    message = as_object(value, param)
    role = as_str(message.get("role"), f"{param}.role")
    name = _optional_str(message, "name", param)
    content = _content(message.get("content"), f"{param}.content")
    match role:
        case "system" | "developer":
            return Message("system", content, name=name)
        case "user":
            return Message("user", content, name=name)
        case "tool":
            return Message("tool", content, tool_call_id=as_str(message.get("tool_call_id"), f"{param}.tool_call_id"), name=name)
        case "function":
            function = as_str(message.get("name"), f"{param}.name")
            return Message("tool", content, tool_call_id=open_functions.pop(function, f"call_function_{index}"), name=function)
        case "assistant":
            return _assistant(message, param, content, name, index, open_functions)
        case _:
            raise bad(f"must be system, developer, user, assistant, tool or function, not {role!r}", f"{param}.role")


def _assistant(message: JsonObject, param: str, content: Content, name: str | None, index: int, open_functions: dict[str, str]) -> Message:
    calls: list[ToolCall] = []
    if (legacy := message.get("function_call")) is not None:
        function = as_object(legacy, f"{param}.function_call")
        call = _call(f"call_function_{index}", function, "arguments", f"{param}.function_call")
        open_functions[call.name] = call.id
        calls.append(call)
    if (listed := message.get("tool_calls")) is not None:
        calls.extend(
            _tool_call(item, f"call_{index}_{position}", f"{param}.tool_calls[{position}]")
            for position, item in enumerate(as_list(listed, f"{param}.tool_calls"))
        )
    refusal = _optional_str(message, "refusal", param)
    return Message("assistant", content or refusal or "", thinking=_reasoning(message, param), tool_calls=tuple(calls), name=name)


def _reasoning(message: JsonObject, param: str) -> tuple[Thinking, ...]:
    """One block: servers and clients disagree on the key, and those that send several repeat the same text in each."""
    texts = [_optional_str(message, key, param) for key in _REASONING_KEYS]
    text = next((text for text in texts if text), None)
    return () if text is None else (Thinking(text),)


def _tool_call(value: Any, default_id: str, param: str) -> ToolCall:
    item = as_object(value, param)
    call_id = _optional_str(item, "id", param) or default_id
    if item.get("type") == "custom" or ("custom" in item and "function" not in item):
        return _call(call_id, as_object(item.get("custom"), f"{param}.custom"), "input", f"{param}.custom")
    return _call(call_id, as_object(item.get("function"), f"{param}.function"), "arguments", f"{param}.function")


def _call(call_id: str, value: JsonObject, key: str, param: str) -> ToolCall:
    name = as_str(value.get("name"), f"{param}.name")
    payload = value.get(key)
    if key == "input":
        text = as_str(payload, f"{param}.input")
        return ToolCall(call_id, name, text if call_id.startswith(RAW_CALL) else json_text({"input": text}))
    if payload is None:
        return ToolCall(call_id, name, "{}")
    if isinstance(payload, dict):
        return ToolCall(call_id, name, _json(payload, f"{param}.arguments"))
    return ToolCall(call_id, name, as_str(payload, f"{param}.arguments"))


def _content(value: Any, param: str) -> Content:
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        raise bad("must be a string or an array of parts", param)
    parts = [_part(item, f"{param}[{index}]") for index, item in enumerate(value)]
    return join_parts(part for part in parts if part != Text(""))


def _part(value: Any, param: str) -> Part:
    if isinstance(value, str):
        return Text(value)
    part = as_object(value, param)
    kind = as_str(part.get("type"), f"{param}.type")
    match kind:
        case "text" | "input_text" | "output_text":
            return Text(as_str(part.get("text"), f"{param}.text"))
        case "refusal":
            return Text(as_str(part.get("refusal"), f"{param}.refusal"))
        case "image_url":
            return _image(part.get("image_url"), f"{param}.image_url")
        case "file":
            return _file(as_object(part.get("file"), f"{param}.file"), f"{param}.file")
        case "input_audio":
            audio = as_object(part.get("input_audio"), f"{param}.input_audio")
            return Text(f"[audio ({_optional_str(audio, 'format', param) or 'unknown format'}): this model cannot hear it]")
        case "audio_url" | "video_url":
            return Text(f"[{kind.removesuffix('_url')}: this model cannot read it]")
        case _:
            raise bad(f"unknown part type {kind!r}; use text, image_url, refusal, input_audio or file", f"{param}.type")


def _image(value: Any, param: str) -> Image:
    if isinstance(value, str):
        return Image(value)
    image = as_object(value, param)
    return Image(as_str(image.get("url"), f"{param}.url"), _optional_str(image, "detail", param))


def _file(file: JsonObject, param: str) -> Part:
    name = _optional_str(file, "filename", param) or _optional_str(file, "file_id", param) or "unnamed"
    data = _optional_str(file, "file_data", param) or ""
    head, _, payload = data.partition(",")
    media_type = head.removeprefix("data:").partition(";")[0]
    if media_type.startswith("image/"):
        return Image(data)
    if media_type.startswith("text/") and head.endswith(";base64"):
        try:
            return Text(base64.b64decode(payload, validate=True).decode(errors="replace"))
        except binascii.Error as error:
            raise bad("is not valid base64", f"{param}.file_data") from error
    return Text(f"[file {name} ({media_type or 'unknown type'}): this model cannot read it]")


# --- tools ----------------------------------------------------------------------------------------------------------


def _tools(body: JsonObject) -> tuple[tuple[Tool, ...], frozenset[str], bool]:
    """The tools, the types of those left out, and whether they came as legacy functions."""
    listed = _list(body, "tools")
    functions = _list(body, "functions")
    if functions and listed:
        raise bad("deprecated; use tools or functions, not both", "functions")
    tools: dict[str, Tool] = {}
    dropped: set[str] = set()
    for index, value in enumerate(functions):
        _add(tools, _function(value, f"functions[{index}]"), f"functions[{index}].name")
    for index, value in enumerate(listed):
        param = f"tools[{index}]"
        item = as_object(value, param)
        kind = _optional_str(item, "type", param) or "function"
        if kind == "function":
            _add(tools, _function(item.get("function"), f"{param}.function"), f"{param}.function.name")
        elif kind == "custom":
            _add(tools, _custom(item.get("custom"), f"{param}.custom"), f"{param}.custom.name")
        else:
            dropped.add(kind)
    return tuple(tools.values()), frozenset(dropped), bool(functions)


def _add(tools: dict[str, Tool], tool: Tool, param: str) -> None:
    if tools.setdefault(tool.name, tool) != tool:
        raise bad(f"two different tools are called {tool.name!r}", param)


def _function(value: Any, param: str) -> Tool:
    function = as_object(value, param)
    name = as_str(function.get("name"), f"{param}.name")
    description = _optional_str(function, "description", param)
    parameters = function.get("parameters")
    if not parameters and not isinstance(parameters, list | str):
        return Tool(name, description)
    parameters = as_object(parameters, f"{param}.parameters")
    _json(parameters, f"{param}.parameters")
    return Tool(name, description, parameters)


def _custom(value: Any, param: str) -> Tool:
    custom = as_object(value, param)
    description = _optional_str(custom, "description", param)
    layout = _object(custom, "format", param)
    grammar = _object(layout, "grammar", f"{param}.format") or layout
    definition = _optional_str(grammar, "definition", f"{param}.format")
    if definition:
        syntax = _optional_str(grammar, "syntax", f"{param}.format") or "lark"
        description = f"{description or ''}\n\nThe input must follow this {syntax} grammar:\n{definition}".strip()
    return Tool(as_str(custom.get("name"), f"{param}.name"), description, CUSTOM_PARAMETERS, kind="custom")


def _tool_choice(body: JsonObject, tools: tuple[Tool, ...], dropped: frozenset[str], legacy: bool) -> ToolChoice:
    key = "function_call" if legacy else "tool_choice"
    value = body.get(key)
    if value is None:
        return ToolChoice()
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise bad(f"must be auto, none, required or an object that names a tool, not {value!r}", key)
        choice = ToolChoice("auto" if value == "auto" else "none" if value == "none" else "required")
    else:
        choice = _named_choice(as_object(value, key), key, legacy)
    if choice.mode in ("auto", "none") or choice.name in {tool.name for tool in tools} or (tools and choice.mode == "required"):
        return choice
    if dropped:
        return ToolChoice()
    raise bad("is only allowed with tools" if choice.name is None else f"no tool is called {choice.name!r}", key)


def _named_choice(value: JsonObject, key: str, legacy: bool) -> ToolChoice:
    if legacy:
        return ToolChoice("named", as_str(value.get("name"), f"{key}.name"))
    kind = as_str(value.get("type"), f"{key}.type")
    if kind in ("function", "custom"):
        return ToolChoice("named", as_str(as_object(value.get(kind), f"{key}.{kind}").get("name"), f"{key}.{kind}.name"))
    if kind == "allowed_tools":
        allowed = as_object(value.get(kind), f"{key}.{kind}")
        mode = as_str(allowed.get("mode"), f"{key}.{kind}.mode")
        names = [_allowed_name(item, f"{key}.{kind}.tools") for item in as_list(allowed.get("tools"), f"{key}.{kind}.tools")]
        if mode not in ("auto", "required"):
            raise bad(f"must be auto or required, not {mode!r}", f"{key}.{kind}.mode")
        if mode == "auto":
            return ToolChoice()
        return ToolChoice("named", names[0]) if len(names) == 1 else ToolChoice("required")
    return ToolChoice("named", kind)


def _allowed_name(value: Any, param: str) -> str:
    item = as_object(value, param)
    kind = as_str(item.get("type"), f"{param}.type")
    inner = item.get(kind)
    return as_str(as_object(inner, param).get("name"), f"{param}.name") if inner is not None else kind


# --- parameters -----------------------------------------------------------------------------------------------------


def _sampling(body: JsonObject) -> Sampling:
    max_tokens = optional_int(body, "max_completion_tokens", minimum=1)
    if max_tokens is None:
        max_tokens = optional_int(body, "max_tokens", minimum=1)
    top_k = optional_int(body, "top_k", minimum=-1)
    return Sampling(
        max_tokens=max_tokens,
        temperature=optional_float(body, "temperature", minimum=0, maximum=2),
        top_p=optional_float(body, "top_p", minimum=0, maximum=1),
        top_k=top_k if top_k and top_k > 0 else None,
        min_p=optional_float(body, "min_p", minimum=0, maximum=1),
        presence_penalty=optional_float(body, "presence_penalty", minimum=-2, maximum=2),
        frequency_penalty=optional_float(body, "frequency_penalty", minimum=-2, maximum=2),
        repetition_penalty=optional_float(body, "repetition_penalty", minimum=0, maximum=1000),
        seed=optional_int(body, "seed"),
        stop=_stop(body.get("stop")),
        logit_bias=_logit_bias(body),
    )


def _stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    values = [value] if isinstance(value, str) else as_list(value, "stop")
    stops = tuple(as_str(item, f"stop[{index}]") for index, item in enumerate(values))
    if "" in stops:
        raise bad("a stop sequence must not be empty", "stop")
    return stops


def _logit_bias(body: JsonObject) -> Mapping[str, float] | None:
    bias = {f"logit_bias.{token}": value for token, value in _object(body, "logit_bias").items()}
    values = {name.removeprefix("logit_bias."): optional_float(bias, name, minimum=-100, maximum=100) for name in bias}
    return {token: value for token, value in values.items() if value is not None} or None


def _top_logprobs(body: JsonObject) -> int | None:
    asked = optional_bool(body, "logprobs")
    top = optional_int(body, "top_logprobs", minimum=0, maximum=20)
    if asked:
        return top or 0
    if top:
        raise bad("needs logprobs to be true", "top_logprobs")
    return None


def _response_format(body: JsonObject) -> JsonObject | None:
    layout = _object(body, "response_format")
    if not layout:
        return None
    kind = as_str(layout.get("type"), "response_format.type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": kind}
    if kind != "json_schema":
        raise bad(f"must be text, json_object or json_schema, not {kind!r}", "response_format.type")
    param = "response_format.json_schema"
    value = as_object(layout.get(kind), param)
    schema = _object(value, "schema", param)
    _json(schema, f"{param}.schema")
    result: JsonObject = {"name": _optional_str(value, "name", param) or "response", "schema": schema}
    if (strict := optional_bool(value, "strict")) is not None:
        result["strict"] = strict
    return {"type": kind, kind: result}


def _thinking(body: JsonObject) -> tuple[bool | None, str | None]:
    """The switch and the effort. The most explicit spelling wins: template argument, `enable_thinking`, `thinking`, effort."""
    reasoning = body["reasoning"] if isinstance(body.get("reasoning"), dict) else {}
    effort = optional_str(body, "reasoning_effort") or _optional_str(reasoning, "effort", "reasoning")
    arguments = _object(body, "chat_template_kwargs")
    switches: Iterable[bool | None] = (
        optional_bool(arguments, "enable_thinking"),
        optional_bool(arguments, "thinking"),
        optional_bool(body, "enable_thinking"),
        _thinking_type(body.get("thinking")),
        optional_bool(reasoning, "enabled"),
        False if effort == "none" else None,
    )
    return next((switch for switch in switches if switch is not None), None), None if effort == "none" else effort


def _thinking_type(value: Any) -> bool | None:
    """`{"type": "enabled" | "disabled"}`, as several compatible servers spell it, or a plain boolean."""
    if value is None or isinstance(value, bool):
        return value
    kind = _optional_str(as_object(value, "thinking"), "type", "thinking")
    return {"enabled": True, "disabled": False}.get(kind or "")


# --- reading --------------------------------------------------------------------------------------------------------


def _object(body: Mapping[str, Any], key: str, param: str = "") -> JsonObject:
    value = body.get(key)
    return {} if value is None else as_object(value, f"{param}.{key}" if param else key)


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key)
    return [] if value is None else as_list(value, key)


def _optional_str(value: Mapping[str, Any], key: str, param: str) -> str | None:
    text = value.get(key)
    return None if text is None else as_str(text, f"{param}.{key}")


def _json(value: Any, param: str) -> str:
    """JSON text; a value that cannot be written (nested beyond what JSON writers take) is the caller's mistake."""
    try:
        return json_text(value)
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise bad(f"cannot be written as JSON ({error})", param) from error
