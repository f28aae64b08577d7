"""How much memory a completion or a tool set holds, for a cache's cap. Estimates; it is better to be over than under."""

from __future__ import annotations

from sys import getsizeof
from typing import Any

from polar.chat import Message, Text, Tool
from polar.records import Completion

_OBJECT = 120
"""Bytes of a small object with its slots, and of the pointer to it."""


def weight(value: Any) -> int:
    """Bytes, with everything inside it; of a completion without its tools, which all completions of a harness share.

    Without recursion: a tool's schema may nest as deep as JSON is read.
    """
    size = 0
    pending: list[Any] = [value]
    while pending:
        one = pending.pop()
        kind = type(one)
        if kind is dict:
            size += _OBJECT
            pending += one
            pending += one.values()
        elif kind is list or kind is tuple:
            size += _OBJECT
            pending += one
        elif kind is Completion:
            size += _completion(one)
            pending += (one.sampling, one.asked, one.provenance, one.hints, one.options)
        elif kind is Tool:
            size += 4 * _OBJECT + getsizeof(one.name) + getsizeof(one.description or "")
            pending.append(one.parameters)
        elif kind is Message:
            size += _message(one)
        else:
            size += getsizeof(one)
    return size


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


def _completion(value: Completion) -> int:
    arrays = (value.prompt_ids, value.sampled_ids, value.logprobs)
    size = 10 * _OBJECT + sum(array.nbytes for array in arrays if array is not None)
    return size + sum(map(_message, value.messages)) + _message(value.answer)
