"""`command`: a shell command judges. Its reward is in `reward.txt` or `reward.json` in `$VERIFIER_LOGS`; where it leaves none, its exit
code decides: 0 is 1, any other 0.

Runs in a fresh sandbox into which the agent's work was brought (`carry`), after `tests_dir`, which the agent never saw, was put beside it
(`$VERIFIER_TESTS`). With `in_place` it runs in the agent's own sandbox, where nothing is trusted to be as it was: for tasks whose state is
the sandbox itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from polar.chat import JsonObject
from polar.errors import EvaluatorError
from polar.evaluator import rewards
from polar.evaluator.base import Evaluator, Evidence, Verdict, register
from polar.evaluator.budget import Budget
from polar.evaluator.carry import How, carry
from polar.evaluator.commands import Ran, emptied, run_tests
from polar.evaluator.guards import ALWAYS
from polar.evaluator.place import sandbox

LOGS, TESTS = "/logs/verifier", "/tests"


class CommandConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    command: str
    """A shell line, run in the work folder."""
    carry: How = "workdir"
    """What of the agent's work is brought into the fresh sandbox: its files, its patch, or nothing."""
    in_place: bool = False
    tests_dir: str | None = None
    """A folder of the node, relative to the task's, that is uploaded for the command; its path inside is `$VERIFIER_TESTS`."""
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """`None`: what is left of the evaluation's budget."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Of the named scores in `reward.json`: the reward is their weighted mean."""
    protect: list[str] = Field(default_factory=list)
    """Further names that only the task may set (`polar.evaluator.guards`), such as `conftest.py`."""
    clamp: tuple[float, float] | None = None
    user: str | None = None
    base_commit: str | None = None
    """The agent's repository, in `repo_dir` (`None`: the work folder), shows no history after it."""
    repo_dir: str | None = None

    @model_validator(mode="after")
    def _weighted(self) -> CommandConfig:
        checked_weights(self.weights)
        return self


@register
class Command(Evaluator[CommandConfig]):
    name = "command"
    Config = CommandConfig

    def __init__(self, config: CommandConfig, env: Mapping[str, str] | None = None) -> None:
        super().__init__(config, env)
        self.needs_fresh = not config.in_place

    async def evaluate(self, evidence: Evidence) -> Verdict:
        config = self.config
        async with sandbox(evidence, in_place=config.in_place) as runtime:
            budget = Budget(evidence.timeout_s)
            brought = await carry(evidence, runtime, config.carry, protect=(*ALWAYS, *config.protect), budget=budget)
            if brought.refused is not None:
                return Verdict(0.0, report={"carried": brought.report(), "reason": brought.refused})
            logs = await emptied(runtime, LOGS, budget=budget)
            env = {**self.env, "VERIFIER_LOGS": logs}
            if config.tests_dir is not None:
                tests = await emptied(runtime, TESTS, budget=budget)
                await runtime.upload(task_path(evidence, config.tests_dir), tests)
                env["VERIFIER_TESTS"] = tests
            ran = await run_tests(
                runtime,
                config.command,
                budget=budget,
                limit_s=config.timeout_seconds,
                env=env,
                user=config.user,
                log=evidence.folder / "verifier.log",
            )
            report = {"carried": brought.report(), **facts(ran)}
            if ran.timed_out:
                return Verdict(0.0, report={**report, "reason": "the command did not finish in time"})
            scores = await rewards.read(runtime, logs, weights=config.weights, keep=evidence.folder)
        if scores is None and config.weights:
            raise EvaluatorError(f"the command left no reward.json to weigh; it printed: {ran.output[-300:]}")
        reward = scores.reward if scores is not None else float(ran.exit_code == 0)
        if config.clamp is not None:
            reward = min(max(reward, config.clamp[0]), config.clamp[1])
        return Verdict(reward, metrics=dict(scores.named) if scores else {}, report=report)


def facts(ran: Ran) -> JsonObject:
    """What a report says of a run."""
    said: JsonObject = {"exit_code": ran.exit_code, "duration_s": round(ran.duration_s, 3), "output_end": ran.output[-2000:]}
    if ran.timed_out:
        said["timed_out"] = True
    if ran.truncated:
        said["output_truncated"] = True
    return said


def task_path(evidence: Evidence, path: str) -> Path:
    """A path of the configuration. Raises `EvaluatorError` where nothing is there."""
    found = Path(path)
    if not found.is_absolute():
        if evidence.task_folder is None:
            raise EvaluatorError(f"the path {path!r} is relative, and the task has no folder")
        found = evidence.task_folder / found
    if not found.exists():
        raise EvaluatorError(f"there is no {found} on this node")
    return found


def checked_weights(weights: Mapping[str, Any]) -> None:
    """Raises `ValueError` for weights that no mean can be made with."""
    if weights and not (sum(weights.values()) > 0 and all(weight >= 0 for weight in weights.values())):
        raise ValueError("weights must not be negative, and not all 0")
