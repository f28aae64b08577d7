"""Anthropic content blocks to canonical text and images. Knows one message at a time and no roles but the caller's.

Decisions, stable because prompts depend on them:

* Text blocks of a user message, a tool result or a document are joined by a line break, those of an assistant message by nothing (they
  are runs of one answer), those of a system prompt by a blank line. Empty ones add nothing.
* `is_error` prefixes the result with `[Tool Error] `.
* What a text or vision model cannot read (a PDF, a file id, a block of an unknown type) becomes text in square brackets that says so.
* `cache_control`, `citations` and every field not named here are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from polar.chat import Image, JsonObject, Message, Part, Text, Thinking, ToolCall, join_parts
from polar.dialects.anthropic.tools import Toolbox, dump, parse_tool
from polar.dialects.base import as_list, as_object, as_str, bad, data_url, type_name

TOOL_ERROR = "[Tool Error]"

_BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(\n|\Z)", re.IGNORECASE)


def blocks(value: Any, path: str) -> Iterator[tuple[str, JsonObject, str]]:
    """The blocks of a content list as (type, block, path); a string counts as one text block."""
    if isinstance(value, str):
        yield "text", {"type": "text", "text": value}, path
        return
    if not isinstance(value, list):
        raise bad(f"must be a string or an array of content blocks, not {type_name(value)}", path)
    for index, item in enumerate(value):
        at = f"{path}.{index}"
        block = as_object(item, at)
        yield as_str(block.get("type"), f"{at}.type"), block, at


def system_text(value: Any) -> str:
    """The system prompt, without Claude Code's billing header, which differs from call to call (its block, or first line)."""
    texts = []
    for kind, block, path in blocks(value, "system"):
        if kind != "text":
            raise bad("a system prompt takes text blocks only", f"{path}.type")
        texts.append(_BILLING_HEADER.sub("", _text(block, path), count=1))
    return "\n\n".join(text for text in texts if text)


def instruction_text(value: Any, path: str, toolbox: Toolbox) -> str:
    """A system message in mid-conversation: its text, and the tools that it adds or takes away, as text."""
    texts = []
    for kind, block, at in blocks(value, path):
        match kind:
            case "text":
                texts.append(_text(block, at))
            case "tool_addition":
                texts.append(_addition(as_object(block.get("tool"), f"{at}.tool"), f"{at}.tool", toolbox))
            case "tool_removal":
                name = _tool_name(as_object(block.get("tool"), f"{at}.tool"), f"{at}.tool")
                texts.append(f"The tool {name} can no longer be called.")
            case _:
                texts.append(_placeholder(kind, block))
    return "\n\n".join(text for text in texts if text)


def user_blocks(value: Any, path: str, toolbox: Toolbox) -> tuple[list[Message], list[Part]]:
    """The tool messages of a user message, and everything else of it, images of its tool results included, in order."""
    results: list[Message] = []
    parts: list[Part] = []
    for kind, block, at in blocks(value, path):
        if kind == "tool_result":
            message, images = _tool_result(block, at, toolbox)
            results.append(message)
            parts.extend(images)
        elif kind in ("tool_use", "thinking", "redacted_thinking"):
            raise bad(f"a {kind} block belongs in an assistant message", f"{at}.type")
        else:
            parts.extend(_parts(kind, block, at, toolbox))
    return results, parts


def assistant_message(value: Any, path: str) -> Message:
    """An answer of the model as its harness echoes it: thinking, text and calls, each in order."""
    texts: list[str] = []
    thinking: list[Thinking] = []
    calls: list[ToolCall] = []
    for kind, block, at in blocks(value, path):
        match kind:
            case "text":
                texts.append(_text(block, at))
            case "thinking":
                thought = as_str(block.get("thinking", ""), f"{at}.thinking")
                signature = None if block.get("signature") is None else as_str(block["signature"], f"{at}.signature")
                thinking.append(Thinking(thought, signature or None))
            case "redacted_thinking":
                thinking.append(Thinking(signature=as_str(block.get("data"), f"{at}.data"), redacted=True))
            case "tool_use":
                name = as_str(block.get("name"), f"{at}.name")
                arguments = as_object(block.get("input"), f"{at}.input")
                calls.append(ToolCall(as_str(block.get("id"), f"{at}.id"), name, dump(arguments, f"{at}.input")))
            case "compaction":
                if block.get("content") is not None:
                    texts.append(as_str(block["content"], f"{at}.content"))
            case "tool_result":
                raise bad("a tool_result block belongs in a user message", f"{at}.type")
            case _:
                texts.append(_placeholder(kind, block))
    return Message("assistant", "".join(texts), tuple(thinking), tuple(calls))


def _tool_result(block: JsonObject, path: str, toolbox: Toolbox) -> tuple[Message, list[Image]]:
    """The tool message, which holds text only, and the images, which follow all tool messages of the turn."""
    parts: list[Part] = []
    if block.get("content") is not None:
        for kind, inner, at in blocks(block["content"], f"{path}.content"):
            parts.extend(_parts(kind, inner, at, toolbox))
    text = "\n".join(part.text for part in parts if isinstance(part, Text))
    failed = block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise bad(f"must be true or false, not {type_name(failed)}", f"{path}.is_error")
    if failed:
        text = f"{TOOL_ERROR} {text}" if text else TOOL_ERROR
    identifier = as_str(block.get("tool_use_id"), f"{path}.tool_use_id")
    return Message("tool", text, tool_call_id=identifier), [part for part in parts if isinstance(part, Image)]


def _parts(kind: str, block: JsonObject, path: str, toolbox: Toolbox) -> list[Part]:
    """The text and images of one block of a user message, a tool result or a document."""
    match kind:
        case "text":
            text = _text(block, path)
            return [Text(text)] if text else []
        case "image":
            return [_image(as_object(block.get("source"), f"{path}.source"), f"{path}.source")]
        case "document":
            return _document(block, path, toolbox)
        case "search_result":
            return _search_result(block, path)
        case "tool_reference":
            return [Text(toolbox.reference(as_str(block.get("tool_name"), f"{path}.tool_name")))]
    return [Text(_placeholder(kind, block))]


def _text(block: JsonObject, path: str) -> str:
    return as_str(block.get("text"), f"{path}.text")


def _image(source: JsonObject, path: str) -> Part:
    match as_str(source.get("type"), f"{path}.type"):
        case "base64":
            media_type = as_str(source.get("media_type"), f"{path}.media_type")
            return Image(data_url(media_type, as_str(source.get("data"), f"{path}.data")))
        case "url":
            return Image(as_str(source.get("url"), f"{path}.url"))
        case "file":
            return Text(f"[image: file {as_str(source.get('file_id'), f'{path}.file_id')}, which cannot be shown]")
    raise bad("must be 'base64', 'url' or 'file'", f"{path}.type")


def _document(block: JsonObject, path: str, toolbox: Toolbox) -> list[Part]:
    source = as_object(block.get("source"), f"{path}.source")
    at = f"{path}.source"
    head = [as_str(block[key], f"{path}.{key}") for key in ("title", "context") if block.get(key) is not None]
    parts: list[Part] = [Text(text) for text in head if text]
    match as_str(source.get("type"), f"{at}.type"):
        case "text":
            parts.append(Text(as_str(source.get("data"), f"{at}.data")))
        case "content":
            for kind, inner, inner_path in blocks(source.get("content"), f"{at}.content"):
                allowed = kind in ("text", "image")  # as the provider has it; and a document in a document could nest without end
                parts.extend(_parts(kind, inner, inner_path, toolbox) if allowed else [Text(_placeholder(kind, inner))])
        case "base64":
            media_type = as_str(source.get("media_type", "application/pdf"), f"{at}.media_type")
            as_str(source.get("data"), f"{at}.data")
            parts.append(Text(f"[document: {media_type}, which cannot be shown]"))
        case "url":
            parts.append(Text(f"[document: {as_str(source.get('url'), f'{at}.url')}, which cannot be shown]"))
        case "file":
            parts.append(Text(f"[document: file {as_str(source.get('file_id'), f'{at}.file_id')}, which cannot be shown]"))
        case other:
            raise bad(f"{other!r} is not one of text, content, base64, url, file", f"{at}.type")
    return parts


def _search_result(block: JsonObject, path: str) -> list[Part]:
    lines = [as_str(block[key], f"{path}.{key}") for key in ("title", "source") if block.get(key) is not None]
    for index, item in enumerate(as_list(block.get("content"), f"{path}.content")):
        lines.append(_text(as_object(item, f"{path}.content.{index}"), f"{path}.content.{index}"))
    content = join_parts(Text(line) for line in lines if line)
    return [Text(content)] if isinstance(content, str) and content else []


def _addition(tool: JsonObject, path: str, toolbox: Toolbox) -> str:
    """A tool that a system message brings in, by its name in `tools` or by its whole definition."""
    if tool.get("type") != "tool_definition":
        return toolbox.reference(_tool_name(tool, path))
    definition = as_object(tool.get("definition"), f"{path}.definition")
    parsed = parse_tool(definition, f"{path}.definition")
    return "" if parsed is None else toolbox.define(parsed)


def _tool_name(tool: JsonObject, path: str) -> str:
    """The name in any of the provider's forms of reference: a tool, an MCP tool or a whole MCP server."""
    for key in ("name", "tool_name", "server_name", "mcp_server_name"):
        if key in tool:
            return as_str(tool[key], f"{path}.{key}")
    raise bad("field required", f"{path}.name")


def _placeholder(kind: str, block: JsonObject) -> str:
    name = block.get("name")
    return f"[{kind}: {name}]" if isinstance(name, str) else f"[{kind}]"
