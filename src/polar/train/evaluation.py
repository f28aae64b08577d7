"""Held-out tasks, rolled out with the policy of a step and counted: pass@k with intervals, by harness. Knows no torch.

An evaluation's results are kept in `<folder>/step-000120.jsonl`, complete or not there. One that is there is not made again, and one that
was cut short asks the service for the same tasks by the same names, so that what has run is not run twice.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from polar.errors import ConfigError, RolloutError
from polar.rollout.client import AsyncClient
from polar.rollout.models import SessionResult, TaskRequest
from polar.train.disk import saving
from polar.train.passk import Estimate, interval

AT_ONCE = 16
"""Tasks whose results are followed at once."""

EvaluationRequest = Callable[[int, int, str], TaskRequest]
"""The request of planned task `number` after `step` steps, under that task id."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """An evaluation. `sessions` by harness; those without an outcome of the policy's (infrastructure) are in no estimate."""

    step: int
    results: Mapping[str, Sequence[SessionResult]]
    passed: float = 1.0
    """The reward from which on a session has passed."""

    def passes(self, harness: str) -> dict[str, list[float]]:
        """By task, 1 for each session that passed and 0 for each that did not."""
        found: dict[str, list[float]] = {}
        for result in self.results.get(harness, ()):
            if result.usable and result.reward is not None:
                found.setdefault(str(result.metadata.get("task", result.task_id)), []).append(float(result.reward >= self.passed))
        return found

    def estimate(self, harness: str, k: int = 1, *, seed: int = 0) -> Estimate | None:
        """pass@k over the tasks that have `k` sessions or more; `None`: none has."""
        enough = {task: values for task, values in self.passes(harness).items() if len(values) >= k}
        return interval(enough, k, seed=seed) if enough else None

    def values(self, ks: Sequence[int] = (1,)) -> dict[str, float]:
        """For the metrics: `eval/<harness>/pass@1`, its `low` and `high`, the mean reward, and the sessions that count and do not."""
        values: dict[str, float] = {}
        for harness, results in self.results.items():
            rewards = [result.reward for result in results if result.usable and result.reward is not None]
            for k in ks:
                if (found := self.estimate(harness, k)) is not None:
                    name = f"eval/{harness}/pass@{k}"
                    values |= {name: found.mean, f"{name}/low": found.low, f"{name}/high": found.high}
            values[f"eval/{harness}/sessions"] = len(rewards)
            values[f"eval/{harness}/lost"] = len(results) - len(rewards)
            if rewards:
                values[f"eval/{harness}/reward"] = sum(rewards) / len(rewards)
        return values


class Evaluations:
    """Evaluates by a rollout service. `tasks`: how many requests an evaluation has; `request(number, step, task_id)` makes each."""

    def __init__(
        self,
        client: AsyncClient,
        tasks: int,
        request: EvaluationRequest,
        run_id: str,
        folder: Path,
        *,
        passed: float = 1.0,
        ks: Sequence[int] = (1,),
        hear: Callable[[int, int], None] = lambda step, done: None,
        tell: Callable[[Outcome], None] = lambda outcome: None,
    ) -> None:
        if not tasks:
            raise ConfigError("an evaluation needs held-out tasks")
        self._client = client
        self._tasks = tasks
        self._request = request
        self._run_id = run_id
        self._folder = folder
        self._passed = passed
        self._ks = tuple(ks)
        self._hear = hear
        self._tell = tell

    async def __call__(self, step: int) -> Mapping[str, float]:
        """The numbers of the evaluation after `step` steps, made now if it was not made before. Raises `SaveFailed` where its results
        cannot be kept: its sessions are not run again for that."""
        return (await self.outcome(step)).values(self._ks)

    async def outcome(self, step: int) -> Outcome:
        path = results_file(self._folder, step)
        if path.is_file():
            return read_outcome(path, passed=self._passed)
        done = 0

        async def one(number: int) -> list[SessionResult]:
            nonlocal done
            task_id = f"{self._run_id}-e{step:06d}-{number:04d}"
            submitted = await self._asked(number, step, task_id)
            results = []
            async with slots:
                async for result in self._client.results(submitted):
                    results.append(result)
                    done += 1
                    self._hear(step, done)
            return sorted(results, key=lambda result: result.sample)

        slots = asyncio.Semaphore(AT_ONCE)
        running = [asyncio.create_task(one(number)) for number in range(self._tasks)]
        try:
            results = [result for task in await asyncio.gather(*running) for result in task]
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        await asyncio.to_thread(_write, path, results)
        outcome = Outcome(step, by_harness(results), self._passed)
        self._tell(outcome)
        return outcome

    async def _asked(self, number: int, step: int, task_id: str) -> str:
        try:
            return await self._client.submit(self._request(number, step, task_id), idempotency_key=task_id)
        except RolloutError as error:
            if error.code != "idempotency_key_reused":
                raise
            raise ConfigError(
                f"the evaluation after step {step} was begun with other settings of its sessions: go on with those until it is complete"
            ) from error


def results_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.jsonl"


def read_outcome(path: Path, *, passed: float = 1.0) -> Outcome:
    """An evaluation as it was kept. Raises `ConfigError` for a file that holds something else."""
    try:
        results = [SessionResult.model_validate_json(line) for line in path.read_bytes().splitlines()]
        return Outcome(int(path.stem.removeprefix("step-")), by_harness(results), passed)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not an evaluation's results: {error}") from error


def by_harness(results: Iterable[SessionResult]) -> dict[str, list[SessionResult]]:
    found: dict[str, list[SessionResult]] = {}
    for result in results:
        found.setdefault(str(result.metadata.get("harness", "unknown")), []).append(result)
    return found


def _write(path: Path, results: Sequence[SessionResult]) -> None:
    """Raises `SaveFailed`."""
    with saving("the evaluation's results", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        making = path.with_name(f".{path.name}.{os.getpid()}")
        with making.open("wb") as file:
            for result in results:
                file.write(orjson.dumps(result.model_dump(mode="json"), option=orjson.OPT_APPEND_NEWLINE))
            file.flush()
            os.fsync(file.fileno())
        making.replace(path)
