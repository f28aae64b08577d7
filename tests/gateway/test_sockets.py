"""What only a real socket shows."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import time
from pathlib import Path

import pytest
from gateway_listener import Listener, ask
from gateway_players import until

from polar import sockets
from polar.gateway import serve
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import bind
from polar.sockets import IDLE_S, free_port
from polar.testing.engine import ScriptedEngine
from polar.testing.gateway import CachedServed


def test_websocket_upgrades_are_refused_over_a_real_socket(listener: Listener) -> None:
    key = listener.key()
    connection = http.client.HTTPConnection("127.0.0.1", listener.gateway.config.port, timeout=5)
    headers = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Key": "x" * 22 + "==", "Sec-WebSocket-Version": "13"}
    connection.request("GET", f"/s/{key}/v1/responses", headers=headers)
    assert connection.getresponse().status == 426
    connection.close()


def test_silent_clients_are_probed() -> None:
    """anthropics/claude-code#82822: a router forgets a connection over which nothing goes for some minutes."""
    with bind("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        listening.setblocking(True)
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == IDLE_S


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("after_s", [0.05, 0.4], ids=["before the first byte", "after it"])
def test_b81_a_closed_socket_ends_the_generation(listener: Listener, stream: bool, after_s: float) -> None:
    key = listener.key()
    connection = http.client.HTTPConnection("127.0.0.1", listener.gateway.config.port, timeout=5)
    connection.request("POST", f"/s/{key}/v1/chat/completions", json.dumps({"model": "m", "messages": ask("slow"), "stream": stream}))
    deadline = time.monotonic() + 10
    while not listener.gateway.gate.inflight and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(after_s)
    connection.close()
    while listener.gateway.gate.inflight and time.monotonic() < deadline:
        time.sleep(0.01)
    assert listener.gateway.gate.inflight == 0
    (made,) = listener.made()
    assert (made.status, made.untrainable) == ("aborted", "aborted: the client left")


OFFER = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAAAAYABgAA\r\n"
PLAIN = {"model": "m", "messages": ask("hello")}


def chunked(body: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:9], body[9:])) + b"0\r\n\r\n"


def post_of(key: str, offer: str, framing: str) -> tuple[bytes, bytes]:
    """Head and body of one POST."""
    body = json.dumps(PLAIN).encode()
    head = f"POST /s/{key}/v1/chat/completions HTTP/1.1\r\nHost: x\r\n{offer}"
    if framing == "chunked":
        return (head + "Transfer-Encoding: chunked\r\n\r\n").encode(), chunked(body)
    return (head + f"Content-Length: {len(body)}\r\n\r\n").encode(), body


def answers_to(port: int, *pieces: bytes, count: int) -> list[int]:
    """The statuses of the first `count` answers to bytes that come one piece at a time."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.02)
        got = b""
        while len(re.findall(rb"HTTP/1.1 \d{3}", got)) < count and (more := sock.recv(65536)):
            got += more
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3})", got)]


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_an_offer_of_http_2_leaves_the_request_as_it_is(listener: Listener, framing: str) -> None:
    """vllm-project/vllm#57203, Soju06/codex-lb#1757: Java's HttpClient offers it with each request, and its body was lost."""
    key, port = listener.key(), listener.gateway.config.port
    head, body = post_of(key, OFFER, framing)
    plain = b"".join(post_of(key, "", "length"))
    assert answers_to(port, head + body, count=1) == [200]
    assert answers_to(port, head, body, count=1) == [200]
    assert answers_to(port, head[:50], head[50:] + body[:9], body[9:], count=1) == [200]
    assert answers_to(port, head + body + head + body + plain, head, body, count=4) == [200] * 4
    assert len(listener.made()) == 7
    assert {made.messages[0].text for made in listener.made()} == {"hello"}


def test_a_connection_serves_on_after_an_upgrade_that_was_refused(listener: Listener) -> None:
    key, port = listener.key(), listener.gateway.config.port
    asked = f"GET /s/{key}/v1/responses HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n\r\n".encode()
    assert answers_to(port, asked, b"".join(post_of(key, "", "length")), count=2) == [426, 200]
    assert answers_to(port, b"CONNECT host:443 HTTP/1.1\r\nHost: host:443\r\n\r\n", count=1) == [400]


async def test_a_client_that_has_stalled_does_not_keep_the_gateway_from_its_end(
    tmp_path: Path, qwen3_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a request came, and nothing after it: of a sandbox that was frozen, say."""
    monkeypatch.setattr(serve, "CLOSE_S", 1)
    options = EngineConfig(urls=[], mode="tokens", tokenizer=str(qwen3_tokenizer_dir), renderer="qwen3")
    config = GatewayConfig(engines={"default": options}, store=str(tmp_path / "polar.db"), check=False, port=0, admin_port=0)
    engine = ScriptedEngine(lambda call: "Hi.", tokenizer_dir=qwen3_tokenizer_dir)
    gateway = Gateway(config, served={"default": CachedServed("default", options, [engine])})
    async with asyncio.timeout(60):
        async with serve.serving(gateway):
            _, key = await gateway.new_session()
            _, writer = await asyncio.open_connection("127.0.0.1", config.port)
            writer.write(f"POST /s/{key}/v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{".encode())
            await writer.drain()
            await until(lambda: gateway.sessions.loaded)
        writer.close()


def test_a_port_for_later_is_free_and_another_each_time() -> None:
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == 200
    assert max(ports) < 32_768  # where outgoing connections do not take it


def test_no_port_of_another_machine_is_free() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_port("192.0.2.1")


def test_a_port_that_is_taken_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(sockets, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match=f"no port from {port} to {port} is free"):
            free_port()
