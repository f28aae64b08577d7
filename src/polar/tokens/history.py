"""Which recorded turn does a request continue? One `History` per session: heads in memory, no content, no tokens.

Each recorded turn is filed under the fingerprints of its request plus its own answer. A request looks up its longest known prefix:
linear in its own size, constant in the number of earlier turns, whose heads are all that is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from polar.chat import ChatRequest, Message
from polar.records import Cause, Head
from polar.tokens import pointers
from polar.tokens.fingerprint import NO_TOOLS, START, thinking_hash, thought
from polar.tokens.plan import Keys, Match

_EQUALS = 64
"""How many completions of the very same conversation are told apart, newest first. More is a loop, not a history."""


class History:
    """The turns of one session. Not thread-safe: it belongs to the event loop."""

    def __init__(self, heads: Iterable[Head] = ()) -> None:
        self._heads: dict[int, Head] = {}
        self._strict: dict[bytes, list[int]] = {}
        self._loose: dict[bytes, list[int]] = {}
        self._openings: dict[bytes, list[int]] = {}
        """Per first message, the newest completion of each root: roots are few."""
        for head in heads:
            self.add(head)

    def __len__(self) -> int:
        return len(self._heads)

    def head(self, number: int) -> Head | None:
        return self._heads.get(number)

    def add(self, head: Head) -> None:
        """Files a turn; a head of the same number replaces the earlier one. A head without fingerprints is kept and never found."""
        known = head.number in self._heads
        self._heads[head.number] = head
        if known or not head.turn:
            return
        self._strict.setdefault(head.turn, []).append(head.number)
        self._loose.setdefault(head.loose, []).append(head.number)
        if head.status == "complete":
            newest = self._openings.setdefault(head.loose[:8], [])
            newest[:] = [number for number in newest if self._heads[number].root != head.root]
            newest.append(head.number)

    def delivered(self, number: int) -> None:
        """Notes that the client took the whole answer of a turn."""
        head = self._heads.get(number)
        if head is not None:
            self._heads[number] = replace(head, delivered=True)

    def match(self, keys: Keys, request: ChatRequest, *, secret: bytes) -> Match:
        """The turn that `request` (normalised, with its `keys`) continues, or why there is none. Never raises."""
        messages = request.messages
        at, heads, aborted = self._longest(self._strict, keys.strict, messages)
        loose_at, loose_heads, _ = self._longest(self._loose, keys.loose, messages)
        if loose_heads and loose_at > at:
            head = self._choose(loose_heads, messages[loose_at], secret)[0]
            cause = root_cause(head.root, keys.root)
            if cause is not None:
                same_system = head.root[24:] == keys.root[24:]
                return Match(head.number, loose_at + 1 if same_system else 0, cause, f"same history as completion {head.number}")
        if heads:
            head, ambiguous = self._choose(heads, messages[at], secret)
            tags = frozenset({"ambiguous_parent"}) if ambiguous else frozenset()
            if aborted is not None:
                return Match(head.number, at + 1, Cause.RETRY, f"takes up the aborted answer of completion {aborted[1]}", tags)
            later = self._later(head, messages[at + 1 :], secret)
            if later is not None:
                return Match(later, at + 1, Cause.HISTORY_EDITED, f"message {at + 1} or a later one is not as completion {later} had it")
            return Match(head.number, at + 1, tags=tags)
        if aborted is not None:
            return Match(aborted[1], 0, Cause.RETRY, f"takes up the aborted answer of completion {aborted[1]}")
        return self._by_pointer(keys, messages, secret) or self._by_opening(keys, messages) or Match()

    def _longest(
        self, index: dict[bytes, list[int]], prefixes: tuple[bytes, ...], messages: tuple[Message, ...]
    ) -> tuple[int, list[Head], tuple[int, int] | None]:
        """The longest prefix that ends with a complete recorded answer, and the longest that ends with an aborted one."""
        aborted: tuple[int, int] | None = None
        for position in range(len(messages) - 1, -1, -1):
            if messages[position].role != "assistant":
                continue
            numbers = index.get(prefixes[position])
            if not numbers:
                continue
            heads = [self._heads[number] for number in numbers[-_EQUALS:]]
            complete = [head for head in heads if head.status == "complete"]
            if complete:
                return position, complete, aborted
            if aborted is None:
                aborted = position, heads[-1].number
        return -1, [], aborted

    def _choose(self, heads: list[Head], answer: Message, secret: bytes) -> tuple[Head, bool]:
        """Among equals: the one that the echoed answer points at, of several (choices of one call, or no pointer) the one whose thinking it
        echoes, else the latest delivered, else the latest, and the first choice of it."""
        if len(heads) == 1:
            return heads[0], False
        pointed = set(_pointers(answer, secret))
        left = [head for head in heads if head.number - head.choice in pointed] or heads  # ids name the call, not which choice of it
        if len(left) > 1 and (thinking := thought(answer)):
            echoed = thinking_hash(thinking)
            left = [head for head in left if head.thinking_hash == echoed] or left
        return max(left, key=lambda head: (head.delivered, head.number - head.choice, -head.choice)), len(left) > 1

    def _later(self, ancestor: Head, rest: tuple[Message, ...], secret: bytes) -> int | None:
        """The turn after `ancestor` that the rest of a request was once part of: answers of it are there, what is between them has
        changed."""
        for message in reversed(rest):
            if message.role != "assistant":
                continue
            for number in _pointers(message, secret):
                head = self._heads.get(number)
                if head is not None and head.status == "complete" and self._descends(head, ancestor.number):
                    return number
        return None

    def _descends(self, head: Head, ancestor: int) -> bool:
        parent = head.parent
        while parent is not None and parent > ancestor:
            above = self._heads.get(parent)
            parent = None if above is None else above.parent
        return parent == ancestor

    def _by_pointer(self, keys: Keys, messages: tuple[Message, ...], secret: bytes) -> Match | None:
        for message in reversed(messages):
            for number in _pointers(message, secret):
                head = self._heads.get(number)
                if head is not None and head.status == "complete":
                    cause = root_cause(head.root, keys.root) or Cause.HISTORY_EDITED
                    return Match(number, 0, cause, f"refers to completion {number}, with another history before it")
        return None

    def _by_opening(self, keys: Keys, messages: tuple[Message, ...]) -> Match | None:
        """Same first message, and nothing else known. `assemble` looks closer, with the content at hand."""
        first = 1 if messages and messages[0].role == "system" else 0
        if len(messages) <= first or keys.loose[first] == START:
            return None
        answered = any(message.role == "assistant" for message in messages)
        for number in reversed(self._openings.get(keys.loose[first][:8], [])):
            root = self._heads[number].root
            if root[24:] != keys.root[24:]:
                continue
            if root == keys.root:
                cause = Cause.HISTORY_EDITED if answered else Cause.COMPACTION
                return Match(number, 0, cause, f"same first message as completion {number}, another history after it")
            if root[8:16] != keys.root[8:16] and keys.root[8:16] != NO_TOOLS and root[8:16] != NO_TOOLS:
                return Match(number, 0, Cause.SUB_AGENT, f"same first message as completion {number}, other tools")
        return None


def root_cause(old: bytes, new: bytes) -> Cause | None:
    """What changed between two roots, the most telling part first; `None` if nothing did.

    The same history with all tools gone is how a harness asks for a summary of it.
    """
    if old == new:
        return None
    if old[8:16] != new[8:16] and new[8:16] == NO_TOOLS:
        return Cause.COMPACTION
    for start, cause in ((0, Cause.MODEL_CHANGED), (8, Cause.TOOLS_CHANGED), (16, Cause.SETTINGS_CHANGED), (24, Cause.SYSTEM_CHANGED)):
        if old[start : start + 8] != new[start : start + 8]:
            return cause
    return None


def _pointers(message: Message, secret: bytes) -> Iterator[int]:
    for call in message.tool_calls:
        yield from _found(secret, call.id)
    for block in message.thinking:
        if block.signature:
            yield from _found(secret, block.signature)
    for ref in message.refs:
        yield from _found(secret, ref)
    if message.tool_call_id:
        yield from _found(secret, message.tool_call_id)


def _found(secret: bytes, text: str) -> Iterator[int]:
    number = pointers.find(secret, text)
    if number is not None:
        yield number
