"""A group: the sessions of one task under one harness, GRPO's unit. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from polar.rollout.models import SessionResult
from polar.train.advantages import Advantage, Rollout, advantages


@dataclass(frozen=True, slots=True)
class Group:
    """`results`: as the rollout service delivers them, one a session. `number`: in the run, from 0."""

    number: int
    results: tuple[SessionResult, ...]
    task: str = ""
    harness: str = ""


def group_of(number: int, results: tuple[SessionResult, ...]) -> Group:
    """Task and harness are what the sessions' metadata say."""
    metadata = results[0].metadata if results else {}
    return Group(number, results, str(metadata.get("task", "")), str(metadata.get("harness", "")))


def reward_of(result: SessionResult) -> float | None:
    """Only what the policy did has a reward (law 5)."""
    return result.reward if result.usable else None


def rollouts_of(group: Group) -> list[Rollout]:
    """For `polar.train.advantages`."""
    return [Rollout(result.session_id, str(group.number), reward_of(result)) for result in group.results]


def teaches(group: Group, how: Advantage) -> bool:
    """Whether any session of the group gets an advantage. Looks at rewards only."""
    return bool(advantages(rollouts_of(group), how).values)
