"""Puts the stored originals back where a harness echoes them: thinking, arguments and text as they were sampled.

A message is ours if its canonical digest is that of a recorded answer. Where only a call is ours (found by its id) its arguments
are restored if their parsed values are equal; where the values differ, the harness's edit wins. Knows no tokens.
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import replace

from polar.chat import Message, ToolCall
from polar.tokens import pointers
from polar.tokens.fingerprint import canonical_json, message_digest

_OURS = re.compile(rf"[0-9a-f]{{{pointers.LENGTH + 2}}}")


def restore(messages: tuple[Message, ...], recorded: Sequence[Message], shared: int) -> tuple[Message, ...]:
    """The request's messages with stored originals.

    `recorded` are the parent's messages and its answer; the first `shared` of `messages` equal the first `shared` of them canonically,
    and are replaced as they stand, so that what is recorded of this request shares them to the last byte. Ids of the calls that a
    harness has renamed are renamed in the tool results that follow.
    """
    if shared:
        head = tuple(recorded[:shared])
        names = _renamed(messages[:shared], head)
        rest = tuple(_rename(message, names) for message in messages[shared:])
        return head + _restore_each(rest, recorded[shared:])
    return _restore_each(messages, recorded)


def common_messages(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many leading messages of two conversations are canonically the same."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a is not b and message_digest(a) != message_digest(b):
            break
        count += 1
    return count


def _renamed(echoed: Sequence[Message], stored: Sequence[Message]) -> dict[str, str]:
    return {
        call.id: original.id
        for message, own in zip(echoed, stored, strict=True)
        for call, original in zip(message.tool_calls, own.tool_calls, strict=False)
        if call.id != original.id
    }


def _rename(message: Message, names: dict[str, str]) -> Message:
    if message.tool_call_id is not None and message.tool_call_id in names:
        return replace(message, tool_call_id=names[message.tool_call_id])
    return message


def _restore_each(messages: tuple[Message, ...], recorded: Sequence[Message]) -> tuple[Message, ...]:
    """Where the history is another one: message by message, ids left as the harness has them."""
    if not any(message.role == "assistant" for message in messages):
        return messages
    own = [message for message in recorded if message.role == "assistant"]
    by_digest: dict[bytes, deque[Message]] = defaultdict(deque)
    for message in own:
        by_digest[message_digest(message)].append(message)
    calls = {_bare(call.id): (call, message) for message in own for call in message.tool_calls}
    return tuple(_restored(message, by_digest, calls) if message.role == "assistant" else message for message in messages)


def _restored(
    message: Message,
    by_digest: dict[bytes, deque[Message]],
    calls: dict[str, tuple[ToolCall, Message]],
) -> Message:
    same = by_digest.get(message_digest(message))
    if same:
        original = same.popleft() if len(same) > 1 else same[0]
        kept = zip(original.tool_calls, message.tool_calls, strict=True)
        return replace(
            message,
            content=original.content,
            thinking=original.thinking,
            tool_calls=tuple(replace(call, id=echoed.id) for call, echoed in kept),
        )
    restored: list[ToolCall] = []
    thinking = message.thinking
    for call in message.tool_calls:
        found = calls.get(_bare(call.id))
        if found is not None:
            original_call, source = found
            equal = original_call.name == call.name and canonical_json(original_call.arguments) == canonical_json(call.arguments)
            if equal or _OURS.fullmatch(_bare(call.id)):
                # any other id alone proves nothing: harnesses and dialects number their calls from 0
                thinking = source.thinking or thinking
            if equal:
                call = replace(call, arguments=original_call.arguments)
        restored.append(call)
    return replace(message, thinking=thinking, tool_calls=tuple(restored))


def _bare(call_id: str) -> str:
    """A call's id without what a dialect put before it: reference and index."""
    return call_id[-(pointers.LENGTH + 2) :]
