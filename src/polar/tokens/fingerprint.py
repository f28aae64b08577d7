"""Fingerprints of canonical conversations: what makes two requests the same conversation, whatever a harness did on the way.

A message's digest covers role, text, tool names, arguments as parsed JSON, and images by hash. It leaves out ids, the outer whitespace of
assistant text, and thinking, also where a harness has written it into the text, in `<think>` at its beginning (pydantic-ai does). User and
tool text count to the last character. Arguments that do not parse count as the string that they are. Digests are chained, so the
fingerprints of all prefixes of a request cost one pass. Knows no tokens and keeps nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import orjson

from polar.chat import Message, Text, Tool

_SAFE_DIGITS = 15
_THINK, _THINK_END = "<think>", "</think>"
NO_TOOLS = bytes(8)
START = bytes(16)
"""The loose fingerprint of no messages at all."""


def message_digest(message: Message) -> bytes:
    """16 bytes."""
    state = blake2b(message.role.encode(), digest_size=16)
    if isinstance(message.content, str):
        text = _split(message.content)[1] if message.role == "assistant" else message.content
        _add(state, b"t", _bytes(text))
    else:
        for part in message.content:
            if isinstance(part, Text):
                _add(state, b"t", _bytes(part.text))
            else:
                _add(state, b"i", blake2b(_bytes(part.url), digest_size=16).digest())
    for call in message.tool_calls:
        _add(state, b"n", _bytes(call.name))
        _add(state, b"a", canonical_json(call.arguments))
    return state.digest()


def thought(message: Message) -> str:
    """The reasoning of an assistant message, wherever it stands."""
    return message.reasoning or _split(message.text)[0]


def _split(text: str) -> tuple[str, str]:
    """Thinking that was written at the beginning of an assistant's text, and what is said, both without outer whitespace."""
    text = text.strip()
    if text.startswith(_THINK):
        thinking, closed, rest = text.removeprefix(_THINK).partition(_THINK_END)
        if closed:
            return thinking.strip(), rest.strip()
    return "", text


def extend(strict: bytes, digest: bytes) -> bytes:
    """The strict fingerprint (16 bytes) after one more message; the first one starts from the root."""
    return blake2b(strict + digest, digest_size=16).digest()


def extend_loose(loose: bytes, digest: bytes) -> bytes:
    """The loose fingerprint after one more message: 8 bytes of the first message alone, then 8 running ones.

    The first half lets a request be recognised by its opening when nothing else of its history is known.
    """
    running = blake2b(loose[8:] + digest, digest_size=8).digest()
    return (running if loose == START else loose[:8]) + running


def thinking_hash(text: str) -> bytes:
    """8 bytes of a reasoning text without outer whitespace; `b""` of none."""
    text = text.strip()
    return blake2b(_bytes(text), digest_size=8).digest() if text else b""


def part(*values: bytes) -> bytes:
    """8 bytes: one of a root's four parts."""
    state = blake2b(digest_size=8)
    for value in values:
        _add(state, b"p", value)
    return state.digest()


def tools_part(tools: Sequence[Tool]) -> bytes:
    """Tools in their order, each with its keys sorted."""
    return part(*(canonical_value(tool.schema()) for tool in tools)) if tools else NO_TOOLS


def canonical_json(text: str) -> bytes:
    """Canonical bytes of a JSON text; no text at all is an empty object, text that is no JSON is a string of its own kind."""
    if not text.strip():
        return b"{}"
    try:
        value = json.loads(text, parse_float=_number, parse_int=_integer, parse_constant=_not_json)
        return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return b"\x00" + _bytes(text)


def canonical_value(value: Any) -> bytes:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONEncodeError, TypeError):
        return json.dumps(value, sort_keys=True, default=str).encode()


def _number(text: str) -> Any:
    """Fractions as the double that every harness makes of them; 1.0 and 1e0 are 1."""
    number = float(text)
    if number in (float("inf"), float("-inf")):
        return "\x00" + text
    return int(number) if number.is_integer() else number


def _integer(text: str) -> Any:
    """Exact as far as doubles are. Beyond, JavaScript's harnesses send back the nearest double (an id of 19 digits ends in zeros), which
    is the same call."""
    return int(text) if len(text) <= _SAFE_DIGITS else _number(text)


def _not_json(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _add(state: blake2b, kind: bytes, value: bytes) -> None:
    state.update(kind + len(value).to_bytes(8, "big"))
    state.update(value)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
