"""Reads an assistant's text the way a vLLM server with the `qwen3` reasoning parser and the `hermes` tool parser does.

Pure functions. A tool call that cannot be read stays in the content, exactly as decoded, and no call of that answer is
returned. Arguments are re-serialised, as vLLM does: mode `messages` has that cost, and the drift report names it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
_HALF = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair, which JSON can name and UTF-8 cannot hold: such a call cannot be sent to anybody."""
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>|<tool_call>(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """`calls` are (name, JSON text of the arguments)."""

    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, str], ...] = ()


def parse_answer(text: str, *, prompt: str = "", tools: bool = False) -> Parsed:
    """Splits thinking from the answer and, where the request had tools, tool calls from its text.

    `prompt` is the end of the rendered prompt: a template may open the thinking block there.
    """
    reasoning, rest = split_reasoning(text, opened=prompt.rstrip().endswith(THINK_OPEN))
    if not tools or rest is None:
        return Parsed(reasoning, rest)
    calls = tool_calls(rest)
    if not calls:
        return Parsed(reasoning, rest)
    return Parsed(reasoning, rest[: rest.index("<tool_call>")].strip() or None, calls)


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str | None, str | None]:
    """(reasoning, content). An unclosed block is all reasoning."""
    stripped = text.lstrip()
    inside = opened or stripped.startswith(THINK_OPEN)
    if stripped.startswith(THINK_OPEN):
        text = stripped[len(THINK_OPEN) :]
    if not inside:
        return None, text
    reasoning, closed, rest = text.partition(THINK_CLOSE)
    return reasoning, rest if closed else None


def tool_calls(text: str) -> tuple[tuple[str, str], ...]:
    """All Hermes calls in the text, or none if any of them is malformed."""
    calls: list[tuple[str, str]] = []
    for match in _CALL.finditer(text):
        try:
            call = json.loads(match.group(1) or match.group(2) or "")
            name, arguments = call["name"], call.get("arguments", {})
        except (ValueError, KeyError, TypeError, AttributeError):
            return ()
        if not isinstance(name, str):
            return ()
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        if _HALF.search(name + text):
            return ()
        calls.append((name, text))
    return tuple(calls)
