"""What a set of finished tasks came to: counts by outcome, rewards, turns, tokens, the time of each stage. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from polar.rollout.models import SessionResult, TaskResult, Timing

STAGES = ("queue_ms", "init_ms", "ready_ms", "run_ms", "build_ms", "evaluate_ms", "teardown_ms")
"""Of `Timing`, in the order in which a session goes through them."""


@dataclass(frozen=True, slots=True)
class Line:
    """What the line is about, and its sessions' numbers. Means are over the sessions that have the number; NaN: none has."""

    name: str
    sessions: int
    outcomes: dict[str, int]
    reward: float
    passed: int
    """Sessions with a reward of 1 or more."""
    pass_interval: tuple[float, float]
    """95% of Wilson's for passed / rewarded sessions."""
    turns: float
    sampled_tokens: int
    rows: int
    retries: int
    """Attempts beyond the first."""
    stage_s: dict[str, float] = field(default_factory=dict)

    @property
    def infrastructure(self) -> int:
        return self.outcomes.get("infrastructure", 0)


def summarise(groups: Iterable[TaskResult], by: Callable[[SessionResult], str]) -> list[Line]:
    """A line for each value of `by`, in order of first appearance."""
    found: dict[str, list[SessionResult]] = {}
    for group in groups:
        for result in group.results:
            found.setdefault(by(result), []).append(result)
    return [line(name, results) for name, results in found.items()]


def line(name: str, results: Sequence[SessionResult]) -> Line:
    rewards = [result.reward for result in results if result.reward is not None]
    passed = sum(reward >= 1.0 for reward in rewards)
    return Line(
        name=name,
        sessions=len(results),
        outcomes=dict(Counter(result.outcome or "unknown" for result in results)),
        reward=_mean(rewards),
        passed=passed,
        pass_interval=wilson(passed, len(rewards)),
        turns=_mean([result.turns for result in results]),
        sampled_tokens=sum(result.sampled_tokens for result in results),
        rows=sum(len((result.trajectory or {}).get("traces", ())) for result in results),
        retries=sum(result.attempt for result in results),
        stage_s={stage: _mean([_stage(result.timing, stage) / 1000 for result in results]) for stage in STAGES},
    )


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval of a proportion (Wilson, 1927), which stays inside 0..1 and is right for few trials; NaN for none."""
    if trials == 0:
        return math.nan, math.nan
    rate = successes / trials
    centre = rate + z * z / (2 * trials)
    spread = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def exit_code(groups: Sequence[TaskResult], expected_sessions: int) -> int:
    """0: every session has an outcome of the policy's. 1: some failed by infrastructure, were cancelled or are missing."""
    results = [result for group in groups for result in group.results]
    good = sum(result.outcome in ("graded", "policy") for result in results)
    return 0 if good == expected_sessions else 1


def _stage(timing: Timing, name: str) -> float:
    value = getattr(timing, name)
    return float(value or 0.0)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan
