"""Ids and log-probabilities of a server's JSON as arrays, and the reasons why they must not be trained. Pure functions."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence, Sized
from typing import Any, TypeGuard

import numpy as np

from polar.engines.base import Floats, Generation, Ids

FLOOR = -9999.0
"""OpenAI's and vLLM's stand-in for minus infinity: no log-probability that anything was sampled with."""
_ID = "token_id:"
_LARGEST = 2**31 - 1


def ids_array(values: Any) -> Ids | None:
    """int32[n]; `None` for anything but a list of integers (or what this made of one). An empty list is a real, empty answer."""
    if isinstance(values, np.ndarray):
        return values
    if not isinstance(values, list) or not set(map(type, values)) <= {int}:
        return None
    try:
        array = np.array(values, dtype=np.int64)
    except OverflowError:
        return None
    if len(array) and (array.min() < 0 or array.max() > _LARGEST):
        return None
    return array.astype(np.int32)


def routed_experts(packed: Any, sampled: int) -> str | None:
    """vLLM's expert routing of a whole row, cut to the positions that its `sampled` ids were predicted from, in the same form: base64 of a
    `.npy` of integers [tokens, layers, experts]. It has a row for every token but the last, which nothing was computed from; `None` where
    the server sent none. Raises `ValueError` for anything else, and where there are fewer rows than sampled ids."""
    if not isinstance(packed, str):
        return None
    array = np.load(io.BytesIO(base64.b64decode(packed, validate=True)), allow_pickle=False)
    if array.ndim != 3 or not np.issubdtype(array.dtype, np.integer) or len(array) < sampled:
        raise ValueError(f"routed_experts is {array.dtype} of shape {array.shape} for {sampled} sampled tokens")
    buffer = io.BytesIO()
    np.save(buffer, array[len(array) - sampled :], allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def are_ids(values: Any) -> TypeGuard[list[int]]:
    """Whether these are a few token ids; `ids_array` is for many."""
    if not isinstance(values, list):
        return False
    for value in values:  # noqa: SIM110 - a generator costs more than all else here, and a live token passes
        if type(value) is not int or not 0 <= value <= _LARGEST:
            return False
    return True


def ids_from_names(names: Any) -> Ids | None:
    """int32[n] from vLLM's `return_tokens_as_token_ids` strings (`token_id:151645`); `None` where they are anything else."""
    numbers = ids_of_names(names)
    try:
        return None if numbers is None else np.array(numbers, dtype=np.int32)
    except OverflowError:
        return None


def ids_of_names(names: Any) -> list[int] | None:
    """As `ids_from_names`, as integers of any size."""
    if not isinstance(names, list):
        return None
    if not names:
        return []
    if len(names) == 1 and isinstance(names[0], str) and names[0][: len(_ID)] == _ID and names[0][len(_ID) :].isdecimal():
        return [int(names[0][len(_ID) :])]
    try:
        joined = "\n" + "\n".join(names)
        numbers = joined.split("\n" + _ID)
        if numbers[0] or len(numbers) != len(names) + 1 or joined.count("\n") != len(names):
            return None
        return list(map(int, numbers[1:]))
    except (TypeError, ValueError):
        return None


def logprobs_array(values: Any) -> Floats | None:
    """float32[n] with NaN for each one that is missing: null, a NaN or infinity literal, or the floor (B95)."""
    if not isinstance(values, list):
        return None
    try:
        array = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    except (TypeError, ValueError):
        return None
    if array.ndim != 1:
        return None
    array[~np.isfinite(array) | (array <= FLOOR)] = np.nan
    return array.astype(np.float32)


def top_ids(entries: Any) -> list[tuple[int | str, float]]:
    """One token's alternatives, from `{name: logprob}`; names that are ids become integers."""
    if not isinstance(entries, dict):
        return []
    return [(name_or_id(name), float(value)) for name, value in entries.items() if value is not None]


def name_or_id(name: str) -> int | str:
    return int(name[9:]) if name.startswith(_ID) and name[9:].isdigit() else name


def settle(
    generations: Sequence[Generation], completion_tokens: int | None, *, prompt_expected: bool = False, sent: Sized | None = None
) -> None:
    """Sets `untrainable` where ids, log-probabilities and the server's own count (over all choices) contradict each other (B92, B93).

    `sent`: the prompt ids that the server was given. One that counts others has cut them (SGLang's `--allow-auto-truncate`, in silence) or
    added to them, and has sampled after another prompt than is recorded.

    Log-probabilities that do not line up are dropped: which token each belongs to would be a guess.
    """
    counts = [0 if generation.token_ids is None else len(generation.token_ids) for generation in generations]
    for generation, count in zip(generations, counts, strict=True):
        if generation.token_ids is None:
            generation.untrainable = "the engine returned no sampled ids"
        elif prompt_expected and (generation.prompt_ids is None or not len(generation.prompt_ids)):
            generation.untrainable = "the engine returned no prompt ids"
        elif sent is not None and generation.prompt_tokens not in (0, len(sent)):
            generation.untrainable = f"{len(sent)} prompt ids were sent, and the engine counts {generation.prompt_tokens}"
        elif generation.logprobs is None:
            generation.untrainable = "the engine returned no log-probabilities"
        elif len(generation.logprobs) != count:
            generation.untrainable = f"the engine returned {len(generation.logprobs)} log-probabilities for {count} ids"
        elif completion_tokens is not None and completion_tokens != sum(counts):
            generation.untrainable = f"the engine returned {sum(counts)} ids and counts {completion_tokens} tokens"
        if generation.logprobs is not None and len(generation.logprobs) != count:
            generation.logprobs = None
