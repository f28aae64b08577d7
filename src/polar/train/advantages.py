"""Group-relative advantages: what a rollout earned, against the other rollouts of its group. Knows no model.

GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2) takes the group's mean as baseline and divides by its standard deviation;
RLOO (Ahmadian et al. 2024, arXiv:2402.14740) leaves the rollout itself out of the mean; Dr. GRPO (Liu et al. 2025, arXiv:2503.20783)
leaves the division out, since it weighs easy and hard tasks more than those between.

Rewards that agree are never divided by their deviation, which is nothing but rounding.

A rollout counts once, however many rows it has. One without a reward (failed by infrastructure, excluded, aborted) is in no statistic.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Baseline = Literal["mean", "leave_one_out", "none"]
Scale = Literal["std", "none"]
ZeroVariance = Literal["drop", "keep"]


@dataclass(frozen=True, slots=True)
class Advantage:
    """How a rollout's reward becomes its advantage.

    `zero_variance`: groups whose rewards all agree teach nothing; `drop` takes them out of the batch (DAPO's dynamic sampling, Yu et al.
    2025, arXiv:2503.14476), `keep` leaves them in with advantages of exactly 0.
    """

    baseline: Baseline = "mean"
    scale: Scale = "std"
    zero_variance: ZeroVariance = "drop"
    epsilon: float = 1e-6
    """Added to the standard deviation."""
    tolerance: float = 1e-9
    """Rewards within it agree."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One rollout's outcome; `reward` is `None` where there is none."""

    id: str
    group: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Advantages:
    """`values` by rollout id: the rollouts that are trained. `dropped` names why each of the others is not: `no_reward`,
    `zero_variance`, or `alone` (no other rollout to compare with)."""

    values: dict[str, float]
    dropped: dict[str, str]


def advantages(rollouts: Sequence[Rollout], how: Advantage | None = None) -> Advantages:
    """Every rollout is in exactly one of the two. Raises `ValueError` for a reward that is not finite and for an id that comes twice."""
    how = how or Advantage()
    groups: dict[str, list[Rollout]] = defaultdict(list)
    values: dict[str, float] = {}
    dropped: dict[str, str] = {}
    seen: set[str] = set()
    for rollout in rollouts:
        if rollout.id in seen:
            raise ValueError(f"rollout {rollout.id!r} comes twice: a rollout counts once in its group")
        seen.add(rollout.id)
        if rollout.reward is None:
            dropped[rollout.id] = "no_reward"
        elif not math.isfinite(rollout.reward):
            raise ValueError(f"rollout {rollout.id!r} has the reward {rollout.reward}")
        else:
            groups[rollout.group].append(rollout)
    for members in groups.values():
        rewards = [float(member.reward or 0.0) for member in members]
        if how.baseline != "none" and len(members) == 1:
            dropped[members[0].id] = "alone"
        elif how.baseline != "none" and _agree(rewards, how):
            for member in members:
                if how.zero_variance == "drop":
                    dropped[member.id] = "zero_variance"
                else:
                    values[member.id] = 0.0
        else:
            values.update(zip((member.id for member in members), _relative(rewards, how), strict=True))
    return Advantages(values, dropped)


def _relative(rewards: list[float], how: Advantage) -> list[float]:
    count, total = len(rewards), math.fsum(rewards)
    mean = total / count
    scale = spread(rewards, how)
    if how.baseline == "none":
        return [reward / scale for reward in rewards]
    if how.baseline == "leave_one_out":
        return [(reward - (total - reward) / (count - 1)) / scale for reward in rewards]
    return [(reward - mean) / scale for reward in rewards]


def spread(rewards: Sequence[float], how: Advantage) -> float:
    """What differences of a group's rewards are divided by; 1 where `scale` is `none`, or the rewards agree."""
    if how.scale == "none" or not rewards or _agree(rewards, how):
        return 1.0
    mean = math.fsum(rewards) / len(rewards)
    return math.hypot(*(reward - mean for reward in rewards)) / math.sqrt(len(rewards)) + how.epsilon


def _agree(rewards: Sequence[float], how: Advantage) -> bool:
    return max(rewards) - min(rewards) <= how.tolerance
