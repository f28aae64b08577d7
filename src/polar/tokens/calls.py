"""One tool call's block, as the library split it up, to a name and the text of its arguments.

What a harness gets is what was written: the sampled text itself where the format is JSON, whole texts where it is not. Knows no ids and
no answer around the call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import orjson
from renderers import ToolCallParseStatus

from polar.chat import Tool


def read_call(attempt: Any, tools: Sequence[Tool] = ()) -> tuple[str, str] | None:
    """Name and arguments text of one parsed block, or `None` if a harness could not run it.

    The arguments are the very text that was sampled where the format is JSON. Names that no tool has, and values of a type that the tool
    does not take, are passed on: telling the model is the harness's business.
    """
    if attempt.status not in _READABLE:
        return None
    if not isinstance(attempt.name, str) or not attempt.name.strip() or any("\ud800" <= one <= "\udfff" for one in attempt.name):
        return None  # no name, or one with half of a surrogate pair, which nobody can write
    if isinstance(attempt.arguments, str):
        return (attempt.name, attempt.arguments) if is_object(attempt.arguments) else None
    if not isinstance(attempt.arguments, dict):
        return None
    text = _from_json(attempt.raw, attempt.arguments)
    if text is None:
        text = _from_values(attempt, tools)
    return (attempt.name, text) if text is not None and is_object(text) else None


_READABLE = (ToolCallParseStatus.OK, ToolCallParseStatus.UNKNOWN_TOOL, ToolCallParseStatus.INVALID_JSON)
"""The last, where there are arguments at all: in a format that writes values as text, one is not what its tool's schema says."""

_VALUE = re.compile(
    r'<parameter(?:=| name=")([^<">]+)"?>\n?(.*?)\n?</parameter>|<arg_key(?::\w+)?>([^<]*)</arg_key(?::\w+)?>\s*'
    r"<arg_value(?::\w+)?>(.*?)</arg_value(?::\w+)?>",
    re.DOTALL,
)
"""Qwen's and MiniMax's form, and GLM's; Hy3's is GLM's with a word in its marks."""
_CALL = re.compile(r'<function=[^<>]+>\s*(?:</function>)?|(?:<invoke name="[^<>]+">\s*</invoke>\s*)+')
"""What is left of a block in Qwen's form, or in MiniMax's, without its values."""
_MARK = re.compile(r"</?(?:parameter|arg_key|arg_value)\b")
"""What is left of a value that was not read as one."""
_SEPARATOR = re.compile(r"<tool_sep[^<>]*>")
_MARKUP = re.compile(r"</?(?:function|invoke|parameter|arg_key|arg_value)\b")


def _from_json(raw: str, arguments: dict[str, Any]) -> str | None:
    """The text of the arguments in a block that has them as JSON: after a name (Kimi, DeepSeek V3) or alone (harmony), where a key
    `arguments` is one of the tool's own, else under a key; `None` for other blocks."""
    start = raw.find("{")
    if start < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(raw, start)
    except (ValueError, RecursionError):
        return None
    if _MARKUP.search(raw[:start] + raw[end:]):  # it stands in a block of another form
        return None
    if value == arguments:
        return raw[start:end]
    text = sampled_arguments(raw)
    if text is None and not raw[:start].strip() and arguments in value.values():
        return json.dumps(arguments, ensure_ascii=False)
    return text


def _from_values(attempt: Any, tools: Sequence[Tool]) -> str | None:
    """The arguments of a block that has no JSON around them; `None` if it holds what the library left out, or mixed up, as it made no
    sense of it: a value without its end, a second function."""
    opening = attempt.raw.lstrip()
    if opening.startswith(("call:", "<｜DSML｜")):  # Gemma 4's and DeepSeek V4's, of which it leaves nothing out
        return json.dumps(attempt.arguments, ensure_ascii=False)
    written: list[tuple[str, str]] = []

    def take(found: re.Match[str]) -> str:
        name, value, key, other = found.groups()
        written.append(((name or key).strip(), other if name is None else value))
        return ""

    rest = _VALUE.sub(take, attempt.raw).strip()
    if not _is_whole(attempt, rest, [value for _, value in written]):
        return None
    tool = next((tool for tool in tools if tool.name == attempt.name), None)
    return json.dumps(_as_written(attempt.arguments, written, tool), ensure_ascii=False)


def _is_whole(attempt: Any, rest: str, values: Sequence[str]) -> bool:
    """Whether all of a block is in its call: `rest` is what the block is without its `values`."""
    opening = attempt.raw.lstrip()
    if _MARK.search(rest):
        return False
    if opening.startswith(attempt.name):  # GLM's form
        return not values or _SEPARATOR.sub("", rest).strip() == attempt.name
    if opening.startswith("<invoke ") and any("</invoke>" in value for value in values):  # the library ends the call there
        return False
    return _CALL.fullmatch(rest) is not None or not ("<function=" in attempt.raw or "<invoke name=" in attempt.raw)


def _as_written(arguments: dict[str, Any], written: list[tuple[str, str]], tool: Tool | None) -> dict[str, Any]:
    """The arguments with their texts as they were written, where a format is not JSON. The library takes the whitespace around them off:
    an edit of an indented line would be another one; and it makes a number of a text of digits if the tool takes null there, too.
    Templates write a text as it is, Qwen's between two newlines of its own. What was written may be of other calls, too: MiniMax has all
    of an answer in one block."""
    properties = {} if tool is None else tool.parameters.get("properties")
    schemas = properties if isinstance(properties, dict) else {}
    whole = dict(arguments)
    for name, text in written:
        if name in arguments and _is_text(arguments[name], text, schemas.get(name)):
            whole[name] = text
    return whole


def _is_text(value: Any, text: str, schema: Any) -> bool:
    """Whether what was read as `value` is the text itself."""
    if isinstance(value, str):
        return text.strip() == value
    types = _types(schema)
    return "string" in types and types.isdisjoint(_TYPES.get(type(value), ())) and _is_json_of(text, value)


def _is_json_of(text: str, value: Any) -> bool:
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return False


_TYPES = {
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    type(None): ("null",),
    dict: ("object",),
    list: ("array",),
}


def _types(schema: Any) -> set[str]:
    """The types that a schema names, those of its alternatives among them."""
    if not isinstance(schema, dict):
        return set()
    named = schema.get("type")
    types = {one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)}
    for key in ("anyOf", "oneOf"):
        if isinstance(branches := schema.get(key), list):
            types = types.union(*(_types(branch) for branch in branches))
    return types


def sampled_arguments(raw: str) -> str | None:
    """The text of the value of `arguments` in a JSON object's text, untouched; `None` if `raw` is none or lacks the key."""
    decoder = json.JSONDecoder()
    found: str | None = None
    try:
        at = _skip(raw, 0)
        if raw[at : at + 1] != "{":
            return None
        at = _skip(raw, at + 1)
        while raw[at : at + 1] == '"':
            key, at = decoder.raw_decode(raw, at)
            at = _skip(raw, at)
            if raw[at : at + 1] != ":":
                return None
            start = _skip(raw, at + 1)
            _, end = decoder.raw_decode(raw, start)
            if key == "arguments":
                found = raw[start:end]
            at = _skip(raw, end)
            if raw[at : at + 1] == ",":
                at = _skip(raw, at + 1)
    except (ValueError, RecursionError):
        return None
    return found


def is_object(text: str) -> bool:
    """Whether every JSON parser reads it as an object: no NaN and no half of a surrogate pair, which Python's own takes."""
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _skip(raw: str, at: int) -> int:
    while at < len(raw) and raw[at] in " \t\r\n":
        at += 1
    return at
