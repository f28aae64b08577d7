"""Why a prompt does not extend the turn before it (law 8): compares ids, looks at the text around the first difference, names the cause.

Pure: knows no engine and no store. A cause that the fingerprints already gave (tools changed, history edited, ...) is only looked at
more closely; where they gave none, the text on both sides tells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from polar.chat import ChatRequest, Message
from polar.records import Break, Cause, Completion, Ids
from polar.tokens.fingerprint import canonical_json, message_digest
from polar.tokens.plan import Match

_BEFORE = 8
_WINDOW = 192
_LOOK_BACK = 4096
_SHOWN = 60
_VOLATILE = re.compile(r"^[ \t]*x-[a-z0-9-]+:.*$", re.IGNORECASE | re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a break was expected: `cause` where it is known, else what to fall back to where the texts tell nothing better."""

    cause: Cause | None
    fallback: Cause
    detail: str = ""


def first_difference(prompt: Ids, previous: Ids) -> int | None:
    """The index of the first id of `previous` (int32[n]) that `prompt` (int32[m]) does not repeat; `None` if it extends it."""
    size = min(len(prompt), len(previous))
    unequal = prompt[:size] != previous[:size]
    place = int(unequal.argmax()) if size else 0
    if size and unequal[place]:
        return place
    return None if len(prompt) >= len(previous) else size


def find_break(prompt: Ids, parent: Completion, reason: Reason, tokenizer: Any | None) -> Break | None:
    """The break between `parent` and `prompt`, or `None` if the prompt extends `parent.ids` (which must be there) after all."""
    previous = parent.ids
    assert previous is not None
    position = first_difference(prompt, previous)
    if position is None:
        return None
    cause, detail = reason.cause, reason.detail
    seen, shown = _explain(prompt, previous, position, tokenizer) if tokenizer is not None else (None, "")
    if cause is None:
        cause = seen or (_guess(parent) if tokenizer is None else None) or reason.fallback
    detail = "; ".join(text for text in (detail, shown) if text)
    return Break(cause, parent.number, position, len(previous) - position, detail)


def refine(match: Match, request: ChatRequest, parent: Completion) -> Match:
    """Looks at the content behind a match that has a cause. `Match()` where it shows that there is no parent at all."""
    if match.cause is Cause.SYSTEM_CHANGED:
        old, new = _system(parent.messages), _system(request.messages)
        if _VOLATILE.sub("", old) == _VOLATILE.sub("", new):
            return _because(match, Cause.VOLATILE_HEADER, "a header line in the system message changes with every call")
        return _because(match, Cause.SYSTEM_CHANGED, _first_text_difference(old, new))
    if match.cause is Cause.TOOLS_CHANGED:
        old_tools, new_tools = {tool.name for tool in parent.tools}, {tool.name for tool in request.tools}
        changes = [f"+{name}" for name in sorted(new_tools - old_tools)] + [f"-{name}" for name in sorted(old_tools - new_tools)]
        return _because(match, Cause.TOOLS_CHANGED, ", ".join(changes) or "same names, other order or schemas")
    if match.cause in (Cause.COMPACTION, Cause.HISTORY_EDITED) and not match.shared:
        return _same_opening(match, request, parent)
    return match


def _same_opening(match: Match, request: ChatRequest, parent: Completion) -> Match:
    recorded = [*parent.messages, parent.answer]
    old = [message_digest(message) for message in recorded]
    new = [message_digest(message) for message in request.messages]
    common = next((place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    if common == len(new):
        return Match()  # the same conversation up to an earlier point: sent again or taken back, nothing of it is re-rendered
    if match.cause is Cause.COMPACTION:
        if not request.tools and parent.tools:
            return match
        if common >= len(parent.messages):
            return _because(match, Cause.HISTORY_EDITED, f"the answer of completion {parent.number} is left out")
        return _because(match, Cause.COMPACTION, f"the history after message {common} is replaced")
    edited = request.messages[common]
    answered = any(message.role == "assistant" for message in request.messages[common:])
    if len(new) < len(old) and (not answered or _replaced(recorded[common], edited)):
        return _because(match, Cause.COMPACTION, f"the history after message {common} is replaced")
    return _because(match, Cause.HISTORY_EDITED, f"message {common} ({edited.role}) differs" + _edit(recorded, edited, common))


def _replaced(original: Message, edited: Message) -> bool:
    """Whether a message took another's place (a summary, say), rather than being an edit of it: less than half of the text is kept."""
    if original.role != edited.role:
        return True
    old, new = original.text, edited.text
    kept = _common(old, new) + _common(old[::-1], new[::-1])
    return 2 * kept < max(len(old), len(new))


def _edit(recorded: list[Message], edited: Message, place: int) -> str:
    original = recorded[place] if place < len(recorded) else None
    if original is None or original.role != edited.role:
        return ""
    if original.text != edited.text:
        return f": {_first_text_difference(original.text, edited.text)}"
    return ": other tool calls"


def _because(match: Match, cause: Cause, detail: str) -> Match:
    return Match(match.parent, match.shared, cause, detail, match.tags)


def _system(messages: tuple[Message, ...]) -> str:
    return messages[0].text if messages and messages[0].role == "system" else ""


def _first_text_difference(old: str, new: str) -> str:
    place = _common(old, new)
    return f"{old[max(0, place - 20) : place + _SHOWN]!r} became {new[max(0, place - 20) : place + _SHOWN]!r}"


def _common(old: str, new: str) -> int:
    """The length of the common start of two texts."""
    if old == new:
        return len(old)
    low, high = 0, min(len(old), len(new))
    while low < high:
        middle = (low + high + 1) // 2
        if old[:middle] == new[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _explain(prompt: Ids, previous: Ids, position: int, tokenizer: Any) -> tuple[Cause | None, str]:
    """What the text at the first difference tells: the cause where it does, and both sides of it."""
    start = max(0, position - _BEFORE)
    old = tokenizer.decode(previous[start : position + _WINDOW].tolist())
    new = tokenizer.decode(prompt[start : position + _WINDOW].tolist())
    place = _common(old, new)
    shown = f"{old[max(0, place - 20) : place + _SHOWN]!r} became {new[max(0, place - 20) : place + _SHOWN]!r}"
    old_end = len(tokenizer.decode(previous[start : position + 1].tolist()))
    new_end = len(tokenizer.decode(prompt[start : position + 1].tolist()))
    if place >= max(old_end, new_end):
        return Cause.BPE_SPLIT, f"{old[max(0, place - _SHOWN) : place]!r} is the same text in other tokens"
    place = min(place, len(tokenizer.decode(previous[start:position].tolist())))
    before = tokenizer.decode(previous[max(0, position - _LOOK_BACK) : start].tolist()) + old[:place]
    if _opens(old[place:], "<think>") or _opens(new[place:], "<think>") or _inside(before, "<think>", "</think>"):
        return Cause.THINKING_STRIPPED, shown
    if _inside(before, "<tool_call>", "</tool_call>"):
        block = before[before.rfind("<tool_call>") + len("<tool_call>") :]
        same = _block(block, old[place:]) == _block(block, new[place:])
        known = "</tool_call>" in old[place:] and "</tool_call>" in new[place:]
        return (Cause.HISTORY_EDITED if known and not same else Cause.ARGUMENTS_RESERIALISED), shown
    return None, shown


def _opens(text: str, marker: str) -> bool:
    """Whether the text, or what the last token before it began, opens with a marker."""
    return text.lstrip().startswith(marker)


def _inside(text: str, opening: str, closing: str) -> bool:
    return text.rfind(opening) > text.rfind(closing)


def _block(before: str, rest: str) -> bytes:
    return canonical_json(before + rest.split("</tool_call>", 1)[0])


def _guess(parent: Completion) -> Cause | None:
    """Without a tokenizer: what templates do to an answer like the parent's."""
    if any(message.thinking for message in (*parent.messages, parent.answer)):
        return Cause.THINKING_STRIPPED
    if any(message.tool_calls for message in (*parent.messages, parent.answer)):
        return Cause.ARGUMENTS_RESERIALISED
    return None
