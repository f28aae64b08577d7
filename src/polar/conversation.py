"""What is done to every conversation, whatever dialect it came in: one system message, and results behind their calls. Knows no tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from polar.chat import Message, Text, ToolCall, join_parts


def append_text(message: Message, text: str, separator: str = "\n\n") -> Message:
    """The message with `text` added at its end; empty text changes nothing."""
    if not text:
        return message
    if isinstance(message.content, str):
        return replace(message, content=message.content + separator + text if message.content else text)
    return replace(message, content=join_parts([*message.content, Text(text)], separator))


def fold_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """At most one system message, at index 0; later ones are folded where they stand, never hoisted.

    Leading system messages are joined by a blank line. A later one becomes text of the user or tool message that
    arrived with it (the one just before it or, where an assistant message is before it, the one just after), and a
    user message of its own only if it has no such neighbour. Empty ones add nothing. Folding into the message that
    came in the same request keeps every earlier prompt a prefix of the later one.
    """
    head: list[str] = []
    rest: list[Message] = []
    after: list[str] = []
    pending: list[str] = []
    for message in messages:
        if message.role == "system":
            if not message.text:
                continue
            if not rest and not pending:
                head.append(message.text)
            elif rest and rest[-1].role in ("user", "tool"):
                after.append(message.text)
            else:
                pending.append(message.text)
            continue
        if after:
            rest[-1] = append_text(rest[-1], "\n\n".join(after))
            after = []
        if pending:
            text = "\n\n".join(pending)
            pending = []
            if message.role == "user" and isinstance(message.content, str):
                joined = text + "\n\n" + message.content if message.content else text
                message = replace(message, content=joined)
            elif message.role == "user":
                message = replace(message, content=join_parts([Text(text), *message.content], "\n\n"))
            else:
                rest.append(Message("user", text))
        rest.append(message)
    if after:
        rest[-1] = append_text(rest[-1], "\n\n".join(after))
    if pending:
        rest.append(Message("user", "\n\n".join(pending)))
    if head:
        rest.insert(0, Message("system", "\n\n".join(head)))
    return tuple(rest)


def pair_results(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The results of a turn's calls right after it, in the order of the calls; what else was said before the next answer follows them.
    Neighbouring answers are one turn.

    Providers pair results with calls by id, wherever and in whatever order they come (harnesses send them as their tools finish). Most
    templates write no ids, so that the model takes the first result for that of the first call, and some stop looking for results at the
    first message that is none. A result of a call that the turn doesn't have stays where it is.
    """
    if _is_paired(messages):
        return tuple(messages)
    paired: list[Message] = []
    places: dict[str | None, int] = {}
    results: list[Message] = []
    others: list[Message] = []
    for message in messages:
        if message.role == "assistant":
            if results or others:
                paired += sorted(results, key=lambda result: places[result.tool_call_id]) + others
                places, results, others = {}, [], []
            paired.append(message)
            places |= {call.id: place for place, call in enumerate(message.tool_calls, len(places))}
        elif message.tool_call_id in places:
            results.append(message)
        else:
            others.append(message)
    return (*paired, *sorted(results, key=lambda result: places[result.tool_call_id]), *others)


def _is_paired(messages: Iterable[Message]) -> bool:
    """Whether each result is that of the call which is next, as in nearly every history. It costs a tenth of putting them in order."""
    calls: tuple[ToolCall, ...] = ()
    answered = 0
    before = ""
    for message in messages:
        if message.role == "tool":
            if answered >= len(calls) or calls[answered].id != message.tool_call_id:
                return False
            answered += 1
        elif before == message.role == "assistant":
            calls += message.tool_calls
        else:
            calls, answered = message.tool_calls, 0
        before = message.role
    return True
