"""Tasks times harnesses: submitted, followed to the end, counted. What `polar run` does with a service, wherever that is.

Knows no console and no process: callers give a client and a function that hears what happens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from polar.errors import ConfigError, RolloutError
from polar.harness.spec import AgentSpec
from polar.rollout.client import AsyncClient
from polar.rollout.models import Event, TaskRequest, TaskResult
from polar.runtime.spec import RuntimeSpec
from polar.tasks import AnyTask, noop_agent, oracle_agent, to_request

WITHOUT_MODEL = ("oracle", "noop")
"""Agents that any task has: its reference solution, and nothing. Each makes one model call, so that it counts as a run."""


@dataclass(frozen=True, slots=True)
class Campaign:
    """What is to be submitted; `sessions` in all."""

    requests: tuple[TaskRequest, ...]

    @property
    def sessions(self) -> int:
        return sum(request.num_samples for request in self.requests)


def plan(
    tasks: Sequence[AnyTask],
    harnesses: Sequence[str],
    *,
    samples: int,
    runtime: RuntimeSpec,
    agent: dict[str, Any] | None = None,
    **more: Any,
) -> Campaign:
    """A group of `samples` sessions for every task and harness, tasks first. `agent` are further fields of each `AgentSpec`, `more` of each
    `TaskRequest`. Raises `ConfigError`."""
    if not harnesses:
        raise ConfigError("name at least one harness")
    requests = []
    for task in tasks:
        for harness in harnesses:
            metadata = {"harness": harness, **more.get("metadata", {})}
            requests.append(
                to_request(
                    task,
                    agent=_agent(task, harness, agent or {}),
                    runtime=runtime,
                    num_samples=samples,
                    **{**more, "metadata": metadata},
                )
            )
    return Campaign(tuple(requests))


def _agent(task: AnyTask, harness: str, fields: dict[str, Any]) -> AgentSpec:
    match harness:
        case "oracle":
            return oracle_agent(task, call=True)
        case "noop":
            return noop_agent(call=True)
        case _:
            return AgentSpec(harness=harness, **fields)


@dataclass(slots=True)
class Standing:
    """How far a campaign is: sessions by status, and the groups that have ended."""

    total: int
    states: dict[str, str] = field(default_factory=dict)
    groups: list[TaskResult] = field(default_factory=list)
    retries: int = 0

    def hear(self, event: Event) -> None:
        if event.session_id is not None and event.type in ("session.state_changed", "session.finished"):
            status = event.data.get("status")
            if isinstance(status, str):
                self.states[event.session_id] = status
        elif event.type == "session.attempt_failed":
            self.retries += 1

    def count(self, *statuses: str) -> int:
        return sum(status in statuses for status in self.states.values())


async def carry_out(
    client: AsyncClient,
    campaign: Campaign,
    *,
    on_event: Callable[[Event, Standing], None] = lambda event, standing: None,
    on_group: Callable[[TaskResult, Standing], None] = lambda group, standing: None,
) -> Standing:
    """Submits everything and waits for all of it. If the caller is cancelled, or the service refuses a part of it (`RolloutError`), what
    has not ended is cancelled at the service too."""
    standing = Standing(campaign.sessions)
    mine = {request.task_id for request in campaign.requests}

    async def listen() -> None:
        async for event in client.events():
            if event.task_id in mine:
                standing.hear(event)
                on_event(event, standing)

    ids = [request.task_id for request in campaign.requests]
    submitted: list[str] = []
    listening = asyncio.create_task(listen())
    try:
        for request in campaign.requests:
            submitted.append(await client.submit(request))
        async for group in client.groups(ids):
            standing.groups.append(group)
            on_group(group, standing)
    except asyncio.CancelledError:
        await _cancelled(client, ids, standing)  # all: one that was on its way may have come through
        raise
    except RolloutError as error:
        if error.code != "unreachable":
            await _cancelled(client, submitted, standing)
        raise
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
    return standing


async def _cancelled(client: AsyncClient, names: Sequence[str], standing: Standing) -> None:
    """Those of them that have not ended, as far as the service can be told."""
    ended = {group.task_id for group in standing.groups}
    await asyncio.gather(*(client.cancel(name) for name in names if name not in ended), return_exceptions=True)
