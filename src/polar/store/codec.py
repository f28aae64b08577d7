"""Canonical conversations as JSON, and JSON as bytes, without loss. Knows no database.

`loads(dumps(value)) == value` for every value made of dicts with `str` keys, lists, strings, numbers, booleans and `None`, including what
JSON has no form for: lone surrogates (a harness may send the half of a pair that it cut), non-finite floats and integers beyond 64 bits.
Nearly every value takes orjson's path. The rest is written by the standard library (which knows NaN and big integers) in UTF-8 with
surrogates let through, behind `_LENIENT`, a byte that no JSON text starts with; a pair of lone surrogates stays a pair.

Tuples inside such values come back as lists, as JSON has no tuples.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from polar.chat import Image, JsonObject, Message, Part, Text, Thinking, Tool, ToolCall

_LENIENT = b"\x1a"
_OPTIONS = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


def dumps(value: Any) -> bytes:
    """Compact JSON. Raises `TypeError` for what is not JSON (other objects, keys other than strings, nesting beyond Python's limit)."""
    try:
        raw = orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        return _LENIENT + _dumps_lenient(value)
    if b"null" in raw and _has_non_finite(value):  # orjson writes NaN and infinities as null
        return _LENIENT + _dumps_lenient(value)
    return raw


def loads(raw: bytes) -> Any:
    """The value that `dumps` wrote."""
    if raw.startswith(_LENIENT):
        return json.loads(raw[1:].decode("utf-8", "surrogatepass"))
    return orjson.loads(raw)


def _dumps_lenient(value: Any) -> bytes:
    try:
        _check_keys(value)
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    except RecursionError:
        raise TypeError("the value is nested too deeply to be stored as JSON") from None


def _check_keys(value: Any) -> None:
    """The standard library would turn other keys into strings without a word."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a JSON object's keys must be strings, not {type(key).__name__}")
            _check_keys(item)
    elif isinstance(value, list | tuple):
        for item in value:
            _check_keys(item)


def _has_non_finite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(_has_non_finite(item) for item in value.values())
    if isinstance(value, list | tuple):
        return any(_has_non_finite(item) for item in value)
    return False


# --- messages and tools: a field that has its default is left out ------------------------------------------------


def message_to_json(message: Message) -> JsonObject:
    data: JsonObject = {"role": message.role}
    if message.content != "":
        data["content"] = message.content if isinstance(message.content, str) else [_part_to_json(part) for part in message.content]
    if message.thinking:
        data["thinking"] = [_thinking_to_json(block) for block in message.thinking]
    if message.tool_calls:
        data["tool_calls"] = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        data["name"] = message.name
    if message.refs:
        data["refs"] = list(message.refs)
    return data


def message_from_json(data: JsonObject) -> Message:
    content: Any = data.get("content", "")
    return Message(
        role=data["role"],
        content=content if isinstance(content, str) else tuple(_part_from_json(part) for part in content),
        thinking=tuple(
            Thinking(block.get("text", ""), block.get("signature"), block.get("redacted", False)) for block in data.get("thinking", ())
        ),
        tool_calls=tuple(ToolCall(*call) for call in data.get("tool_calls", ())),
        tool_call_id=data.get("tool_call_id"),
        name=data.get("name"),
        refs=tuple(data.get("refs", ())),
    )


def messages_to_json(messages: Iterable[Message]) -> list[JsonObject]:
    """JSON objects, one a message; `messages_from_json` gives equal messages back."""
    return [message_to_json(message) for message in messages]


def messages_from_json(data: Iterable[JsonObject]) -> tuple[Message, ...]:
    return tuple(message_from_json(item) for item in data)


def tools_to_json(tools: Sequence[Tool]) -> list[JsonObject]:
    """JSON objects, one a tool, the keys of `parameters` in their own order (templates render them in it)."""
    return [_tool_to_json(tool) for tool in tools]


def tools_from_json(data: Iterable[JsonObject]) -> tuple[Tool, ...]:
    return tuple(Tool(**item) for item in data)


def _tool_to_json(tool: Tool) -> JsonObject:
    data: JsonObject = {"name": tool.name, "parameters": tool.parameters}
    if tool.description is not None:
        data["description"] = tool.description
    if tool.kind != "function":
        data["kind"] = tool.kind
    if tool.namespace is not None:
        data["namespace"] = tool.namespace
    if tool.wire_name is not None:
        data["wire_name"] = tool.wire_name
    return data


def _part_to_json(part: Part) -> JsonObject:
    if isinstance(part, Text):
        return {"text": part.text}
    return {"image": part.url} if part.detail is None else {"image": part.url, "detail": part.detail}


def _part_from_json(data: JsonObject) -> Part:
    return Text(data["text"]) if "text" in data else Image(data["image"], data.get("detail"))


def _thinking_to_json(block: Thinking) -> JsonObject:
    data: JsonObject = {}
    if block.text:
        data["text"] = block.text
    if block.signature is not None:
        data["signature"] = block.signature
    if block.redacted:
        data["redacted"] = True
    return data
