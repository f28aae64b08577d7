"""The real service and a real node, over HTTP: groups come back whole, whatever fails on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from node_world import AGENT, World, until

from polar.errors import EngineUnavailable
from polar.rollout.client import AsyncClient
from polar.rollout.config import PolarConfig
from polar.rollout.models import TaskRequest
from polar.rollout.stack import serving_rollout
from polar.testing.engine import Call, Reply

Build = Callable[..., World]


def settings(folder: Path) -> PolarConfig:
    return PolarConfig.model_validate(
        {
            "rollout": {
                "port": 0,
                "token": "token",
                "store": str(folder / "rollout.db"),
                "save_dir": str(folder / "rollouts"),
                "dispatch_poll_interval_seconds": 0.05,
                "lease_seconds": 2.0,
            }
        }
    )


def task(name: str, instruction: str, samples: int = 2, **fields: Any) -> TaskRequest:
    return TaskRequest.model_validate(
        {
            "task_id": name,
            "instruction": instruction,
            "num_samples": samples,
            "timeout_seconds": 20,
            "agent": {"custom_shell": AGENT},
            "evaluator": {"strategy": "node_test", "config": {"reward": 0.5}},
            **fields,
        }
    )


async def test_a_group_is_rolled_out_graded_and_returned(world: Build, tmp_path: Path) -> None:
    build = world()
    async with serving_rollout(settings(tmp_path)) as stack, build.node(service=(stack.url, stack.token)) as node:
        async with AsyncClient(stack.url, stack.token) as client:
            await client.submit(task("t", "call 2\nprint done", samples=6))
            [done] = await client.wait("t", timeout_s=30)
            assert (done.status, done.completed_sessions) == ("completed", 6)
            results = done.results
            assert {(result.outcome, result.reward, result.turns) for result in results} == {("graded", 0.5, 2)}
            assert all(result.trajectory for result in results)
            session = results[0].session_id
            assert "harness.stdout" in {one["path"] for one in await client.artifacts(session)}
            assert [line async for line in client.log(session)] == ["done"]
        await until(lambda: not node.deliveries.waiting)
        assert node.spool.unsettled() == []
    assert build.left() == []


async def test_infrastructure_is_retried_and_policy_is_not(world: Build, tmp_path: Path) -> None:
    def script(call: Call) -> Reply | str:
        return Reply(error=EngineUnavailable("gone")) if call.number in (0, 2) else "Hi."

    build = world(script)
    async with (
        serving_rollout(settings(tmp_path)) as stack,
        build.node(service=(stack.url, stack.token)),
        AsyncClient(stack.url, stack.token) as client,
    ):
        await client.submit(task("t", "call 2\nexit 1", samples=1))
        [done] = await client.wait("t", timeout_s=30)
    [result] = done.results
    assert (result.outcome, result.error_code, result.attempt, result.reward) == ("policy", "harness_exit", 2, 0.5)


async def test_a_cancelled_task_ends_on_the_node(world: Build, tmp_path: Path) -> None:
    build = world()
    async with serving_rollout(settings(tmp_path)) as stack, build.node(service=(stack.url, stack.token)) as node:
        async with AsyncClient(stack.url, stack.token) as client:
            await client.submit(task("t", "call\nsleep 60", samples=3))
            await until(lambda: node.stages.run.used == 2)
            await client.cancel("t")
            await until(lambda: not node.attempts)
            [done] = await client.wait("t", timeout_s=30)
        await until(lambda: not node.deliveries.waiting)
    assert {result.outcome for result in done.results} == {"cancelled"}
    assert build.left() == []


async def test_a_node_that_starts_anew_gets_its_sessions_again(world: Build, tmp_path: Path) -> None:
    build = world()
    async with serving_rollout(settings(tmp_path)) as stack, AsyncClient(stack.url, stack.token) as client:
        async with build.node(service=(stack.url, stack.token)) as node:
            await client.submit(task("t", "call\nsleep 0.6", samples=2))
            await until(lambda: node.stages.run.used == 2)
        async with build.node(service=(stack.url, stack.token)):
            [done] = await client.wait("t", timeout_s=30)
    assert [(result.outcome, result.attempt) for result in done.results] == [("graded", 1)] * 2


async def test_a_service_that_starts_anew_gets_the_results(world: Build, tmp_path: Path) -> None:
    build = world()
    config = settings(tmp_path)
    async with serving_rollout(config) as stack:
        place = (stack.url, stack.token)
        running = asyncio.Event()
        ended = asyncio.Event()

        async def node() -> None:
            async with build.node(service=place) as found:
                running.set()
                await ended.wait()
                await until(lambda: not found.deliveries.waiting, 20)

        life = asyncio.create_task(node())
        await running.wait()
        async with AsyncClient(*place) as client:
            await client.submit(task("t", "call\nsleep 1", samples=2))
        await until(lambda: build.calls == 2)
    await asyncio.sleep(1.2)  # the sessions end while there is no service; config holds its port now
    async with serving_rollout(config) as stack, AsyncClient(stack.url, stack.token) as client:
        [done] = await client.wait("t", timeout_s=30)
        ended.set()
        await life
    assert [(result.outcome, result.attempt) for result in done.results] == [("graded", 0)] * 2
    assert build.calls == 2
