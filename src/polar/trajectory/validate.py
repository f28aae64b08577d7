"""Checks rows from anywhere, in their JSON form, and says everything that is wrong with each. Pure.

`Trace` refuses what contradicts itself, at the first fault. Here a row may come from another system or a damaged file: nothing is assumed,
every check runs that can. Errors make a row unusable; warnings are worth a look.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from polar.trajectory.row import Trace

Severity = Literal["error", "warning"]
_INT32 = 2**31
_REPLACEMENT = "�"


class Codec(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, ids: list[int], /) -> str: ...


@dataclass(frozen=True, slots=True)
class Problem:
    """`code` is stable: `missing`, `type`, `length`, `vocabulary`, `mask`, `logprob`, `positive_logprob`, `masked_logprob`, `reward`,
    `contiguity`, `decode`, `nothing_trained`, `unfaithful`, `row`. `place` is an index into the response, where there is one."""

    code: str
    message: str
    severity: Severity = "error"
    place: int | None = None


def validate(row: Any, *, vocabulary: int | None = None, tokenizer: Codec | None = None) -> list[Problem]:
    """What is wrong with a row in the JSON form of `Trace`; an empty list for a good one. Never raises for a bad one.

    `vocabulary` is the number of ids of the model. With a `tokenizer`, the sampled runs must decode to the text of their messages.
    """
    try:
        return _validate(row, vocabulary, tokenizer)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        # a value that no check foresaw, deep inside the row
        return [Problem("row", f"{type(error).__name__}: {error}")]


def _validate(row: Any, vocabulary: int | None, tokenizer: Codec | None) -> list[Problem]:
    if not isinstance(row, Mapping):
        return [Problem("type", f"a row is a JSON object, not {type(row).__name__}")]
    found = list(_fields(row))
    if not any(problem.code in ("missing", "type") for problem in found):
        found += _lengths(row)
        found += _ids(row, vocabulary)
        found += _mask(row)
        found += _logprobs(row)
        found += _spans(row)
        found += _marks(row)
    if any(problem.severity == "error" for problem in found):
        return found
    try:
        trace = Trace.from_json(row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return [*found, Problem("row", f"{type(error).__name__}: {error}")]
    if tokenizer is not None:
        found += _decodes(trace, tokenizer)
    return found


def _fields(row: Mapping[str, Any]) -> Iterator[Problem]:
    for name in ("prompt_ids", "response_ids", "loss_mask", "response_logprobs"):
        if name not in row or (row[name] is None and name == "response_logprobs"):
            yield Problem("missing", f"{name} is missing")
        elif not isinstance(row[name], list):
            yield Problem("type", f"{name} is {type(row[name]).__name__}, not a list")
    if not isinstance(row.get("metadata") or {}, Mapping):
        yield Problem("type", f"metadata is {type(row['metadata']).__name__}, not an object")
    reward = row.get("reward")
    if reward is not None and (not _is_number(reward) or not math.isfinite(reward)):
        yield Problem("reward", f"the reward {reward!r} is not a finite number")


def _lengths(row: Mapping[str, Any]) -> Iterator[Problem]:
    count = len(row["response_ids"])
    for name in ("loss_mask", "response_logprobs"):
        if len(row[name]) != count:
            yield Problem("length", f"{name} has {len(row[name])} entries for {count} response_ids")


def _ids(row: Mapping[str, Any], vocabulary: int | None) -> Iterator[Problem]:
    limit = _INT32 if vocabulary is None else vocabulary
    for name in ("prompt_ids", "response_ids"):
        place = next((i for i, token in enumerate(row[name]) if type(token) is not int or not 0 <= token < limit), None)
        if place is not None:
            where = f"{name}[{place}] is {row[name][place]!r}"
            yield Problem("vocabulary", f"{where}, not an id in 0..{limit - 1}", place=place if name == "response_ids" else None)


def _mask(row: Mapping[str, Any]) -> Iterator[Problem]:
    mask = row["loss_mask"]
    place = next((i for i, value in enumerate(mask) if type(value) is not int or value not in (0, 1)), None)
    if place is not None:
        yield Problem("mask", f"loss_mask[{place}] is {mask[place]!r}, neither 0 nor 1", place=place)
    elif not any(mask):
        yield Problem("nothing_trained", "no token of the row is trained", "warning")


def _logprobs(row: Mapping[str, Any]) -> Iterator[Problem]:
    values = row["response_logprobs"]
    place = next((i for i, value in enumerate(values) if not _is_number(value) or not math.isfinite(value)), None)
    if place is not None:
        yield Problem("logprob", f"response_logprobs[{place}] is {values[place]!r}, not a finite number", place=place)
        return
    trained = list(zip(row["loss_mask"], values, strict=False))
    place = next((i for i, (mask, value) in enumerate(trained) if mask == 1 and value > 1e-3), None)
    if place is not None:
        yield Problem("positive_logprob", f"response_logprobs[{place}] is {values[place]}; a probability over 1", "warning", place)
    place = next((i for i, (mask, value) in enumerate(trained) if mask == 0 and value != 0), None)
    if place is not None:
        message = f"response_logprobs[{place}] is {values[place]} where nothing is trained; it is read as 0"
        yield Problem("masked_logprob", message, "warning", place)


def _spans(row: Mapping[str, Any]) -> Iterator[Problem]:
    """Spans, where there are any: in order, inside the row, and every trained token in a trained one."""
    spans = (row.get("metadata") or {}).get("spans")
    if spans is None:
        return
    offset, total = len(row["prompt_ids"]), len(row["prompt_ids"]) + len(row["response_ids"])
    allowed = bytearray(total)
    end = 0
    try:
        for span in spans:
            start, stop = span["start"], span["end"]
            if not end <= start <= stop <= total:
                yield Problem("contiguity", f"the span {start}..{stop} overlaps the one before it or leaves the row of {total} ids")
                return
            if span.get("trained", True):
                allowed[start:stop] = b"\1" * (stop - start)
            end = stop
    except (TypeError, KeyError, AttributeError) as error:
        yield Problem("type", f"metadata.spans is not a list of spans ({type(error).__name__}: {error})")
        return
    first = next((i for i, value in enumerate(row["loss_mask"]) if value == 1 and i < total - offset and not allowed[offset + i]), None)
    if first is not None:
        yield Problem("contiguity", f"loss_mask[{first}] is 1 outside every trained span", place=first)
    if spans and spans[0]["start"] != offset:
        yield Problem("contiguity", f"the prompt has {offset} ids, but the first span starts at {spans[0]['start']}")


def _marks(row: Mapping[str, Any]) -> Iterator[Problem]:
    if (row.get("metadata") or {}).get("faithful", True) is not True:
        yield Problem("unfaithful", "the row is marked as not faithful to the context that the engine saw", "warning")


def _decodes(trace: Trace, tokenizer: Codec) -> Iterator[Problem]:
    for span in trace.spans:
        place = span.start - trace.prompt_length
        where = f"the span {span.start}..{span.end}"
        try:
            text = tokenizer.decode(trace.ids[span.start : span.end].tolist())
        except Exception as error:  # a tokenizer's errors are its own; any of them says that these are not its ids
            yield Problem("decode", f"{where} cannot be decoded: {type(error).__name__}: {error}", place=place)
            continue
        message = trace.messages[span.message] if span.message is not None and span.message < len(trace.messages) else None
        if message is None:
            continue
        for part, wanted in (("text", message.text.strip()), ("reasoning", message.reasoning.strip())):
            if wanted and not _holds(text, wanted, in_pieces=bool(message.tool_calls)) and _REPLACEMENT not in wanted:
                yield Problem(
                    "decode", f"{where} decodes to {_short(text)}, which lacks the {part} of its message, {_short(wanted)}", place=place
                )


def _holds(text: str, wanted: str, *, in_pieces: bool) -> bool:
    """Whether `text` has what is `wanted`. A message's text is in pieces where calls stood between them, each from a new line on."""
    if wanted in text or not in_pieces:
        return wanted in text
    at = 0
    for line in filter(None, map(str.strip, wanted.split("\n"))):
        found = text.find(line, at)
        if found < 0:
            return False
        at = found + len(line)
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
