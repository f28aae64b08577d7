"""Where a run's groups come from: sessions that a rollout service runs, or results recorded before. Knows no torch and no loss.

Groups are numbered from 0 and taken in that order, whichever ends first: what a step trains on must not depend on which sessions are quick,
and a run that goes on from a number goes on with the same groups. The number of the next one is the whole position, and goes into the
checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError, RolloutError
from polar.rollout.client import AsyncClient
from polar.rollout.models import SessionResult, TaskRequest, TaskStatus, rows_reward
from polar.train.groups import Group, group_of

WATCHED = 32
"""Groups whose results are followed at once, each over a connection of its own; those behind them are not due yet."""

NextRequest = Callable[[int, str], TaskRequest]
"""The request of group `number` under that task id."""


class Source(Protocol):
    """Groups in order."""

    def allow(self, upto: int) -> None:
        """Groups with a number below `upto` may be rolled out: how far rollouts run ahead is the trainer's to say."""
        ...

    async def start(self, number: int) -> None:
        """Goes on from group `number`. Called once, when the engines have the run's weights."""
        ...

    async def take(self) -> Group | None:
        """The next group, when it is complete; `None`: there are no more."""
        ...

    def ready(self) -> Sequence[Group]:
        """Complete groups that are not taken yet."""
        ...

    async def aclose(self, *, over: bool = False) -> None:
        """`over`: the run is done, and nobody will ask for what is not taken."""
        ...


class RecordedSource:
    """The groups of a file of results, once through, in order of their first appearance.

    A line is a `SessionResult` as the service gives it (`results.jsonl` of `polar run`), or a trajectory whose rows carry their rewards.
    Sessions with one `task_id` form a group (trajectories: with one `group_id`). Raises `ConfigError` for a line that is neither, and for a
    session that comes twice.
    """

    def __init__(self, path: Path) -> None:
        self.groups = list(read_groups(path))
        self._next = 0

    def allow(self, upto: int) -> None:
        """They are all there."""

    async def start(self, number: int) -> None:
        self._next = number

    async def take(self) -> Group | None:
        if self._next >= len(self.groups):
            return None
        self._next += 1
        return self.groups[self._next - 1]

    def ready(self) -> Sequence[Group]:
        return ()

    async def aclose(self, *, over: bool = False) -> None:
        """Nothing is open."""


def read_groups(path: Path) -> Iterator[Group]:
    """See `RecordedSource`."""
    found: dict[str, dict[str, SessionResult]] = {}
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            data = orjson.loads(line)
            result = _of_trajectory(data) if "traces" in data else SessionResult.model_validate(data).completed()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}:{number}: neither a session's result nor a trajectory ({error})") from error
        group = found.setdefault(result.task_id, {})
        if result.session_id in group:
            raise ConfigError(f"{path}:{number}: session {result.session_id} comes twice")
        group[result.session_id] = result
    if not found:
        raise ConfigError(f"{path}: there are no results")
    for number, results in enumerate(found.values()):
        yield group_of(number, tuple(results.values()))


def _of_trajectory(data: JsonObject) -> SessionResult:
    """A session's reward is the mean of its rows', as of `rows_reward`."""
    data = {**data, "status": data.get("status") or "COMPLETED"}
    metadata = data.get("metadata") or {}
    reward = rows_reward(data)
    first = (data["traces"][0].get("metadata") or {}) if data["traces"] else {}
    session = str(metadata.get("session_id") or first.get("session_id") or "")
    if not session:
        raise ValueError("it names no session")
    return SessionResult(
        session_id=session,
        task_id=str(first.get("group_id") or metadata.get("group_id") or metadata.get("task_id") or session),
        status=data["status"],
        trajectory=data,
        outcome="infrastructure" if reward is None else "graded",
        reward=reward,
        sampled_tokens=int(metadata.get("sampled_tokens") or 0),
        metadata={name: first[name] for name in ("task", "harness") if name in first},
    )


class ServiceSource:
    """Groups that a rollout service runs, submitted as far ahead as is allowed.

    A group's task id is the run's and its number, and so is its idempotency key: a run that goes on asks for the same groups again and gets
    those that have ended as they are, so that none is lost and none is rolled out twice. What an earlier process of the run left running
    beyond what is allowed now was meant for weights that the run does not have any more (it went on from a checkpoint): it is cancelled,
    and rolled out anew, under the next id, when it is due.
    """

    def __init__(
        self, client: AsyncClient, request: NextRequest, run_id: str, *, hear: Callable[[SessionResult], None] | None = None
    ) -> None:
        self._client = client
        self._request = request
        self._run_id = run_id
        self._hear = hear
        self._allowed = 0
        self._next = 0
        self._submitted = 0
        self._groups: dict[int, asyncio.Task[Group]] = {}
        self._slots = asyncio.Semaphore(WATCHED)
        self._order = asyncio.Lock()
        """Groups are submitted one after another, so that there is never one without all before it."""
        self._started = False

    def task_id(self, number: int, turn: int = 0) -> str:
        return f"{self._run_id}-g{number:06d}" + (f"-r{turn}" if turn else "")

    def allow(self, upto: int) -> None:
        self._allowed = max(self._allowed, upto)
        if self._started:
            self._follow()

    async def start(self, number: int) -> None:
        self._next = self._submitted = number
        await self._cancel_what_runs_ahead(max(self._allowed, number))
        self._started = True
        self._follow()

    async def take(self) -> Group | None:
        if self._next >= self._allowed:
            raise RuntimeError(f"group {self._next} is not allowed yet: nobody would ever roll it out")
        group = await asyncio.shield(self._groups[self._next])
        del self._groups[self._next]
        self._next += 1
        return group

    def ready(self) -> Sequence[Group]:
        done = (task for _, task in sorted(self._groups.items()) if task.done() and not task.cancelled() and task.exception() is None)
        return [task.result() for task in done]

    async def aclose(self, *, over: bool = False) -> None:
        """Stops following. What runs at the service runs on, for the run to go on with, unless the run is over."""
        for task in self._groups.values():
            task.cancel()
        await asyncio.gather(*self._groups.values(), return_exceptions=True)
        self._groups.clear()
        if over:
            await self._cancel_what_runs_ahead(self._next)

    def _follow(self) -> None:
        while self._submitted < self._allowed:
            self._groups[self._submitted] = asyncio.create_task(self._roll_out(self._submitted))
            self._submitted += 1

    async def _roll_out(self, number: int) -> Group:
        async with self._order:
            task_id = await self._submit(number)
        async with self._slots:
            results = []
            async for result in self._client.results(task_id):
                results.append(result)
                if self._hear is not None:
                    self._hear(result)
        return group_of(number, tuple(sorted(results, key=lambda one: one.sample)))

    async def _submit(self, number: int) -> str:
        turn = 0
        while True:
            task_id = self.task_id(number, turn)
            submitted = await self._asked(number, task_id)
            status = await self._client.task(submitted, results=False)
            if not await self._cancelled(status):
                return submitted
            turn += 1

    async def _asked(self, number: int, task_id: str) -> str:
        """A group that was asked for with other settings, before the run was stopped, goes on as it was."""
        try:
            return await self._client.submit(self._request(number, task_id), idempotency_key=task_id)
        except RolloutError as error:
            if error.code != "idempotency_key_reused":
                raise
            return task_id

    async def _cancel_what_runs_ahead(self, number: int) -> None:
        """From `number` on, until there is a group that was never asked for."""
        while (known := await self._known(number)) is not None:
            if known.status == "running":
                await self._client.cancel(known.task_id)
            number += 1

    async def _known(self, number: int) -> TaskStatus | None:
        """How the latest turn of a group stands at the service; `None`: it was never submitted."""
        known, turn = None, 0
        while True:
            try:
                status = await self._client.task(self.task_id(number, turn), results=False)
            except RolloutError as error:
                if error.status == 404:
                    return known
                raise
            known = status
            if not await self._cancelled(status):
                return known
            turn += 1

    async def _cancelled(self, status: TaskStatus) -> bool:
        """Whether a caller cancelled it. The early stop of a group cancels sessions, too, under a code of its own."""
        if not status.counts.get("cancelled"):
            return False
        return any([one.get("error_code") == "cancelled" async for one in self._client.sessions(status.task_id)])
