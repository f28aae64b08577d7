"""How much memory a completion or a tool set holds, for a cache's cap. Estimates; it is better to be over than under."""

from __future__ import annotations

from functools import singledispatch
from sys import getsizeof
from typing import Any

from polar.chat import Message, Text, Tool
from polar.records import Completion

_OBJECT = 120
"""Bytes of a small object with its slots, and of the pointer to it."""


@singledispatch
def weight(value: Any) -> int:
    """Bytes, with everything inside it."""
    return getsizeof(value)


@weight.register(dict)
@weight.register(list)
@weight.register(tuple)
def _(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> int:
    """Without recursion: a tool's schema may nest as deep as JSON is read."""
    size = 0
    pending: list[Any] = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            size += _OBJECT
            pending += one.keys()
            pending += one.values()
        elif isinstance(one, list | tuple):
            size += _OBJECT
            pending += one
        else:
            size += weight(one)
    return size


@weight.register
def _(value: Tool) -> int:
    return 4 * _OBJECT + getsizeof(value.name) + getsizeof(value.description or "") + weight(value.parameters)


@weight.register(Message)
def _message(value: Message) -> int:
    content = value.content
    size = _OBJECT + (
        getsizeof(content)
        if isinstance(content, str)
        else sum(_OBJECT + getsizeof(part.text if isinstance(part, Text) else part.url) for part in content)
    )
    for block in value.thinking:
        size += _OBJECT + getsizeof(block.text) + getsizeof(block.signature or "")
    for call in value.tool_calls:
        size += 3 * _OBJECT + getsizeof(call.arguments)
    for ref in value.refs:
        size += getsizeof(ref)
    return size


@weight.register
def _(value: Completion) -> int:
    """Without its tools, which all completions of a harness share."""
    arrays = (value.prompt_ids, value.sampled_ids, value.logprobs)
    size = 10 * _OBJECT + sum(array.nbytes for array in arrays if array is not None)
    size += sum(map(_message, value.messages)) + _message(value.answer)
    return size + sum(map(weight, (value.sampling, value.asked, value.provenance, value.hints, value.options)))
