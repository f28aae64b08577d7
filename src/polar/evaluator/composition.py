"""`composition`: several evaluators make one reward. The report holds each part's.

A `required` part with a reward of 0 or less makes the whole 0, and the parts after it are not run. An error of any part is an error of the
whole: a reward without one of its parts would be another reward.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from polar.errors import ConfigError
from polar.evaluator.base import Evaluator, Evidence, Verdict, make, register
from polar.evaluator.budget import Budget
from polar.evaluator.place import pausing
from polar.evaluator.report import Framed, part
from polar.rollout.models import WeightedEvaluator

if TYPE_CHECKING:
    from polar.rollout.models import EvaluatorSpec

Combine = Literal["mean", "weighted_sum", "min", "max", "product"]


class CompositionConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    parts: list[WeightedEvaluator] = Field(min_length=1)
    combine: Combine = "mean"
    """`mean`: weighted, so that it stays in the parts' range; `weighted_sum`: weights may be negative (a penalty); `min`, `max`, `product`:
    of the parts' rewards, without weights."""

    @model_validator(mode="after")
    def _mean_needs_weight(self) -> CompositionConfig:
        if self.combine == "mean" and not (sum(one.weight for one in self.parts) > 0 and all(one.weight >= 0 for one in self.parts)):
            raise ValueError("weights of a mean must not be negative, and not all 0")
        return self


@register
class Composition(Evaluator[CompositionConfig]):
    name = "composition"
    Config = CompositionConfig

    def __init__(self, config: CompositionConfig, env: Mapping[str, str] | None = None) -> None:
        super().__init__(config, env)
        self.parts = [(one, Framed(resolve(one.strategy, one.config, {**self.env, **one.env}))) for one in config.parts]
        self.needs_fresh = any(evaluator.needs_fresh for _, evaluator in self.parts)

    async def evaluate(self, evidence: Evidence) -> Verdict:
        budget = Budget(evidence.timeout_s)
        evidence = pausing(evidence, budget.paused)
        verdicts: list[Verdict] = []
        reports: list[dict[str, Any]] = []
        metrics: dict[str, float] = {}
        for number, (spec, evaluator) in enumerate(self.parts):
            name = f"{number}-{evaluator.label}"
            verdict = await evaluator.evaluate(part(evidence, name, budget.left()))
            verdicts.append(verdict)
            reports.append({"part": name, "weight": spec.weight, "reward": verdict.reward, "report": verdict.report})
            metrics.update({f"{name}.reward": verdict.reward, **{f"{name}.{key}": value for key, value in verdict.metrics.items()}})
            if spec.required and verdict.reward <= 0:
                skipped = [f"{later}-{one.label}" for later, (_, one) in enumerate(self.parts) if later > number]
                reason = f"the required part {name} gave {verdict.reward:g}"
                return Verdict(0.0, metrics=metrics, report={"parts": reports, "reason": reason, "skipped": skipped})
        weights = [spec.weight for spec, _ in self.parts]
        reward = combined(self.config.combine, [one.reward for one in verdicts], weights)
        return Verdict(reward, self._rows(evidence, verdicts, weights), metrics, {"parts": reports, "combine": self.config.combine})

    def _rows(self, evidence: Evidence, verdicts: Sequence[Verdict], weights: Sequence[float]) -> tuple[float | None, ...]:
        """Rewards of rows where any part gives some: of a part without, its one reward counts for every row; a row that any part gives
        no credit has none."""
        if not any(one.row_rewards for one in verdicts):
            return ()
        rows: list[float | None] = []
        for row in range(len(evidence.trajectory.traces)):
            values = [one.row_rewards[row] if one.row_rewards else one.reward for one in verdicts]
            known = [value for value in values if value is not None]
            rows.append(combined(self.config.combine, known, weights) if len(known) == len(values) else None)
        return tuple(rows)


def combined(how: Combine, rewards: Sequence[float], weights: Sequence[float]) -> float:
    """One reward of several; at least one, a weight each."""
    match how:
        case "mean":
            return math.fsum(reward * weight for reward, weight in zip(rewards, weights, strict=True)) / math.fsum(weights)
        case "weighted_sum":
            return math.fsum(reward * weight for reward, weight in zip(rewards, weights, strict=True))
        case "min":
            return min(rewards)
        case "max":
            return max(rewards)
        case "product":
            return math.prod(rewards)


def resolve(strategy: str, config: Mapping[str, Any], env: Mapping[str, str]) -> Evaluator[Any]:
    """The evaluator of that name, or of `module:Class`. Raises `ConfigError` for what is none, or is wrongly configured."""
    if ":" not in strategy:
        return make(strategy, config, env)
    module, _, name = strategy.partition(":")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever is in that module; an exit would end all sessions of the process
        raise ConfigError(f"the evaluator {strategy!r}: {type(error).__name__}: {error}; write module:Class") from error
    if not (isinstance(cls, type) and issubclass(cls, Evaluator)):
        raise ConfigError(f"the evaluator {strategy!r} is no subclass of polar.evaluator.Evaluator")
    return make(cls, config, env)


def from_spec(spec: EvaluatorSpec) -> Evaluator[Any]:
    """The evaluator that a task asks for, in its frame: it writes `report.json`, keeps to its time and tells its own failures by name.

    Raises `ConfigError` for an unknown name or a wrong configuration: at submission, not after the agent has worked for an hour.
    """
    return Framed(resolve(spec.strategy, spec.config, spec.env), in_place=not spec.refresh_runtime)
