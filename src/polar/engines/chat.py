"""Canonical messages to and from OpenAI Chat Completions bodies as inference servers read and write them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from polar.chat import Image, JsonObject, Message, Sampling, Thinking, Tool, ToolCall, ToolChoice
from polar.engines.base import EngineFinish, MessagesRequest


def chat_message(message: Message) -> JsonObject:
    """One message. Content is `""`, never null (B58); reasoning goes under both keys that servers read (B64)."""
    body: JsonObject = {"role": message.role, "content": _content(message)}
    if message.role == "assistant" and message.reasoning:
        body["reasoning"] = body["reasoning_content"] = message.reasoning
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _arguments(call.arguments)}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        body["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        body["name"] = message.name
    return body


def _content(message: Message) -> str | list[JsonObject]:
    if isinstance(message.content, str):
        return message.content
    parts: list[JsonObject] = []
    for part in message.content:
        if isinstance(part, Image):
            image: JsonObject = {"url": part.url}
            if part.detail is not None:
                image["detail"] = part.detail
            parts.append({"type": "image_url", "image_url": image})
        else:
            parts.append({"type": "text", "text": part.text})
    return parts


def _arguments(arguments: str) -> str:
    """Servers parse arguments as a JSON object before they render them; what is none travels as one with a single key."""
    try:
        parsed = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        parsed = None
    return (arguments or "{}") if isinstance(parsed, dict) else orjson.dumps({"arguments": arguments}).decode()


def chat_body(request: MessagesRequest) -> JsonObject:
    """The part of a request body that all servers share; sampling parameters as set, `thinking` as a template argument."""
    body: JsonObject = {"model": request.model, "messages": [chat_message(message) for message in request.messages]}
    if request.tools:
        body["tools"] = [tool.schema() for tool in request.tools]
        body["tool_choice"] = chat_tool_choice(request.tool_choice)
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
    body.update(sampling_body(request.sampling))
    if request.thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": request.thinking}
    if request.response_format is not None:
        body["response_format"] = request.response_format
    if request.n != 1:
        body["n"] = request.n
    return body


def chat_tool_choice(choice: ToolChoice) -> str | JsonObject:
    return {"type": "function", "function": {"name": choice.name}} if choice.mode == "named" else choice.mode


def sampling_body(sampling: Sampling) -> JsonObject:
    """Sampling parameters in the common words; what is not set is left to the server."""
    return sampling.as_dict()


def tools_body(tools: Sequence[Tool]) -> list[JsonObject]:
    return [tool.schema() for tool in tools]


def usage_counts(answer: Any) -> dict[str, int]:
    """`prompt_tokens`, `completion_tokens`, `cached_tokens` and `reasoning_tokens` of an answer's usage, each only where it is a number."""
    usage = answer.get("usage") if isinstance(answer, dict) else None
    if not isinstance(usage, dict):
        return {}
    counts = {name: usage.get(name) for name in ("prompt_tokens", "completion_tokens", "reasoning_tokens")}  # SGLang's place for the last
    for details, name in (("prompt_tokens_details", "cached_tokens"), ("completion_tokens_details", "reasoning_tokens")):
        found = usage.get(details)
        if isinstance(found, dict) and type(found.get(name)) is int:
            counts[name] = found[name]
    return {name: value for name, value in counts.items() if type(value) is int}


def answer_message(wire: Mapping[str, Any]) -> Message:
    """An assistant message as a server parsed it. Arguments given as an object become JSON text (B63); ids as the server made them. Older
    servers know one call, in `function_call`; Mistral's API has reasoning among the parts of a content.

    Raises `TypeError` or `AttributeError` for what is no message of this API.
    """
    content = wire.get("content")
    reasoning = wire.get("reasoning") or wire.get("reasoning_content")
    if isinstance(content, list):
        reasoning = reasoning or _parts_text(content, "thinking")
        content = _parts_text(content, "text")
    reasoning = _text(reasoning, "reasoning")
    legacy = [{"function": wire["function_call"]}] if wire.get("function_call") else ()
    calls = tuple(
        ToolCall(str(call.get("id") or f"call_{index}"), str(function.get("name") or ""), _argument_text(function.get("arguments")))
        for index, call in enumerate(wire.get("tool_calls") or legacy)
        for function in [call.get("function") or {}]
    )
    return Message("assistant", _text(content, "content"), (Thinking(reasoning),) if reasoning else (), calls)


def refusal_of(wire: Mapping[str, Any]) -> str | None:
    return _text(wire.get("refusal"), "refusal") or None


def _text(value: Any, name: str) -> str:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {type(value).__name__}, not text")
    return value or ""


def _parts_text(parts: list[Any], key: str) -> str:
    """The text under `key` of all parts that have one; there it may be a list of parts again."""
    found = [part.get(key) or "" for part in parts if isinstance(part, dict)]
    return "".join(_parts_text(each, "text") if isinstance(each, list) else str(each) for each in found)


def _argument_text(arguments: Any) -> str:
    """Arguments that were sampled as a string of JSON come from a Hermes parser as that string written as JSON again: what counts is what
    is in it, as in mode `tokens`."""
    if not isinstance(arguments, str):
        return "{}" if arguments is None else orjson.dumps(arguments).decode()
    if arguments[:1] == '"':
        try:
            inner = orjson.loads(arguments)
            if isinstance(orjson.loads(inner), dict):
                return str(inner)
        except orjson.JSONDecodeError:
            pass  # no JSON within JSON: kept as it is
    return arguments


_FINISH: dict[str, EngineFinish] = {
    "stop": "stop",
    "end_turn": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "max_tokens": "length",
    "model_length": "length",
    "repetition": "length",
    "abort": "abort",
    "content_filter": "content_filter",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}


def finish_reason(reason: Any) -> EngineFinish:
    """A server's finish reason. One that is missing or unknown means that the answer did not end by itself: `abort`."""
    return _FINISH.get(reason, "abort") if isinstance(reason, str) else "abort"
