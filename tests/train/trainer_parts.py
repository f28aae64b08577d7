"""Groups of made-up sessions and a tiny policy, for tests of the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_qwen3 import tiny_qwen3

from polar.harness.spec import AgentSpec
from polar.rollout.models import SessionResult, TaskRequest
from polar.train.config import TrainConfig
from polar.train.groups import Group, group_of
from polar.train.learner import Learner
from polar.train.policy import Policy
from polar.trajectory import Span, Trace, Trajectory
from polar.trajectory.ledger import Ledger, Line

VOCABULARY = 61


def tiny_policy(seed: int = 0) -> Policy:
    return Policy(tiny_qwen3(VOCABULARY, seed))


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """The same as a folder."""
    tiny_policy(seed).model.save_pretrained(folder)
    return folder


def session(
    name: str,
    reward: float | None,
    *,
    group: str = "g",
    outcome: str = "graded",
    version: str | None = "0",
    tokens: int = 12,
    ledger: int = 0,
    harness: str = "pi",
    seed: int | None = None,
    row_rewards: Sequence[float | None] | None = None,
) -> SessionResult:
    """A session of one row (or as many as `row_rewards`), each of a prompt of 8 ids and `tokens` sampled ones."""
    rng = np.random.default_rng(len(name) if seed is None else seed)
    rows = []
    for number, own in enumerate([reward] if row_rewards is None else row_rewards):
        ids = rng.integers(0, VOCABULARY, 8 + tokens).astype(np.int32)
        mask = np.arange(8 + tokens) >= 8
        logprobs = np.where(mask, np.float32(-4.0), np.float32(0)).astype(np.float32)
        span = Span(number, 8, 8 + tokens, policy_version=version, sampling={"temperature": 1.0})
        rows.append(Trace(f"{name}.0", ids, mask, logprobs, (span,), reward=own, metadata={"harness": harness}))
    lines = Ledger((Line(99, 0, ledger, "title", "test"),)) if ledger else Ledger()
    trajectory = Trajectory(f"{name}.0", tuple(rows), ledger=lines, sampled=tokens * len(rows) + ledger)
    return SessionResult(
        session_id=name,
        task_id=group,
        status="ERROR" if outcome in ("infrastructure", "cancelled") else "COMPLETED",
        outcome=outcome,  # type: ignore[arg-type]
        reward=reward,
        trajectory=trajectory.to_json(),
        sampled_tokens=trajectory.sampled,
        turns=len(rows),
        error_code="sandbox" if outcome == "infrastructure" else None,
        error="no room" if outcome == "infrastructure" else None,
        metadata={"task": f"task of {group}", "harness": harness},
    )


def recorded_group(number: int, rewards: Sequence[float | None] = (1.0, 0.0), **more: Any) -> Group:
    names = [f"s{number}-{sample}" for sample in range(len(rewards))]
    seeds = [1000 * number + sample for sample in range(len(rewards))]
    drawn = zip(names, rewards, seeds, strict=True)
    results = [session(name, reward, group=f"g{number}", seed=seed, **more) for name, reward, seed in drawn]
    return group_of(number, tuple(results))


class ListSource:
    """Groups of a list, with what the loop asked of it."""

    def __init__(self, groups: Sequence[Group], ready: Sequence[Group] = ()) -> None:
        self.groups = list(groups)
        self.waiting = list(ready)
        self.allowed: list[int] = []
        self.taken: list[int] = []
        self.closed = False
        self._next = 0

    def allow(self, upto: int) -> None:
        self.allowed.append(upto)

    async def start(self, number: int) -> None:
        self._next = number

    async def take(self) -> Group | None:
        if self._next >= len(self.groups):
            return None
        assert self._next < max(self.allowed), "taken before it was allowed"
        self.taken.append(self._next)
        self._next += 1
        return self.groups[self._next - 1]

    def ready(self) -> Sequence[Group]:
        return self.waiting

    async def aclose(self, *, over: bool = False) -> None:
        self.closed = True


class ListMetrics:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.lines.append((step, dict(values)))

    def of(self, name: str) -> list[float]:
        return [values[name] for _, values in self.lines if name in values]


def config(**more: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model": "unused",
        "tasks": "unused",
        "steps": 3,
        "batch": {"groups": 1, "samples": 2},
        "gate": {"rows": 0},
        "optimisation": {"lr": 1e-2, "token_budget": 64},
        "max_staleness": 9,
    }
    return TrainConfig.model_validate({**settings, **more})


def tiny_learner(settings: TrainConfig, policy: Policy | None = None) -> Learner:
    return Learner(policy or tiny_policy(), settings.make_optimisation(), settings.make_loss())


def weights_of(learner: Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.policy.model.parameters()]


def request_of(number: int, task_id: str) -> TaskRequest:
    """Group `number`, of two sessions."""
    return TaskRequest(
        task_id=task_id,
        instruction=f"group {number}",
        num_samples=2,
        agent=AgentSpec(harness="shell", custom_shell="true"),
        metadata={"task": f"t{number}", "harness": "shell", "group": number},
        max_attempts=1,
    )
