"""What a gateway refuses to start with, and in which words."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from gateway_players import Chat

from polar.engines.base import EngineInfo
from polar.errors import ConfigError, EngineRejected
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import bind
from polar.gateway.served import Served
from polar.testing.engine import ScriptedEngine
from polar.testing.gateway import CachedServed, SessionClient


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:8000", "localhost:8000/v1", "ftp://h:1", "http://", "http://h:port", ""])
def test_an_engine_at_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Served("default", EngineConfig(urls=[url]))
    assert str(caught.value) == f"engines.default.urls: {url!r} is not a URL of an inference server; write it as http://127.0.0.1:8000"


async def test_an_engine_that_is_not_started_is_named_once_with_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    gateway = Gateway(GatewayConfig(engines={"default": EngineConfig(urls=[url])}, store=str(tmp_path / "polar.db")))
    with pytest.raises(ConfigError) as caught:
        await gateway.start()
    await gateway.aclose()
    words = str(caught.value)
    assert (words.count(url), words.count("no engine answers")) == (1, 1)
    assert "is it started?" in words


async def test_an_engine_that_answers_something_else_is_named(tmp_path: Path) -> None:
    class Elsewhere(ScriptedEngine):
        async def info(self) -> EngineInfo:
            raise EngineRejected("Not Found", status=404)

    engine = EngineConfig(urls=[])
    scripted = Elsewhere([])
    config = GatewayConfig(engines={"default": engine}, store=str(tmp_path / "polar.db"))
    gateway = Gateway(config, served={"default": CachedServed("default", engine, [scripted])})
    with pytest.raises(ConfigError) as caught:
        await gateway.start()
    await gateway.aclose()
    assert str(caught.value) == f"engines.default: {scripted.url}: Not Found; is that the URL of an inference server?"


async def test_a_renderer_that_was_asked_for_and_fails_is_an_error(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    engine = EngineConfig(urls=[], tokenizer=str(qwen3_tokenizer_dir), renderer="nope")
    config = GatewayConfig(engines={"default": engine}, store=str(tmp_path / "polar.db"))
    scripted = ScriptedEngine([], tokenizer_dir=qwen3_tokenizer_dir)
    gateway = Gateway(config, served={"default": CachedServed("default", engine, [scripted])})
    with pytest.raises(ConfigError, match=r"engines\.default\.renderer: .*nope"):
        await gateway.start()
    await gateway.aclose()


@pytest.mark.parametrize("port", [99999, -1])
def test_a_port_that_there_is_not_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"):
        bind("127.0.0.1", port)


@pytest.mark.parametrize(("versions", "found"), [(["7", "7"], "7"), (["7", "8"], None), ([None, None], None), (["7", None], None)])
async def test_a_gateway_started_anew_knows_the_version_that_its_engines_were_told(
    tmp_path: Path, qwen3_tokenizer_dir: Path, versions: list[str | None], found: str | None
) -> None:
    """A worker that died in the middle of a training is started again; the trainer tells the version at its next update only."""

    class Told(ScriptedEngine):
        version: str | None = None

        async def weight_version(self) -> str | None:
            return self.version

    engines = [Told(lambda call: "Hi.", tokenizer_dir=qwen3_tokenizer_dir) for _ in versions]
    for number, (engine, version) in enumerate(zip(engines, versions, strict=True)):
        engine.url, engine.version = f"scripted:{number}", version
    options = EngineConfig(urls=[], mode="tokens", tokenizer=str(qwen3_tokenizer_dir), renderer="qwen3")
    config = GatewayConfig(engines={"default": options}, store=str(tmp_path / "polar.db"), check=False)
    async with Gateway(config, served={"default": CachedServed("default", options, engines)}) as gateway:
        session, key = await gateway.new_session()
        assert (await Chat().user("Go.").send(SessionClient(gateway.api, key))).status == 200
        assert [made.policy_version async for made in gateway.store.completions(session.id)] == [found]
