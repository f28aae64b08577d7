"""Canonical messages to input items again: for the listing of a stored response's input, and what a compaction keeps.

Ids of calls that this gateway made are bare in canonical messages; here they are as they were given out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polar.chat import JsonObject, Message, Text, Tool
from polar.dialects.openai_responses.calls import ID_PREFIX, ITEM_OF_KIND, call_item, find_tool

_BARE = re.compile("[0-9a-f]{28}")
"""A completion's reference and a call's index."""


def items_of(messages: Iterable[Message], tools: Sequence[Tool], loaded: Mapping[str, Any]) -> list[JsonObject]:
    """Items that read back as `messages`, with ids counted from 0."""
    items: list[JsonObject] = []
    custom: set[str] = set()
    given_out: dict[str, str] = {}
    for message in messages:
        if message.role == "tool":
            call_id = message.tool_call_id or ""
            kind = "custom_tool_call_output" if call_id in custom else "function_call_output"
            items.append({"type": kind, "status": "completed", "call_id": given_out.get(call_id, call_id), "output": message.text})
            continue
        for block in message.thinking:
            summary = [{"type": "summary_text", "text": block.text}] if block.text else []
            items.append({"type": "reasoning", "summary": summary, "encrypted_content": block.signature})
        if message.content or not (message.thinking or message.tool_calls):
            content = _parts_of(message)
            items.append({"type": "message", "status": "completed", "role": message.role, "content": content})
        for call in message.tool_calls:
            own = _BARE.fullmatch(call.id) is not None
            item = call_item(call, find_tool(call.name, tools, loaded), "", None if own else call.id)
            given_out[call.id] = item["call_id"]
            if item["type"] == ITEM_OF_KIND["custom"]:
                custom.add(call.id)
            items.append(item)
    return [item | {"id": f"{_prefix(item)}item{index:04d}"} for index, item in enumerate(items)]


def _prefix(item: JsonObject) -> str:
    prefixes = {"message": "msg_", "reasoning": "rs_", "function_call_output": "fco_", "custom_tool_call_output": "ctco_"}
    return prefixes.get(item["type"]) or ID_PREFIX[item["type"]]


def _parts_of(message: Message) -> list[JsonObject]:
    if message.role == "assistant":
        return [{"type": "output_text", "text": message.text, "annotations": []}]
    content = (Text(message.content),) if isinstance(message.content, str) else message.content
    return [
        {"type": "input_text", "text": part.text}
        if isinstance(part, Text)
        else {"type": "input_image", "image_url": part.url, "detail": part.detail or "auto"}
        for part in content
    ]
