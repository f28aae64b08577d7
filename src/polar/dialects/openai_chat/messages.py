"""The messages of a Chat Completions body. `polar.dialects.openai_chat.request` says what was decided about them."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from polar.chat import Content, Image, JsonObject, Message, Part, Text, Thinking, ToolCall, join_parts
from polar.dialects.base import as_list, as_object, as_str, bad, json_text
from polar.dialects.openai_chat.reading import as_json, str_at

RAW_CALL = "call_raw_"
"""How the id of a freeform call begins whose arguments are no `{"input": string}`: its input is the arguments as they were sampled."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "reasoning_text")


def parse_messages(body: JsonObject) -> tuple[Message, ...]:
    """In their order. Raises `InvalidRequest` where there is none."""
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
    name = str_at(message, "name", param)
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
    refusal = str_at(message, "refusal", param)
    return Message("assistant", content or refusal or "", thinking=_reasoning(message, param), tool_calls=tuple(calls), name=name)


def _reasoning(message: JsonObject, param: str) -> tuple[Thinking, ...]:
    """One block: servers and clients disagree on the key, and those that send several repeat the same text in each."""
    texts = [str_at(message, key, param) for key in _REASONING_KEYS]
    text = next((text for text in texts if text), None)
    return () if text is None else (Thinking(text),)


def _tool_call(value: Any, default_id: str, param: str) -> ToolCall:
    item = as_object(value, param)
    call_id = str_at(item, "id", param) or default_id
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
        return ToolCall(call_id, name, as_json(payload, f"{param}.arguments"))
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
            return Text(f"[audio ({str_at(audio, 'format', param) or 'unknown format'}): this model cannot hear it]")
        case "audio_url" | "video_url":
            return Text(f"[{kind.removesuffix('_url')}: this model cannot read it]")
        case _:
            raise bad(f"unknown part type {kind!r}; use text, image_url, refusal, input_audio or file", f"{param}.type")


def _image(value: Any, param: str) -> Image:
    if isinstance(value, str):
        return Image(value)
    image = as_object(value, param)
    return Image(as_str(image.get("url"), f"{param}.url"), str_at(image, "detail", param))


def _file(file: JsonObject, param: str) -> Part:
    name = str_at(file, "filename", param) or str_at(file, "file_id", param) or "unnamed"
    data = str_at(file, "file_data", param) or ""
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
