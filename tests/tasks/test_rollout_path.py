"""Bundled tasks through a whole node: gateway, sandbox, agent, builder, evaluator. Only the engine is scripted."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.harness.spec import AgentSpec
from polar.rollout.config import NodeConfig
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.rollout.node import Node, serving_node
from polar.runtime import RuntimeSpec
from polar.runtime.docker import DockerRuntime
from polar.tasks import find, noop_agent, oracle_agent, to_request
from polar.testing import ScriptedEngine
from polar.testing.gateway import CachedServed

MakeNode = Callable[[], AbstractAsyncContextManager[Node]]


@pytest.fixture
def node(tmp_path: Path, qwen3_tokenizer_dir: Path) -> MakeNode:
    @asynccontextmanager
    async def start() -> AsyncIterator[Node]:
        engine = EngineConfig(urls=[], tokenizer=str(qwen3_tokenizer_dir), renderer="qwen3")
        served = CachedServed("default", engine, [ScriptedEngine(lambda call: "Done.", tokenizer_dir=qwen3_tokenizer_dir)])
        config = GatewayConfig(engines={"default": engine}, store=str(tmp_path / "polar.db"), port=0, admin_port=0, shutdown_s=0.2)
        settings = NodeConfig(id="node-1", port=0, work_dir=str(tmp_path / "work"), artifacts_dir=str(tmp_path / "artifacts"))
        async with serving_node(settings, gateway=Gateway(config, served={"default": served}), heartbeat_s=60) as made:
            yield made

    return start


async def result(node: Node, name: str, agent: AgentSpec, runtime: RuntimeSpec) -> SessionResult:
    """One session of a bundled task, run to its end."""
    [task] = find(name)
    request = to_request(task, agent=agent, runtime=runtime)
    shared = set(SessionDispatchRequest.model_fields) & set(type(request).model_fields)
    attempt = SessionDispatchRequest(
        session_id=f"ses-{request.task_id}", remaining_timeout_seconds=120, **{key: getattr(request, key) for key in shared}
    )
    await node.dispatch(attempt)
    async with asyncio.timeout(150):
        while node.books.find(attempt.session_id, 0) is not None:  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.05)
    return await asyncio.to_thread(node.spool.result, attempt.attempt_id)


async def checked(start: MakeNode, runtime: RuntimeSpec, *names: str) -> None:
    """The oracle gets 1, doing nothing gets 0, both graded, of one captured call each."""
    async with start() as node:
        for name in names:
            [task] = find(name)
            for agent, reward in ((oracle_agent(task, call=True), 1.0), (noop_agent(call=True), 0.0)):
                got = await result(node, name, agent, runtime)
                assert (got.outcome, got.reward, got.turns, got.error) == ("graded", reward, 1, None), (name, got)
                assert got.metadata["task"] == name


async def test_the_oracle_solves_and_doing_nothing_does_not(node: MakeNode) -> None:
    await checked(node, RuntimeSpec(backend="local"), "spans-42")


async def test_an_agent_that_reads_the_future_or_edits_tests_gets_nothing(node: MakeNode) -> None:
    calling = str(noop_agent(call=True).custom_shell)
    cheats = {
        "history": "git checkout origin/main -- . || git cherry-pick ORIG_HEAD || git stash apply || true",
        "tests": "echo 'print(\"PASSED tests/test_emitter.py::TestEmitter::test_off\")' > runtests.py; rm tests/*.py",
    }
    async with node() as running:
        for cheat in cheats.values():
            agent = AgentSpec(harness="shell", custom_shell=f"{calling}\n{cheat}")
            got = await result(running, "hooks-8", agent, RuntimeSpec(backend="local"))
            assert (got.outcome, got.reward) == ("graded", 0.0), got


@pytest.mark.real
async def test_the_same_in_bubblewrap(node: MakeNode) -> None:
    if not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    await checked(node, RuntimeSpec(backend="bubblewrap"), "spans-42", "lru-cache", "write-train")


@pytest.mark.real
async def test_the_same_in_containers(node: MakeNode) -> None:
    problem = await DockerRuntime.unavailable()
    if problem is not None:
        pytest.skip(problem)
    await checked(node, RuntimeSpec(backend="docker"), "globpath-17", "plate-23", "sort-downloads")
