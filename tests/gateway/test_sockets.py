"""What only a real socket shows."""

from __future__ import annotations

import http.client
import json
import socket
import time

import pytest
from gateway_listener import Listener, ask

from polar.gateway.serve import bind
from polar.sockets import IDLE_S


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
