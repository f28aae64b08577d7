"""Stages at work: limits, back-pressure, priorities, prewarmed evaluators; and what a thousand waiting sessions cost."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable

import pytest
from node_world import World, dispatch, ended, result_of, until

from polar.errors import ConfigError, RolloutError

Build = Callable[..., World]


async def test_no_stage_has_more_than_its_workers_and_all_end(world: Build) -> None:
    build = world(max_init_workers=2, max_run_workers=2, max_postrun_workers=1, max_queue=50)
    most = {"init": 0, "run": 0, "post": 0}
    async with build.node() as node:
        requests = [dispatch("call\nsleep 0.05", f"ses_{number}") for number in range(12)]
        for request in requests:
            await node.dispatch(request)
        while node.attempts:
            for name in most:
                most[name] = max(most[name], getattr(node.stages, name).used)
            await asyncio.sleep(0.005)
        outcomes = {node.spool.result(request.attempt_id).outcome for request in requests}
        stages = node.stages
        assert [one.used for one in (stages.init, stages.ready, stages.run, stages.queued, stages.post, stages.warm) if one] == [0] * 6
    assert outcomes == {"graded"}
    assert most == {"init": 2, "run": 2, "post": 1}
    assert build.left() == []


async def test_a_full_node_refuses_and_takes_again(world: Build) -> None:
    async with world(max_init_workers=1, max_run_workers=1, max_ready=0, max_queue=1).node() as node:
        await node.dispatch(dispatch("call\nsleep 60", "ses_1"))
        await until(lambda: node.stages.run.used)
        await node.dispatch(dispatch("call\nsleep 60", "ses_2"))
        await until(lambda: node.stages.init.used)
        await node.dispatch(dispatch("call\nsleep 60", "ses_3"))
        with pytest.raises(RolloutError) as refused:
            await node.dispatch(dispatch("call", "ses_4"))
        assert (refused.value.status, refused.value.code) == (503, "node_full")
        node.cancel(await until(lambda: node.books.find("ses_3")))
        await until(lambda: node.books.find("ses_3") is None)
        await node.dispatch(dispatch("call", "ses_4"))


async def test_the_higher_priority_runs_first(world: Build) -> None:
    async with world(max_init_workers=1, max_run_workers=1, max_ready=0, max_queue=20).node() as node:
        started: list[str] = []
        with node.feed.watched() as events:
            await node.dispatch(dispatch("call\nsleep 60", "running"))
            await until(lambda: node.stages.run.used)
            requests = [dispatch("call", "ready"), *(dispatch("call", f"ses_{number}", priority=number) for number in (1, 3, 2))]
            await node.dispatch(requests[0])
            await until(lambda: node.stages.run.waiting)
            for request in requests[1:]:
                await node.dispatch(request)
            node.cancel(await until(lambda: node.books.find("running")))
            for request in requests:
                await ended(node, request)
            while not events.empty():
                event = events.get_nowait()
                if event["status"] == "RUNNING":
                    started.append(event["session_id"])
    assert started == ["running", "ready", "ses_3", "ses_2", "ses_1"]


async def test_the_same_attempt_is_not_taken_twice(world: Build) -> None:
    async with world().node() as node:
        request = dispatch()
        await node.dispatch(request)
        with pytest.raises(RolloutError) as refused:
            await node.dispatch(request)
        assert refused.value.status == 409
        await ended(node, request)
        with pytest.raises(RolloutError, match="here already"):
            await node.dispatch(request)
        next_one = dispatch(attempt=1)
        await node.dispatch(next_one)
        assert (await ended(node, next_one)).outcome == "graded"


@pytest.mark.parametrize("session", ["../x", "a/b", "", ".hidden", "a b"])
async def test_a_session_id_that_is_no_name_is_refused(world: Build, session: str) -> None:
    async with world().node() as node:
        with pytest.raises(ConfigError, match="session_id"):
            await node.dispatch(dispatch("call", session))


async def test_a_backend_that_the_node_does_not_run_is_refused_at_once(world: Build) -> None:
    async with world(allow=["bubblewrap"]).node() as node:
        with pytest.raises(ConfigError, match="this node runs bubblewrap"):
            await node.dispatch(dispatch())


@pytest.mark.parametrize("runtime", [None, {}, {"env": {"A": "1"}}])
async def test_a_task_that_names_no_backend_runs_in_the_nodes_default_runtime(world: Build, runtime: dict[str, object] | None) -> None:
    async with world().node() as node:
        result = await result_of(node, dispatch(runtime=runtime))
    assert result.outcome == "graded", result.error
    assert result.metadata["run"]["runtime"]["backend"] == "fake"


async def test_the_evaluators_sandbox_is_made_while_the_agent_runs(world: Build) -> None:
    build = world()
    async with build.node() as node:
        spec = {"backend": "fake", "eval_prepare": [{"type": "exec", "command": "true"}]}
        request = dispatch("call\nsleep 0.5", runtime=spec, evaluator={"strategy": "node_test", "config": {"fresh": 2}})
        await node.dispatch(request)
        await until(lambda: node.sandboxes.live == 2 and node.stages.run.used)
        result = await ended(node, request)
        logs = sorted(path.name for path in node.artifacts.folder("ses_1", 0).glob("evaluator/*.log"))
    assert result.outcome == "graded"
    assert logs == ["prepare-evaluator-1.log", "prepare-evaluator-2.log"]  # the second was made on demand
    assert build.left() == []


async def test_a_warm_sandbox_that_nobody_takes_is_removed(world: Build) -> None:
    build = world()
    async with build.node() as node:
        request = dispatch("call\nexit 1", on_policy_failure="exclude")
        await node.dispatch(request)
        assert (await ended(node, request)).outcome == "policy"
        assert node.sandboxes.live == 0
        assert node.stages.warm.used == 0
    assert build.left() == []


async def test_a_warm_sandbox_that_fails_is_made_again(world: Build) -> None:
    from node_world import agent

    from polar.testing.runtime import Command, FakeRuntime

    tries = 0

    async def flaky(command: Command) -> object:
        nonlocal tries
        if command.line == "warm":
            tries += 1
            return 1 if tries == 1 else 0
        return await agent(command)

    async with world().node() as node:
        FakeRuntime.script = staticmethod(flaky)  # type: ignore[assignment]
        spec = {"backend": "fake", "eval_prepare": [{"type": "exec", "command": "warm"}]}
        request = dispatch(runtime=spec, evaluator={"strategy": "node_test", "config": {"fresh": 1}})
        await node.dispatch(request)
        assert (await ended(node, request)).outcome == "graded"
    assert tries == 2


async def test_grading_in_the_agents_own_sandbox(world: Build) -> None:
    from node_world import TestVerdict

    async with world().node() as node:
        request = dispatch(evaluator={"strategy": "node_test", "refresh_runtime": False, "config": {"fresh": 1}})
        await node.dispatch(request)
        assert (await ended(node, request)).outcome == "graded"
    [evidence] = TestVerdict.seen
    assert evidence.agent is not None
    assert evidence.agent.counts.started == 1  # type: ignore[attr-defined]
    assert evidence.agent.counts.ended >= 1  # type: ignore[attr-defined]


async def test_sandboxes_stand_ready(world: Build) -> None:
    build = world(warm=1)
    async with build.node() as node:
        spec = {"backend": "fake", "prepare": [{"type": "exec", "command": "true"}]}
        for number in range(3):
            request = dispatch("call", f"ses_{number}", runtime=spec)
            await node.dispatch(request)
            result = await ended(node, request)
            assert result.outcome == "graded"
            assert (node.artifacts.folder(f"ses_{number}", 0) / "prepare.log").exists()
        assert node.sandboxes.live == 0
    assert build.left() == []


async def test_a_thousand_waiting_sessions_are_cheap(world: Build) -> None:
    async with world(max_init_workers=1, max_run_workers=1, max_queue=2_000).node() as node:
        await node.dispatch(dispatch("call\nsleep 600", "ses_first"))
        gc.collect()
        tracemalloc.start()
        for number in range(1_000):
            await node.dispatch(dispatch("call", f"ses_{number}"))
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(node.attempts) == 1_001
        assert size / 1_000 < 30_000
