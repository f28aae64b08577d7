"""The reward files of verifiers: `reward.txt` (a number) and `reward.json` (a number, or named scores). Knows who wrote neither.

Harbor's contract (https://www.harborframework.com/docs/tasks): the file decides, not the exit code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from polar.errors import EvaluatorError, UnsafePath
from polar.runtime.base import Runtime

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Scores:
    """`reward`: the one number; `named`: all numbers of `reward.json`, for metrics."""

    reward: float
    named: Mapping[str, float] = field(default_factory=dict)


def from_text(text: str) -> Scores:
    """Reads `reward.txt`. Raises `EvaluatorError`."""
    try:
        return Scores(_finite(float(text.strip()), "reward.txt"))
    except ValueError:
        raise EvaluatorError(f"reward.txt holds {text.strip()[:80]!r}, which is not a number") from None


def from_json(text: str, weights: Mapping[str, float] | None = None) -> Scores:
    """Reads `reward.json`. Of named scores the reward is the weighted mean by `weights`; without weights the score called `reward`, or
    the only one. Raises `EvaluatorError` where that does not tell it, or where it is no JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EvaluatorError(f"reward.json is not JSON: {str(error)[:200]}") from None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Scores(_finite(value, "reward.json"))
    if not isinstance(value, dict):
        raise EvaluatorError("reward.json must hold a number, or an object of named scores")
    named = {name: _finite(score, f"reward.json, {name}") for name, score in value.items() if isinstance(score, (bool, int, float))}
    if weights:
        missing = [name for name in weights if name not in named]
        if missing:
            raise EvaluatorError(f"reward.json has no score called {', '.join(missing)}; it has: {', '.join(named) or 'none'}")
        total = sum(weights.values())
        return Scores(sum(named[name] * weight for name, weight in weights.items()) / total, named)
    if "reward" in value:
        if "reward" not in named:  # another score must not stand in for it
            raise EvaluatorError(f"reward.json has a reward that is no number: {json.dumps(value['reward'])[:80]}")
        return Scores(named["reward"], named)
    if len(named) == 1:
        return Scores(next(iter(named.values())), named)
    raise EvaluatorError(f"reward.json has the scores {', '.join(named) or 'none'}: call one of them reward, or give weights")


async def read(runtime: Runtime, folder: str, *, weights: Mapping[str, float] | None = None, keep: Path | None = None) -> Scores | None:
    """What a verifier left in `folder`: `reward.json` where weights ask for names, else `reward.txt` before it; `None`: neither.

    Raises `EvaluatorError` for a file that cannot be read.
    """
    names = ("reward.json", "reward.txt") if weights else ("reward.txt", "reward.json")
    for name in names:
        try:
            content = await runtime.read(f"{folder}/{name}", max_bytes=MAX_BYTES)
        except FileNotFoundError:
            continue
        except UnsafePath as error:
            raise EvaluatorError(f"{name} is not a plain file of a sensible size: {error}") from error
        if keep is not None:
            (keep / name).write_bytes(content)
        text = content.decode(errors="replace")
        if not text.strip():
            raise EvaluatorError(f"{name} is empty")
        return from_json(text, weights) if name == "reward.json" else from_text(text)
    return None


def _finite(value: float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        raise EvaluatorError(f"{where} holds a number that no float can hold") from None
    if not math.isfinite(number):
        raise EvaluatorError(f"{where} holds {number}, which is not a finite number")
    return number
