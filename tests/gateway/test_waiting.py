"""Engines that are still loading are waited for, and what cannot get better is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar.cli.serve import _settings
from polar.errors import ConfigError, StoreError
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import serving as serving_gateway
from polar.gateway.waiting import engines_up, entered, unless
from polar.rollout.config import PolarConfig
from polar.rollout.stack import serving
from polar.sockets import free_port
from polar.testing.engine import Reply, ScriptedEngine
from polar.testing.gateway import CachedServed
from polar.testing.rollout import listening


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - what is waited for sets no event
            await asyncio.sleep(0.01)


class Loading:
    """An inference server that says 503 until it is `ready`."""

    def __init__(self) -> None:
        self.ready = False
        self.asked = 0
        self.app = Starlette(routes=[Route("/{path:path}", self._answer)])

    async def _answer(self, request: Request) -> Response:
        self.asked += 1
        if not self.ready:
            return JSONResponse({"error": {"message": "the model is loading"}}, 503)
        return JSONResponse({"data": [{"id": "m"}], "version": "0.1"})


async def test_a_server_that_comes_up_late_is_waited_for() -> None:
    port = free_port()
    said: list[str] = []
    engine = EngineConfig(urls=[f"http://127.0.0.1:{port}"])
    waiting = asyncio.create_task(engines_up({"default": engine}, 60.0, said.append))
    await until(lambda: bool(said))  # told at once, so that a wrong URL is noticed
    assert f"127.0.0.1:{port}" in said[0]
    assert "60 s at most" in said[0]
    server = Loading()
    async with listening(server.app, port):
        await until(lambda: bool(server.asked))
        assert not waiting.done()
        server.ready = True
        await asyncio.wait_for(waiting, 30)
    assert said[1:] == ["engine default answers"]


async def test_the_wait_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.gateway.waiting.LOOK_S", 0.01)
    engine = EngineConfig(urls=[f"http://127.0.0.1:{free_port()}"])
    await asyncio.wait_for(engines_up({"default": engine}, 0.1, lambda line: None), 30)


async def test_what_is_no_inference_server_is_not_waited_for() -> None:
    said: list[str] = []
    async with listening(Starlette()) as url:  # 404 everywhere
        await asyncio.wait_for(engines_up({"default": EngineConfig(urls=[url])}, 600.0, said.append), 30)
    assert said == []


async def test_without_a_wait_nobody_is_asked() -> None:
    server = Loading()
    async with listening(server.app) as url:
        await engines_up({"default": EngineConfig(urls=[url])}, 0.0, lambda line: None)
    assert server.asked == 0


async def test_a_signal_ends_the_wait() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().call_later(0.05, stop.set)
    assert await asyncio.wait_for(unless(stop, asyncio.sleep(600)), 30) is False
    assert await unless(asyncio.Event(), asyncio.sleep(0)) is True


async def test_a_signal_ends_a_start_that_an_engine_keeps_waiting(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    """Ctrl-C did nothing while the check waited for an engine that took the call and said nothing."""
    engine = ScriptedEngine(lambda call: Reply("late", delay_s=600), tokenizer_dir=qwen3_tokenizer_dir)
    options = EngineConfig(urls=[], mode="tokens", tokenizer=str(qwen3_tokenizer_dir), renderer="qwen3")
    config = GatewayConfig(engines={"default": options}, store=str(tmp_path / "polar.db"), port=0, admin_port=0)
    gateway = Gateway(config, served={"default": CachedServed("default", options, [engine])})
    stop = asyncio.Event()
    async with asyncio.timeout(60), AsyncExitStack() as stack:
        entering = asyncio.create_task(entered(stack, serving_gateway(gateway), stop))
        await until(lambda: bool(engine.calls))
        stop.set()
        assert await entering is None
    with pytest.raises(StoreError, match="closed"):
        await gateway.store.session("any")
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", config.port)


async def test_what_is_entered_ends_with_its_stack_and_what_fails_is_raised() -> None:
    ended: list[str] = []

    @asynccontextmanager
    async def context(fails: bool) -> AsyncIterator[str]:
        try:
            if fails:
                raise ConfigError("no engine")
            yield "it"
        finally:
            ended.append("ended")

    async with AsyncExitStack() as stack:
        assert await entered(stack, context(fails=False), asyncio.Event()) == "it"
        assert ended == []
    assert ended == ["ended"]
    with pytest.raises(ConfigError, match="no engine"):
        await entered(AsyncExitStack(), context(fails=True), asyncio.Event())


async def test_a_service_takes_tasks_while_its_nodes_wait_for_their_engine(tmp_path: Path) -> None:
    config = PolarConfig.model_validate(
        {
            "rollout": {"port": 0, "store": str(tmp_path / "r.db"), "save_dir": str(tmp_path / "saved"), "token": "t"},
            "gateway": {"nodes": [{"inference": {"base_url": f"http://127.0.0.1:{free_port()}"}, "gateway": {"engine_wait_s": 600}}]},
        }
    )
    stop, said = asyncio.Event(), list[str]()

    def heard(line: str) -> None:
        said.append(line)
        if "waiting for it" in line:
            stop.set()

    async with asyncio.timeout(60), serving(config, tmp_path / "nodes", progress=heard, stop=stop) as stack:
        assert stack.service.nodes() == []
    assert said[0] == f"rollout service at {stack.url}"


def test_commands_wait_unless_told_otherwise(tmp_path: Path) -> None:
    file = tmp_path / "polar.yaml"

    def waits(text: str, option: float | None) -> float:
        file.write_text(text)
        return _settings(file, engine_wait=option).gateway.nodes[0].gateway_config.engine_wait_s

    said = "gateway: {nodes: [{gateway: {engine_wait_s: 5}}]}"
    assert [waits("{}", None), waits("{}", 7), waits(said, None), waits(said, 0)] == [600, 7, 5, 0]
