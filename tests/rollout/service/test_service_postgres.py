"""The same service over PostgreSQL: a whole life with a restart in the middle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from service_parts import ended, http, submit, until

from polar.errors import ConfigError
from polar.rollout.config import RolloutConfig
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.rollout.service import Service
from polar.testing.node import StubNode, broken, graded
from polar.testing.rollout import TOKEN, listening, running_service

pytestmark = pytest.mark.real


async def test_tasks_failures_cancels_events_and_a_restart(new_schema: Callable[[], str], tmp_path: Path) -> None:
    place = new_schema()
    gate = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        if request.task_id == "held":
            await gate.wait()
        return broken(request) if request.attempt == 0 and request.sample % 3 == 0 else graded(request, reward=0.5)

    node = StubNode(play=play, max_run_workers=8)
    async with listening(node.app) as own:
        async with running_service(tmp_path, store=place) as (_, url), http(url) as client:
            await node.join(url, TOKEN, own)
            await submit(client, "quick", samples=30)
            status = await ended(client, "quick")
            assert status["counts"] == {"graded": 30, "open": 0}
            assert sum(one["attempt"] for one in status["results"]) == 10
            await submit(client, "held", samples=4)
            await until(lambda: len(node.running) == 4)
            await submit(client, "unwanted", samples=50)
            assert (await client.post("/rollout/task/unwanted/cancel")).status_code == 200
        async with running_service(tmp_path, store=place) as (_, url), http(url) as client:
            node.service_url = url
            gate.set()
            assert (await ended(client, "held"))["counts"]["graded"] == 4
            counts = (await client.get("/rollout/task/unwanted")).json()["counts"]
            assert counts["cancelled"] > 0
            assert sum(counts.values()) == 50
            listed = (await client.get("/tasks")).json()["tasks"]
            assert {one["task_id"] for one in listed} == {"quick", "held", "unwanted"}
        await node.leave()


async def test_a_second_service_on_the_same_database_is_refused(new_schema: Callable[[], str], tmp_path: Path) -> None:
    place = new_schema()
    async with running_service(tmp_path, store=place):
        with pytest.raises(ConfigError, match="another rollout service"):
            await Service(RolloutConfig(store=place, save_dir=str(tmp_path)), TOKEN).start()
