"""What is recorded: sessions and completions, as plain data.

Shared by the token path (which makes and matches them), the store (which keeps them) and the trajectory builders (which read them).
Knows no database, no provider and no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polar.chat import JsonObject, Message, Tool

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mode = Literal["tokens", "messages"]
SessionKind = Literal["train", "eval"]
Status = Literal["complete", "aborted"]
"""`aborted`: the client left, or the engine died, after tokens had been sampled; its ids are kept and never trained."""


class Cause(StrEnum):
    """Why a prompt does not extend its predecessor (law 8)."""

    VOLATILE_HEADER = "volatile_header"
    TOOLS_CHANGED = "tools_changed"
    SETTINGS_CHANGED = "settings_changed"
    SYSTEM_CHANGED = "system_changed"
    THINKING_STRIPPED = "thinking_stripped"
    ARGUMENTS_RESERIALISED = "arguments_reserialised"
    HISTORY_EDITED = "history_edited"
    RENDERER_REFUSED = "renderer_refused"
    BRIDGING_OFF = "bridging_off"
    IMAGE = "image"
    COMPACTION = "compaction"
    SUB_AGENT = "sub_agent"
    BPE_SPLIT = "bpe_split"
    RETRY = "retry"
    MODEL_CHANGED = "model_changed"


@dataclass(frozen=True, slots=True)
class Break:
    """A prompt that does not extend its parent's ids.

    `parent` is the completion that it would have extended, `position` the index of the first differing id in the
    prompt, `lost` the number of ids of `parent.prompt_ids + parent.sampled_ids` from there on. `detail` is for people.
    """

    cause: Cause
    parent: int
    position: int
    lost: int
    detail: str = ""


@dataclass(slots=True)
class Session:
    """One harness run. `key_hash` is SHA-256 of the secret key, which is stored nowhere; `secret` signs the references
    that this session's answers carry. `settings` are the gateway's per-session ones (sampling, budgets, stream)."""

    id: str
    key_hash: bytes
    secret: bytes
    kind: SessionKind = "train"
    created: float = 0.0
    closed: float | None = None
    settings: JsonObject = field(default_factory=dict)
    metadata: JsonObject = field(default_factory=dict)


@dataclass(slots=True)
class Completion:
    """One model call, complete.

    `number` counts from 0 within the session, in order of arrival; it is given at arrival, so a failed call leaves a
    gap. `prompt_ids`, `sampled_ids`: int32[n]; `None` where the engine sent none. `logprobs`: float32[len(sampled_ids)],
    NaN where one is missing. `messages` is the canonical request (system message first, if any),
    `answer` the model's own message as parsed, with arguments and thinking as sampled. `shared` counts the leading
    `messages` that are `parent.messages` plus `parent.answer`.

    Hashes of the token path: `root` (32 bytes) is of what a prefix depends on, see `polar.tokens.plan.Keys`; `turn` and
    `loose` (16 bytes) are of root + messages + answer and of messages + answer alone; `thinking_hash` (8 bytes) of the
    answer's reasoning. `request_digest` is of the wire body. `tags` are facts seen at capture: `ambiguous_parent`,
    `tool_call_malformed`, `constrained`, `greedy`, `clamped`, `prefilled`, `thinking_open`, ... `untrainable` says why nothing of it
    can be trained.
    `choice` > 0 for the further choices of one call with `n` > 1; each is a completion of its own.
    """

    session: str
    number: int
    status: Status
    dialect: str
    mode: Mode
    messages: tuple[Message, ...]
    answer: Message
    finish: str
    parent: int | None = None
    shared: int = 0
    choice: int = 0
    tools: tuple[Tool, ...] = ()
    prompt_ids: Ids | None = None
    sampled_ids: Ids | None = None
    logprobs: Floats | None = None
    root: bytes = b""
    turn: bytes = b""
    loose: bytes = b""
    thinking_hash: bytes = b""
    request_digest: bytes = b""
    model_requested: str = ""
    model: str = ""
    policy_version: str | None = None
    sampling: JsonObject = field(default_factory=dict)
    """As used by the engine."""
    asked: JsonObject = field(default_factory=dict)
    """As the harness asked: sampling, thinking, effort, tool choice, response format, stream."""
    stop_sequence: str | None = None
    cached_tokens: int = 0
    thinking_tokens: int = 0
    broken: Break | None = None
    tags: frozenset[str] = frozenset()
    untrainable: str | None = None
    provenance: JsonObject = field(default_factory=dict)
    """Engine and its version, tokenizer hash, renderer and its version and settings, template hash."""
    hints: JsonObject = field(default_factory=dict)
    """What a harness recipe may need to tag the call: path, user agent, session and sub-agent headers; never a key."""
    stored: bool = False
    """Whether the caller may retrieve it by its response id (Responses `store`)."""
    routed_experts: str | None = None
    """Of a mixture of experts, where the engine tells: base64 of a `.npy` of integers [len(sampled_ids), layers, experts a token], row i
    for the position that sampled id i was predicted from (so a trainer can send it through the same experts)."""
    options: JsonObject = field(default_factory=dict)
    """`ChatRequest.options` where `stored`: what the dialect needs to show it again."""
    started: float = 0.0
    ended: float = 0.0
    delivered: bool = False
    """Whether the client took the whole answer; set after the fact, best effort."""

    @property
    def ids(self) -> Ids | None:
        """`prompt_ids + sampled_ids`, what a next prompt must start with; `None` where either is missing."""
        if self.prompt_ids is None or self.sampled_ids is None:
            return None
        return np.concatenate([self.prompt_ids, self.sampled_ids])


@dataclass(frozen=True, slots=True)
class Head:
    """What matching needs to know of a completion, without its content."""

    number: int
    root: bytes
    turn: bytes
    loose: bytes
    thinking_hash: bytes
    parent: int | None
    status: Status
    delivered: bool
    choice: int = 0
    sampled: int = 0
    """Number of sampled ids, for budgets."""
