"""A row's conversation: which message is which completion's answer, and the form in which messages leave Polar.

Rows carry messages for people and for SFT. They are `plain`: thinking is one block of text, and signatures, references and the harness's
own tool kinds are left out, so that their JSON form (OpenAI Chat Completions, reasoning as `reasoning_content`) loses nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from polar.chat import Image, JsonObject, Message, Part, Text, Thinking, Tool, ToolCall


def plain(message: Message) -> Message:
    """The message without what only its session understands."""
    if not message.thinking and not message.refs:
        return message
    thinking = (Thinking(message.reasoning),) if message.reasoning else ()
    if message.refs or message.thinking != thinking:
        return Message(message.role, message.content, thinking, message.tool_calls, message.tool_call_id, message.name)
    return message


def plain_tool(tool: Tool) -> Tool:
    """The tool as the model sees it; a missing description is an empty one there."""
    return Tool(tool.name, tool.description or "", tool.parameters)


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion's request and answer."""

    messages: tuple[Message, ...]
    answer: Message


def join(turns: Sequence[Turn]) -> tuple[tuple[Message, ...], list[int | None]]:
    """The conversation of a chain of turns, and the index in it of each one's answer.

    A request repeats its predecessor's messages and answer in whatever form its harness keeps them; the messages up to there are the
    recorded ones, the answer as sampled. Where a request is not of that shape, the conversation is the last turn's alone, and the other
    answers' places are not known.
    """
    if not turns:
        return (), []
    messages: list[Message] = [plain(message) for message in turns[0].messages]
    places: list[int | None] = [len(messages)]
    messages.append(plain(turns[0].answer))
    for before, turn in pairwise(turns):
        place = len(before.messages)
        if len(turn.messages) <= place or turn.messages[place].role != "assistant":
            return (*map(plain, turns[-1].messages), plain(turns[-1].answer)), [None] * (len(turns) - 1) + [len(turns[-1].messages)]
        messages.extend(plain(message) for message in turn.messages[place + 1 :])
        places.append(len(messages))
        messages.append(plain(turn.answer))
    return tuple(messages), places


# --- the OpenAI Chat Completions form --------------------------------------------------------------------------------


def message_to_chat(message: Message) -> JsonObject:
    data: JsonObject = {"role": message.role}
    if isinstance(message.content, str):
        data["content"] = message.content
    else:
        data["content"] = [_part_to_chat(part) for part in message.content]
    if message.reasoning:
        data["reasoning_content"] = message.reasoning
    if message.tool_calls:
        data["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        data["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        data["name"] = message.name
    return data


def message_from_chat(data: Mapping[str, Any]) -> Message:
    """Raises `KeyError` where a required key is missing."""
    content = data.get("content") or ""
    reasoning = data.get("reasoning_content") or ""
    return Message(
        role=data["role"],
        content=content if isinstance(content, str) else tuple(_part_from_chat(part) for part in content),
        thinking=(Thinking(reasoning),) if reasoning else (),
        tool_calls=tuple(
            ToolCall(call.get("id") or "", call["function"]["name"], call["function"]["arguments"]) for call in data.get("tool_calls") or ()
        ),
        tool_call_id=data.get("tool_call_id"),
        name=data.get("name"),
    )


def tool_from_chat(data: Mapping[str, Any]) -> Tool:
    function = data["function"]
    return Tool(function["name"], function.get("description") or "", function.get("parameters") or {})


def _part_to_chat(part: Part) -> JsonObject:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    image: JsonObject = {"url": part.url}
    if part.detail is not None:
        image["detail"] = part.detail
    return {"type": "image_url", "image_url": image}


def _part_from_chat(data: Mapping[str, Any]) -> Part:
    if data["type"] == "text":
        return Text(data["text"])
    return Image(data["image_url"]["url"], data["image_url"].get("detail"))
