"""Live answers on real sockets, from the engine's to the client's: one that leaves, one that is slow, an engine that dies or stalls."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from gateway_listener import ask
from gateway_players import until
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from polar.engines.vllm import VllmEngine
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import serving
from polar.records import Completion
from polar.testing.engine import Drop, Reply, Script, ScriptedServer, serve_scripted
from polar.testing.gateway import CachedServed

HIGH_WATER = 64 * 1024
"""What asyncio's and uvloop's transports hold before they say that the client is slow."""


@dataclass
class Wired:
    """A gateway between two sockets."""

    gateway: Gateway
    server: ScriptedServer
    session: str
    base: str
    clients: list[asyncio.StreamWriter] = field(default_factory=list)

    async def ask(self, *, window: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Sends a streamed call; the client takes little more than `window` bytes before it reads."""
        sock = socket.socket()
        if window is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        sock.connect(("127.0.0.1", self.gateway.config.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=window or 1 << 16)
        self.clients.append(writer)
        path = self.base.partition("127.0.0.1")[2].partition("/")[2]
        body = json.dumps({"model": "m", "messages": ask("Go."), "stream": True}).encode()
        head = f"POST /{path}/v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    async def made(self) -> list[Completion]:
        return [one async for one in self.gateway.store.completions(self.session)]


@asynccontextmanager
async def wired(script: Script, folder: Path, tokenizer_dir: Path, **settings: Any) -> AsyncIterator[Wired]:
    engine_config = EngineConfig(urls=[], tokenizer=str(tokenizer_dir), renderer="qwen3")
    options = {"check": False, "grace_s": 0.05, "stream": "live", "port": 0, "admin_port": 0, **settings}
    timeout_s = options.pop("timeout_s", 60.0)
    config = GatewayConfig(engines={"default": engine_config}, store=str(folder / "polar.db"), **options)
    with serve_scripted(script, tokenizer_dir=tokenizer_dir) as server:
        engine = VllmEngine(server.url, timeout_s=timeout_s)
        gateway = Gateway(config, served={"default": CachedServed("default", engine_config, [engine])})
        async with serving(gateway):
            record, key = await gateway.new_session()
            wire = Wired(gateway, server, record.id, gateway.base_url(key))
            try:
                yield wire
            finally:
                for client in wire.clients:
                    client.transport.abort()


def said(body: bytes) -> str:
    events = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in json.loads(event).get("choices", ()))


def unchunked(raw: bytes) -> bytes:
    body, rest = b"", raw.partition(b"\r\n\r\n")[2]
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


async def test_each_token_is_with_the_client_before_the_next_is_sampled(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    words = " ".join(f"w{number}" for number in range(20))
    async with wired([Reply(words, token_delay_s=0.02)], tmp_path, qwen3_tokenizer_dir) as wire:
        reader, _ = await wire.ask()
        pieces = []
        while piece := await asyncio.wait_for(reader.read(65536), 10):
            pieces.append(piece)
        assert len(pieces) > 15
        assert said(unchunked(b"".join(pieces))) == words
        (made,) = await wire.made()
        assert made.status == "complete"


async def test_b81_a_client_that_leaves_ends_the_generation_and_its_tokens_are_kept(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with wired([Reply("one two three " * 100, token_delay_s=0.02)], tmp_path, qwen3_tokenizer_dir) as wire:
        reader, writer = await wire.ask()
        await asyncio.wait_for(reader.readuntil(b"two"), 10)
        writer.transport.abort()
        await until(lambda: wire.server.backend.cancelled == 1)
        await until(lambda: wire.gateway.gate.inflight == 0)
        (made,) = await wire.made()
        assert (made.status, made.untrainable) == ("aborted", "aborted: the client left")
        assert made.sampled_ids is not None
        assert 2 <= len(made.sampled_ids) < 300
        assert made.logprobs is not None
        assert len(made.logprobs) == len(made.sampled_ids)


async def test_an_engine_that_dies_in_the_middle_is_the_streams_last_event(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with wired([Reply("one two three four", error=Drop(), error_after=3)], tmp_path, qwen3_tokenizer_dir) as wire:
        reader, _ = await wire.ask()
        body = unchunked(await asyncio.wait_for(reader.read(), 10))
        assert said(body) == "one two three"
        assert b'"error"' in body
        assert b"[DONE]" not in body.partition(b'"error"')[0]
        (made,) = await wire.made()
        assert made.status == "aborted"
        assert made.sampled_ids is not None
        assert len(made.sampled_ids) == 3


async def test_a_stalled_engine_is_pinged_over_and_then_an_error(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    script = [Reply("one two three four", token_delay_s=0.3)]
    async with wired(script, tmp_path, qwen3_tokenizer_dir, timeout_s=0.8, ping_s=0.05, first_ping_s=0.05) as wire:
        reader, _ = await wire.ask()
        body = unchunked(await asyncio.wait_for(reader.read(), 10))
        assert said(body).startswith("one")
        assert body.count(b": ") > 2
        assert b"did not answer within 0.8 s" in body
        await until(lambda: wire.server.backend.cancelled == 1)


async def test_a_slow_reader_gets_all_and_its_bytes_do_not_pile_up(
    tmp_path: Path, qwen3_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the client is full, deltas wait: the transport holds one write above its high-water mark at most."""
    opened: list[asyncio.Transport] = []

    connected = HttpToolsProtocol.connection_made

    def noted(protocol: HttpToolsProtocol, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
        opened.append(transport)
        connected(protocol, transport)

    monkeypatch.setattr(HttpToolsProtocol, "connection_made", noted)
    words = "some words of an answer that has no end " * 1200
    async with wired([Reply(words, token_delay_s=0.0005)], tmp_path, qwen3_tokenizer_dir) as wire:
        reader, _ = await wire.ask(window=4096)
        held: list[int] = []
        while not await wire.made():
            held += [transport.get_write_buffer_size() for transport in opened]
            await asyncio.sleep(0.02)
        (made,) = await wire.made()
        assert made.status == "complete"
        assert HIGH_WATER < max(held) < HIGH_WATER + 4096
        body = unchunked(await asyncio.wait_for(reader.read(), 30))
        assert said(body) == words
        assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("burst", [1, 7])
async def test_many_live_answers_at_once_do_not_mix(tmp_path: Path, qwen3_tokenizer_dir: Path, burst: int) -> None:
    async with wired(lambda call: Reply(f"answer {call.number} " * 20, token_delay_s=0.001), tmp_path, qwen3_tokenizer_dir) as wire:

        async def one() -> str:
            reader, _ = await wire.ask()
            body = unchunked(await asyncio.wait_for(reader.read(), 30))
            return said(body)

        answers = sorted([answer for _ in range(3) for answer in await asyncio.gather(*(one() for _ in range(burst)))])
        assert answers == sorted(f"answer {number} " * 20 for number in range(3 * burst))
