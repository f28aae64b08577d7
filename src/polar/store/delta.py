"""A completion as a row that holds only what its base does not, and back. Knows no SQL.

The base is the completion's parent, or none. Against it are stored: prompt ids beyond the longest common prefix with
`base.prompt_ids + base.sampled_ids`; messages that are not among `base.messages + base.answer`; and those of the plain fields that changed.
Nothing is taken on trust: `Completion.shared` is recorded, but every id and message is compared, so what comes back is what was given
even where a harness rewrote its history. Content that unrelated completions share (tool sets, long messages, the leading ids of a
prompt without base) is addressed by its hash.

The body is a JSON object: `messages` is a list of `[start, count]` (copied from the base), `"hash"` (a blob) and whole messages;
`answer` is a message; then the fields of `_FIELDS` that have neither their default nor the base's value, and `same`, the names of those
that have the base's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from polar.chat import JsonObject, Message, Tool
from polar.records import Break, Cause, Completion, Ids
from polar.store.arrays import common_prefix, exact, needs_reference, pack, pack_floats, pack_ids, unpack, unpack_floats, unpack_ids
from polar.store.codec import dumps, loads, message_from_json, message_to_json, tools_from_json, tools_to_json

Row = Mapping[Any, Any]
Blobs = Callable[[bytes], bytes]
"""The content of a blob by its hash; raises `KeyError` for one that is not there."""

BLOCK = 1024
"""Ids in a block of a prompt without base. Prompts that start alike (system and tools) share their leading blocks."""
LONG_MESSAGE = 4096
"""Bytes of JSON from which a message is kept by hash: a system prompt, an image."""
LONG_SUFFIX = 1024
"""Ids from which a prompt's suffix is worth a search for what it has in common with the base further on."""

_FIELDS = (
    "dialect", "mode", "finish", "shared", "model_requested", "model", "policy_version", "sampling", "asked", "stop_sequence",
    "cached_tokens", "thinking_tokens", "untrainable", "provenance", "hints", "options", "started", "ended",
    "routed_experts",
)  # fmt: skip
_COLUMNS = ("session", "number", "choice", "parent", "status", "delivered", "stored", "root", "turn", "loose", "thinking_hash")
_DEFAULTS = {f.name: f.default for f in fields(Completion)} | {name: {} for name in ("sampling", "asked", "provenance", "hints", "options")}


@dataclass(slots=True)
class Encoded:
    """`row` for the table, `blobs` that it refers to (packed, by hash), and `completion`: equal to the one given, sharing its unchanged
    messages with the base's, so that a cache of a conversation's turns holds each text once."""

    row: dict[str, Any]
    completion: Completion
    blobs: dict[bytes, bytes] = field(default_factory=dict)
    copied: bool = False
    """Whether the completion goes on from all of its base: nobody is likely to ask for the base again."""


def digest(content: bytes) -> bytes:
    """16 bytes: the address of a blob."""
    return hashlib.blake2b(content, digest_size=16).digest()


def encode(completion: Completion, base: Completion | None, depth: int, known: Callable[[bytes], bool]) -> Encoded:
    """The row of `completion` against `base`. Blobs that are `known` to be on disk are left out.

    Raises `ValueError` or `TypeError` for what cannot be stored without loss.
    """
    blobs: dict[bytes, bytes] = {}

    def keep(content: bytes) -> bytes:
        address = digest(content)
        if address not in blobs and not known(address):
            blobs[address] = pack(content)
        return address

    prompt_ids = None if completion.prompt_ids is None else exact(completion.prompt_ids, np.int32, "prompt_ids")
    sampled_ids = None if completion.sampled_ids is None else exact(completion.sampled_ids, np.int32, "sampled_ids")
    logprobs = None if completion.logprobs is None else exact(completion.logprobs, np.float32, "logprobs")
    row = {name: getattr(completion, name) for name in _COLUMNS}
    row |= {
        "sampled": 0 if sampled_ids is None else len(sampled_ids),
        "base": None if base is None else base.number,
        "depth": depth,
        "tools": keep(dumps(tools_to_json(completion.tools))) if completion.tools else None,
        "prompt_keep": 0,
        "prompt_blocks": None,
        "prompt_ids": None,
        "sampled_ids": None if sampled_ids is None else pack_ids(sampled_ids),
        "logprobs": None if logprobs is None else pack_floats(logprobs),
    }
    kept_all = base is not None
    if prompt_ids is not None:
        kept_all &= _encode_prompt(row, prompt_ids, base, keep)

    history = () if base is None else (*base.messages, base.answer)
    items, messages = _encode_messages(completion.messages, history, keep)
    body: JsonObject = {"messages": items, "answer": message_to_json(completion.answer)}
    same = _encode_fields(body, completion, base)
    if same:
        body["same"] = same
    row["body"] = pack(dumps(body))
    cached = replace(completion, messages=messages, prompt_ids=prompt_ids, sampled_ids=sampled_ids, logprobs=logprobs)
    return Encoded(row, cached, blobs, copied=kept_all)


def _encode_prompt(row: dict[str, Any], ids: Ids, base: Completion | None, keep: Callable[[bytes], bytes]) -> bool:
    """Fills the prompt's columns. True if the whole of the base's ids was a prefix."""
    if base is None:
        whole = len(ids) // BLOCK
        addresses = [keep(pack_ids(ids[i * BLOCK : (i + 1) * BLOCK])) for i in range(whole)]
        row["prompt_blocks"] = b"".join(addresses) or None
        row["prompt_ids"] = pack_ids(ids[whole * BLOCK :])
        return False
    prompt, sampled = _halves(base)
    length = common_prefix(ids, prompt)
    if length == len(prompt):
        length += common_prefix(ids[length:], sampled)
    left = len(prompt) + len(sampled) - length
    reference = _ids(base)[length:] if min(len(ids) - length, left) >= LONG_SUFFIX else None
    row["prompt_keep"] = length
    row["prompt_ids"] = pack_ids(ids[length:], reference)
    return left == 0


def _encode_messages(
    messages: Sequence[Message], history: Sequence[Message], keep: Callable[[bytes], bytes]
) -> tuple[list[Any], tuple[Message, ...]]:
    """The body's `messages`, and the messages with copied ones replaced by the history's own objects."""
    items: list[Any] = []
    shared: list[Message] = []
    places: dict[Message, int] | None = None
    expected = 0  # where in the history the next message stands, if nothing was edited
    edited = False
    for message in messages:
        place: int | None = None
        if expected < len(history) and (history[expected] is message or history[expected] == message):
            place = expected
        elif edited or expected + 1 < len(history):  # an echo of the answer, the history's last, is new: look no further
            if places is None:
                places = {old: i for i, old in enumerate(history)}
            place = places.get(message)
        if place is None:
            data = message_to_json(message)
            raw = dumps(data)
            items.append(data if len(raw) < LONG_MESSAGE else keep(raw).hex())
            shared.append(message)
            edited |= expected + 1 < len(history)
            expected += 1
        else:
            last = items[-1] if items else None
            if isinstance(last, list) and sum(last) == place:
                last[1] += 1
            else:
                items.append([place, 1])
            shared.append(history[place])
            expected = place + 1
    return items, tuple(shared)


def _encode_fields(body: JsonObject, completion: Completion, base: Completion | None) -> list[str]:
    same: list[str] = []
    for name in _FIELDS:
        value = getattr(completion, name)
        if base is not None and _same(value, getattr(base, name)):
            if not _same(value, _DEFAULTS[name]):
                same.append(name)
        elif not _same(value, _DEFAULTS[name]):
            body[name] = value
    if completion.request_digest:
        body["request_digest"] = completion.request_digest.hex()
    if completion.tags:
        body["tags"] = sorted(completion.tags)
    if completion.broken is not None:
        broken = completion.broken
        body["broken"] = [broken.cause.value, broken.parent, broken.position, broken.lost, broken.detail]
    return same


def _same(a: Any, b: Any) -> bool:
    """Equal as JSON text: unlike `==` this tells 1 from 1.0 and sees the order of keys."""
    if a is b:
        return True
    return type(a) is type(b) and (dumps(a) == dumps(b) if isinstance(a, dict | float) else bool(a == b))


# --- and back ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Opened:
    """A row whose body has been read, so that the blobs it refers to are known before it is decoded."""

    row: Row
    body: JsonObject

    @classmethod
    def of(cls, row: Row) -> Opened:
        return cls(row, loads(unpack(row["body"])))

    @property
    def blocks(self) -> list[bytes]:
        joined = self.row["prompt_blocks"] or b""
        return [joined[i : i + 16] for i in range(0, len(joined), 16)]

    def addresses(self) -> set[bytes]:
        found = set(self.blocks)
        found.update(bytes.fromhex(item) for item in self.body["messages"] if isinstance(item, str))
        if self.row["tools"] is not None:
            found.add(bytes(self.row["tools"]))
        return found


def decode(opened: Opened, base: Completion | None, blobs: Blobs, tools: Callable[[bytes], tuple[Tool, ...]]) -> Completion:
    """The completion of a row, given its base in full. `tools` reads a tool set by its hash (and may share what it read before)."""
    row, body = opened.row, opened.body
    history = () if base is None else (*base.messages, base.answer)
    messages: list[Message] = []
    for item in body["messages"]:
        if isinstance(item, list):
            messages.extend(history[item[0] : item[0] + item[1]])
        else:
            messages.append(message_from_json(loads(blobs(bytes.fromhex(item))) if isinstance(item, str) else item))
    values: dict[str, Any] = {name: row[name] for name in _COLUMNS}
    for name in ("root", "turn", "loose", "thinking_hash"):
        values[name] = bytes(values[name])
    values |= {name: body[name] for name in _FIELDS if name in body}
    if base is not None:
        values |= {name: getattr(base, name) for name in body.get("same", ())}
    if "broken" in body:
        cause, *rest = body["broken"]
        values["broken"] = Break(Cause(cause), *rest)
    return Completion(
        **values,
        messages=tuple(messages),
        answer=message_from_json(body["answer"]),
        tools=() if row["tools"] is None else tools(bytes(row["tools"])),
        prompt_ids=_decode_prompt(opened, base, blobs),
        sampled_ids=None if row["sampled_ids"] is None else unpack_ids(row["sampled_ids"]),
        logprobs=None if row["logprobs"] is None else unpack_floats(row["logprobs"]),
        request_digest=bytes.fromhex(body.get("request_digest", "")),
        tags=frozenset(body.get("tags", ())),
    )


def read_tools(content: bytes) -> tuple[Tool, ...]:
    """The tool set that a blob holds."""
    return tools_from_json(loads(content))


def _decode_prompt(opened: Opened, base: Completion | None, blobs: Blobs) -> Ids | None:
    row = opened.row
    if row["prompt_ids"] is None:
        return None
    if base is None:
        return np.concatenate([*(unpack_ids(blobs(address)) for address in opened.blocks), unpack_ids(row["prompt_ids"])])
    prompt, sampled = _halves(base)
    keep = row["prompt_keep"]
    packed = row["prompt_ids"]
    suffix = unpack_ids(packed, _ids(base)[keep:] if needs_reference(packed) else None)
    return np.concatenate([prompt[:keep], sampled[: max(0, keep - len(prompt))], suffix])


def _halves(completion: Completion) -> tuple[Ids, Ids]:
    """Prompt and sampled ids, empty where there are none."""
    none = np.empty(0, dtype=np.int32)
    return (
        none if completion.prompt_ids is None else completion.prompt_ids,
        none if completion.sampled_ids is None else completion.sampled_ids,
    )


def _ids(completion: Completion) -> Ids:
    return np.concatenate(_halves(completion))
