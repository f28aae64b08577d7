"""Several workers over one store: a request reaches its session through any of them, as if there were one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from gateway_players import NAMES, PLAYERS, Chat, Player, until

from polar.errors import Unauthenticated
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import serving
from polar.gateway.sessions import hash_key
from polar.gateway.shards import Shards, Worker
from polar.sockets import free_port
from polar.testing.asgi import Answer
from polar.testing.engine import Call, Reply, ScriptedEngine
from polar.testing.gateway import CachedServed

every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
TOKEN = "polar-admin-test"


def script(call: Call) -> Reply:
    return Reply("Hi.", delay_s=60.0 if "slow" in call.text else 0.3 if "soon" in call.text else 0.0)


@dataclass
class Workers:
    """Two workers. Requests go to the first; `session()` makes one that lives in the second."""

    gateways: list[Gateway]
    engines: list[ScriptedEngine]
    http: aiohttp.ClientSession

    async def session(self) -> tuple[str, str]:
        """(session id, key)."""
        while True:
            record, key = await self.gateways[0].new_session()
            assert self.gateways[0].shards is not None
            if self.gateways[0].shards.owner(hash_key(key)) == 1:
                return record.id, key

    async def post(self, key: str, path: str, body: Any, headers: dict[str, str] | None = None, method: str = "POST") -> Answer:
        """Through the first worker, the key where an API key stands."""
        url = f"http://127.0.0.1:{self.gateways[0].config.port}{path}"
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **(headers or {})}
        async with self.http.request(method, url, data=data, headers=sent) as answer:
            return Answer(answer.status, {name.lower(): value for name, value in answer.headers.items()}, [await answer.read()])

    async def control(self, method: str, path: str, worker: int = 0) -> tuple[int, Any]:
        url = f"http://127.0.0.1:{self.gateways[worker].config.control_port}{path}"
        async with self.http.request(method, url, headers={"authorization": f"Bearer {TOKEN}"}) as answer:
            raw = await answer.read()
            return answer.status, orjson.loads(raw) if raw.startswith(b"{") else raw.decode()


@asynccontextmanager
async def workers(folder: Path, tokenizer: Path, *, up: int = 2) -> AsyncIterator[Workers]:
    ports = [free_port() for _ in range(4)]
    addresses = [Worker(f"http://127.0.0.1:{ports[at]}", f"http://127.0.0.1:{ports[at + 1]}") for at in (0, 2)]
    gateways, engines = [], []
    async with AsyncExitStack() as stack:
        for index in range(up):
            engine = ScriptedEngine(script, tokenizer_dir=tokenizer)
            options = EngineConfig(urls=[], mode="tokens", tokenizer=str(tokenizer), renderer="qwen3")
            config = GatewayConfig(
                engines={"default": options},
                store=str(folder / "polar.db"),
                check=False,
                port=ports[2 * index],
                admin_port=ports[2 * index + 1],
                admin_token=TOKEN,
                max_body_mb=1,
                grace_s=0.05,
            )
            shards = Shards(index, addresses, TOKEN)
            gateway = Gateway(config, served={"default": CachedServed("default", options, [engine])}, shards=shards)
            gateways.append(await stack.enter_async_context(serving(gateway)))
            engines.append(engine)
        yield Workers(gateways, engines, await stack.enter_async_context(aiohttp.ClientSession()))


@every_player
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_any_worker_takes_a_request_to_its_sessions_own(
    tmp_path: Path, qwen3_tokenizer_dir: Path, kind: type[Player], stream: bool
) -> None:
    async with workers(tmp_path, qwen3_tokenizer_dir) as both:
        session, key = await both.session()
        player = kind()
        for turn in ("One.", "Two."):
            player.user(turn)
            assert player.read(await both.post(key, player.path(stream), player.body(stream)), stream).text == "Hi."
        made = [one async for one in both.gateways[0].store.completions(session)]
        assert [one.parent for one in made] == [None, 0]
        assert (len(both.engines[0].calls), len(both.engines[1].calls)) == (0, 2)


async def test_a_client_that_leaves_ends_its_call_in_the_other_worker(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with workers(tmp_path, qwen3_tokenizer_dir) as both:
        _, key = await both.session()
        player = Chat().user("slow")
        asked = asyncio.create_task(both.post(key, player.path(False), player.body(False)))
        await until(lambda: both.engines[1].calls)
        asked.cancel()
        await until(lambda: both.engines[1].backend.cancelled)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_worker_that_ends_passes_on_the_answers_that_it_waits_for(tmp_path: Path, qwen3_tokenizer_dir: Path, stream: bool) -> None:
    async with workers(tmp_path, qwen3_tokenizer_dir) as both:
        _, key = await both.session()
        player = Chat().user("soon")
        asked = asyncio.create_task(both.post(key, player.path(stream), player.body(stream)))
        await until(lambda: both.engines[1].calls)
        await both.gateways[0].aclose()
        assert player.read(await asked, stream).text == "Hi."
        assert (await both.post(key, player.path(stream), player.body(stream))).status == 503


async def test_a_worker_that_ends_waits_for_no_answer_for_ever(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with workers(tmp_path, qwen3_tokenizer_dir) as both:
        for gateway in both.gateways:
            gateway.config.shutdown_s = 0.1
        _, key = await both.session()
        player = Chat().user("slow")
        asked = asyncio.create_task(both.post(key, player.path(False), player.body(False)))
        await until(lambda: both.engines[1].calls)
        await both.gateways[0].aclose()
        assert (await asked).status >= 500


async def test_what_cannot_be_handed_over_is_refused_where_it_came(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with workers(tmp_path, qwen3_tokenizer_dir) as both:
        session, key = await both.session()
        assert (await both.post(key, "/v1/chat/completions", b" " * (1 << 20) + b"{}")).status == 413
        upgrade = {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-version": "13", "sec-websocket-key": "x"}
        refused = await both.post(key, "/v1/responses", b"", upgrade, "GET")
        assert refused.status == 426
        cut = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + key.encode() + b"\r\ncontent-length: 99\r\n\r\n{"
        _, writer = await asyncio.open_connection("127.0.0.1", both.gateways[0].config.port)
        writer.write(cut)
        await writer.drain()
        writer.close()
        assert (await both.post(key, "/s/x/v1/chat/completions", b"{}")).status == 401
        assert [one async for one in both.gateways[0].store.completions(session)] == []
        assert not both.engines[1].calls


async def test_control_reaches_all_workers(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with workers(tmp_path, qwen3_tokenizer_dir) as both:
        session, key = await both.session()
        assert (await both.control("POST", "/admin/inference/pause?timeout_seconds=5"))[0] == 200
        assert [gateway.gate.paused for gateway in both.gateways] == [True, True]
        assert (await both.control("POST", "/admin/inference/resume", worker=1))[0] == 200
        assert [gateway.gate.paused for gateway in both.gateways] == [False, False]
        player = Chat().user("Hi")
        assert (await both.post(key, player.path(False), player.body(False))).status == 200
        status, text = await both.control("GET", "/metrics")
        assert (status, 'polar_completions_total{dialect="openai_chat",mode="tokens",status="complete"} 1.0' in text) == (200, True)
        assert await both.control("DELETE", f"/sessions/{session}") == (200, {"session_id": session, "closed": True})
        assert (await both.post(key, player.path(False), player.body(False))).status == 410


async def test_the_status_is_that_of_all_workers(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with workers(tmp_path, qwen3_tokenizer_dir) as both:
        for number, gateway in enumerate(both.gateways, 1):
            gateway.gate.waiting, gateway.gate.inflight = number, 10 * number
        for worker in (0, 1):
            _, told = await both.control("GET", "/admin/inference/status", worker=worker)
            assert (told["waiting"], told["inflight"], told["paused"]) == (3, 30, False)
        both.gateways[1].gate.inflight = 0
        assert await both.gateways[1].gate.pause(0)
        assert not (await both.control("GET", "/admin/inference/status"))[1]["paused"]
        both.gateways[0].gate.inflight = 0
        status, told = await both.control("POST", "/admin/inference/pause?timeout_seconds=0")
        assert (status, told["paused"], told["inflight"]) == (200, True, 0)


@every_player
async def test_a_worker_that_is_down_is_told_in_the_callers_shape(tmp_path: Path, qwen3_tokenizer_dir: Path, kind: type[Player]) -> None:
    async with workers(tmp_path, qwen3_tokenizer_dir, up=1) as one:
        _, key = await one.session()
        player = kind().user("Hi")
        refused = await one.post(key, player.path(False), player.body(False))
        assert refused.status >= 500
        assert "does not answer" in player.error(refused)[1]
        status, body = await one.control("GET", "/metrics")
        assert (status, body["error"]["type"]) == (502, "unavailable")
        assert (await one.control("GET", "/health"))[0] == 503


async def test_a_session_of_another_worker_ends_whatever_it_is_called(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with workers(tmp_path, qwen3_tokenizer_dir) as both:
        for number, name in enumerate(("a?b", "50%", "a%20b", "#1", "naïve")):
            while True:
                record, key = await both.gateways[0].new_session(session_id=f"{name}.{number}")
                shards = both.gateways[0].shards
                assert shards is not None
                if shards.owner(hash_key(key)) == 1:
                    break
                number += 10
            assert await both.gateways[0].close_session(record)
            player = Chat().user("Hi")
            assert (await both.post(key, player.path(False), player.body(False))).status == 410


async def test_a_key_that_no_header_carries_unchanged_is_refused_where_it_came(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    """Passed on, it would be another key, of another worker, which would pass it on in its turn, ever longer."""
    async with workers(tmp_path, qwen3_tokenizer_dir) as both:
        handed: list[int] = []
        for gateway in both.gateways:
            assert gateway.shards is not None
            gateway.shards.hand_over = lambda owner, *rest: refuse(handed, owner)  # type: ignore[method-assign]
        for number in range(8):
            request = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer é{number}\r\nconnection: close\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", both.gateways[0].config.port)
            writer.write(request.encode("latin-1"))
            assert (await reader.readline()).split()[1] == b"401"
            writer.close()
        assert handed == []


async def refuse(handed: list[int], owner: int) -> None:
    handed.append(owner)
    raise Unauthenticated("handed over")
