"""Time of an evaluation: what is left, and whom a timeout is to be charged to. Knows no sandbox and no test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from polar.errors import EvaluatorError

FAIR_SHARE = 0.5
"""Tests without a limit of their own had a fair chance if they got this share of the evaluation's whole time."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """`seconds` for a command. `fair`: a timeout is the work of the agent's code; otherwise what came before the tests had used up
    the time, which the policy cannot be charged with."""

    seconds: float
    fair: bool


class Budget:
    """Counts down from `total_s` seconds, from its construction on."""

    def __init__(self, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_s = total_s
        self._clock = clock
        self._end = clock() + total_s

    def left(self) -> float:
        """Seconds. Raises `EvaluatorError` where none is left."""
        left = self._end - self._clock()
        if left <= 0:
            raise EvaluatorError(f"the evaluation's {self.total_s:g} s were used up before it could judge; raise budget.evaluation_seconds")
        return left

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside counts for nothing: sandboxes are made on another budget."""
        begun = self._clock()
        try:
            yield
        finally:
            self._end += self._clock() - begun

    def allowance(self, limit_s: float | None) -> Allowance:
        """What a command with this limit of its own (`None`: none) gets. Raises `EvaluatorError` where nothing is left."""
        left = self.left()
        if limit_s is not None and limit_s <= left:
            return Allowance(limit_s, fair=True)
        return Allowance(left, fair=left >= self.total_s * FAIR_SHARE and (limit_s is None or left >= limit_s * FAIR_SHARE))
