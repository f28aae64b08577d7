"""The token path's vocabulary: what a request is matched to, planned as and read back from.

Knows no HTTP, no provider and no store. The order of a call is forward only:

    request = path.normalise(request, secret)          # fold system messages, verify pointers, place image placeholders
    keys = path.keys(request)                          # root and running fingerprints, linear in the request
    match = history.match(keys, request)               # which recorded turn does it continue, and if none, why
    plan = path.assemble(request, keys, match, parent) # prompt ids (or restored messages), cause of a break
    reading = path.read(plan, generation, ref)         # the canonical answer, its tags, its own fingerprints
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polar.chat import Answer, ChatRequest, Message
from polar.records import Break, Cause, Ids, Mode


@dataclass(frozen=True, slots=True)
class Keys:
    """Fingerprints of a normalised request.

    `root` (32 bytes) is four hashes of 8 bytes, so that two roots can be compared part by part to name what changed: model with
    renderer; canonical tools; settings (thinking switch, template arguments); system message. `strict[i]` and `loose[i]` (16
    bytes each) cover messages `0..i` inclusive; `strict` starts from the root, `loose` leaves root and system message out (its first 8
    bytes are of the first message alone).
    """

    root: bytes
    strict: tuple[bytes, ...]
    loose: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Known:
    """A normalised request's messages with their fingerprints: the next request of that conversation need not be hashed from its start."""

    messages: tuple[Message, ...]
    keys: Keys


@dataclass(frozen=True, slots=True)
class Match:
    """The turn that a request continues.

    `parent` is its number; the first `shared` messages of the request are the parent's messages plus its answer, the rest is
    new. `parent` with `cause` set means: this is the turn that the request would have continued, but its prompt must be
    rendered afresh, and why. Neither: a root of its own.
    """

    parent: int | None = None
    shared: int = 0
    cause: Cause | None = None
    detail: str = ""
    tags: frozenset[str] = frozenset()


@dataclass(slots=True)
class Plan:
    """What to send to the engine, and what will be recorded of the prompt."""

    request: ChatRequest
    """Normalised; in mode `messages` its messages carry the stored originals instead of what the harness sent back."""
    keys: Keys
    mode: Mode
    prompt_ids: Ids | None
    parent: int | None
    shared: int
    broken: Break | None = None
    tags: set[str] = field(default_factory=set)
    bridged: bool = False
    cause: Cause | None = None
    """Mode `messages`: why the prompt is expected to differ from its parent's; `settle` makes a `Break` of it where it does."""
    detail: str = ""
    begun: str = ""
    """The beginning of the answer, which the caller wrote: it ends the prompt and is not among the request's messages."""


@dataclass(slots=True)
class Reading:
    """A generation read back. `message` is the answer to record and file under `turn`/`loose`, with what the caller had begun of it;
    `answer` is what to encode."""

    answer: Answer
    message: Message
    turn: bytes
    loose: bytes
    tags: frozenset[str]
    thinking_tokens: int = 0
    thinking_hash: bytes = b""
    """8 bytes of the answer's reasoning, for `Completion.thinking_hash`."""
