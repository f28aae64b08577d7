"""What a run asks the rollout service for: the n-th group of its training, and the tasks of an evaluation. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar.rollout.campaign import WITHOUT_MODEL, plan
from polar.rollout.checks import check_task, preset
from polar.rollout.models import TaskRequest
from polar.tasks import AnyTask
from polar.train.config import TrainConfig
from polar.train.curriculum import Curriculum
from polar.train.settings import setting
from polar.trajectory.builders import builder

EVALUATION_PRIORITY = 10
"""Evaluations go before training groups, which wait for them."""


class Requests:
    """Of one run. `held_out`: the tasks of its evaluations."""

    def __init__(self, config: TrainConfig, train: Sequence[AnyTask], held_out: Sequence[AnyTask]) -> None:
        self._config = config
        self._curriculum = Curriculum(train, config.harnesses, config.seed)
        self._harnesses = tuple(config.evaluation.harnesses or config.harnesses)
        self._held_out = [(task, harness) for task in held_out for harness in self._harnesses]

    @property
    def evaluated(self) -> int:
        """Requests of an evaluation."""
        return len(self._held_out)

    @property
    def harnesses(self) -> list[str]:
        """All that a run needs, each once."""
        return list(dict.fromkeys((*self._config.harnesses, *self._harnesses)))

    def training(self, number: int, task_id: str) -> TaskRequest:
        """Group `number`."""
        task, harness = self._curriculum.group(number)
        rollout = self._config.rollout
        more: dict[str, Any] = {"kind": "train", "sampling": self._sampling(), "metadata": {"group": number}}
        if rollout.min_usable is not None:
            more["early_stop"] = {"min_usable": rollout.min_usable, "grace_seconds": rollout.min_usable_grace_seconds}
        return self._request(task, harness, task_id, self._config.batch.samples, more)

    def evaluation(self, number: int, step: int, task_id: str) -> TaskRequest:
        """Held-out task and harness `number`, after `step` steps."""
        task, harness = self._held_out[number]
        more: dict[str, Any] = {"kind": "eval", "priority": EVALUATION_PRIORITY, "metadata": {"step": step}}
        if self._config.evaluation.sampling == "trainer":
            more |= {"kind": "train", "sampling": self._sampling()}
        return self._request(task, harness, task_id, self._config.evaluation.samples, more)

    def check(self) -> None:
        """Says at once what is wrong with the first group of each task and with the evaluation. Raises `ConfigError`."""
        for name, harnesses in (("harnesses", self._config.harnesses), ("evaluation.harnesses", self._config.evaluation.harnesses)):
            with setting(name):
                for harness in harnesses:
                    if harness not in WITHOUT_MODEL:
                        preset(harness)
        with setting("rollout.builder"):
            builder(self._config.rollout.builder)
        for number in range(len(self._curriculum.tasks)):
            self._check(self.training(number, f"check-{number}"))
        for number in range(self.evaluated):
            self._check(self.evaluation(number, 0, f"check-{number}"))

    def _check(self, request: TaskRequest) -> None:
        with setting(f"task {request.metadata['task']} under {request.agent.harness}"):
            check_task(request)

    def _request(self, task: AnyTask, harness: str, task_id: str, samples: int, more: dict[str, Any]) -> TaskRequest:
        rollout = self._config.rollout
        budget = {"max_turns": rollout.max_turns, "max_tokens": rollout.max_tokens, "agent_seconds": rollout.timeout_seconds}
        budget = {name: value for name, value in budget.items() if value is not None}
        agent = {**rollout.agent, **rollout.agents.get(harness, {})}
        if rollout.max_output is not None:
            agent["settings"] = {"max_output": rollout.max_output, **agent.get("settings", {})}
        fields = {
            "builder": {"strategy": rollout.builder},
            "on_policy_failure": rollout.on_policy_failure,
            "credit": rollout.credit,
            "max_attempts": rollout.max_attempts,
            **({"budget": budget} if budget else {}),
            **more,
        }
        return plan([task], [harness], samples=samples, runtime=rollout.runtime, agent=agent, task_id=task_id, **fields).requests[0]

    def _sampling(self) -> dict[str, float]:
        """The distribution that the trainer computes log-probabilities of: temperature, and nothing cut off or penalised."""
        return {
            "temperature": self._config.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
        }
