"""From a trace to a row of an export, and what tells rows apart. Pure; knows no file and no store.

A row's numbers are the trace's own: ids are never cut, re-tokenised or re-rendered. Text that has no UTF-8 form (half of a surrogate pair,
which a harness may send) becomes U+FFFD, as in a tokenizer.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np
import orjson

from polar.chat import JsonObject, Message
from polar.export.facts import Facts
from polar.export.spec import FileFormat, Form
from polar.records import Ids
from polar.trajectory.conversation import message_to_chat
from polar.trajectory.row import Trace

IGNORE = -100
"""The label of an id that is not trained, as torch's cross entropy has it."""
IMAGES = "holds images"
"""Why a row of text or of ids alone cannot be made: where its images stood, the model saw what no id says."""
_MESSAGE_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name")


class Unfit(Exception):
    """A trace has no row in this form; the text says why, and is counted in the manifest."""


@dataclass(frozen=True, slots=True)
class Row:
    """`values` by column (`polar.export.columns`), arrays as numpy's, or `line` where a form has its own JSON. `size` is about its bytes
    before compression.

    `content` is a digest of what a trainer would see of it, without ids that are random in every session; `prompt` one of what comes
    before the first answer.
    """

    values: JsonObject
    size: int
    content: bytes
    prompt: bytes
    line: bytes | None = None


def make(form: Form, file_format: FileFormat, trace: Trace, facts: Facts) -> Row:
    """Raises `Unfit`."""
    origin = _origin(trace, facts)
    prompt = _prompt(trace)
    if form == "chat":
        return _chat(trace, origin, prompt)
    if form == "tokens":
        return _tokens(trace, origin, prompt)
    if file_format == "jsonl":
        return _rl_line(trace, origin, prompt)
    return _rl(trace, origin, prompt)


def _origin(trace: Trace, facts: Facts) -> JsonObject:
    return {
        "session_id": trace.session,
        "rollout_id": facts.rollout_id or trace.rollout_id or trace.session,
        "group_id": facts.group_id or trace.group_id,
        "task": facts.task,
        "repository": facts.repository,
        "harness": facts.harness or trace.metadata.get("harness"),
        "role": trace.role,
        "reward": trace.reward,
        "finish_reason": trace.finish,
    }


# --- forms -------------------------------------------------------------------------------------------------------------


def _rl(trace: Trace, origin: JsonObject, prompt: bytes) -> Row:
    start = trace.prompt_length
    first = _first_answer(trace)
    messages = [message_to_chat(message) for message in trace.messages]
    metadata = {
        **trace.metadata,
        "tags": sorted(trace.tags),
        "spans": [asdict(span) for span in trace.spans],
        "faithful": trace.faithful,
        "cut": trace.cut,
    }
    values = {
        **origin,
        "prompt_ids": trace.ids[:start],
        "response_ids": trace.ids[start:],
        "loss_mask": trace.mask[start:].astype(np.int8),
        "response_logprobs": trace.logprobs[start:],
        "prompt_messages": _json(messages[:first]),
        "response_messages": _json(messages[first:]),
        "tools": _tools(trace),
        "metadata": _json(metadata),
    }
    return Row(values, _size(values), _digest(trace.ids, trace.mask.tobytes()), prompt)


def _rl_line(trace: Trace, origin: JsonObject, prompt: bytes) -> Row:
    """The JSON form of `Trace`, which the reference system's readers know."""
    facts = {name: origin[name] for name in ("task", "repository", "harness") if origin[name] is not None}
    named = replace(trace, group_id=origin["group_id"], rollout_id=origin["rollout_id"], metadata={**trace.metadata, **facts})
    line = named.dumps()
    return Row({}, len(line), _digest(trace.ids, trace.mask.tobytes()), prompt, line)


def _chat(trace: Trace, origin: JsonObject, prompt: bytes) -> Row:
    if trace.has_images:
        raise Unfit(IMAGES)
    trained = trace.trained_messages
    missing = any(span.message is None and trace.mask[span.start : span.end].any() for span in trace.spans)
    if missing or not any(trained):
        raise Unfit("its trained answers are not among its messages")
    messages = []
    for message, weight in zip(trace.messages, trained, strict=True):
        data = dict.fromkeys(_MESSAGE_FIELDS) | sound(message_to_chat(message))
        data["weight"] = int(weight)
        messages.append(data)
    tools = _tools(trace)
    values = {"messages": messages, "tools": tools, "tokens": len(trace), **origin}
    text = orjson.dumps(messages)
    anonymous = orjson.dumps([_anonymous(message) for message in messages])
    return Row(values, len(text) + _size({"tools": tools}) + 300, _digest(anonymous, tools or ""), prompt)


def _tokens(trace: Trace, origin: JsonObject, prompt: bytes) -> Row:
    if trace.has_images:
        raise Unfit(IMAGES)
    values = {
        "input_ids": trace.ids,
        "attention_mask": np.ones(len(trace), np.int8),
        "labels": np.where(trace.mask, trace.ids, np.int32(IGNORE)),
        **origin,
    }
    return Row(values, _size(values), _digest(trace.ids, trace.mask.tobytes()), prompt)


# --- parts -------------------------------------------------------------------------------------------------------------


def _first_answer(trace: Trace) -> int:
    """The index of the message at which the response begins, as in `Trace.dumps`."""
    return min((span.message for span in trace.spans if span.message is not None), default=max(len(trace.messages) - 1, 0))


def _tools(trace: Trace) -> str | None:
    return _json([tool.schema() for tool in trace.tools]) if trace.tools else None


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return orjson.dumps(sound(value)).decode()


def _size(values: JsonObject) -> int:
    return sum(value.nbytes if isinstance(value, np.ndarray) else len(value) if isinstance(value, str) else 8 for value in values.values())


def sound(value: Any) -> Any:
    """The value with all of its text in a form that UTF-8 has."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, dict):
        return {sound(key): sound(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [sound(item) for item in value]
    return value


# --- what tells rows apart ---------------------------------------------------------------------------------------------


def _anonymous(message: JsonObject) -> JsonObject:
    """A message without the ids of its tool calls."""
    calls = [call["function"] for call in message["tool_calls"] or ()]
    return {**message, "tool_calls": calls, "tool_call_id": None}


def _prompt(trace: Trace) -> bytes:
    """Of the messages before the first answer, or of the ids where a row has no messages."""
    if not trace.messages:
        return _digest(trace.prompt_ids)
    opening = takewhile(lambda message: message.role != "assistant", trace.messages)
    return _digest(orjson.dumps([[message.role, sound(_said(message))] for message in opening]))


def _said(message: Message) -> list[str]:
    return [message.text, *(image.url for image in message.images)]


def _digest(*pieces: bytes | str | Ids) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for piece in pieces:
        raw = piece.encode() if isinstance(piece, str) else bytes(piece) if isinstance(piece, bytes) else piece.tobytes()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.digest()
