"""Writes in the engine's turn of the event loop: what a client that is full, gone or broken does to them."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

import pytest

from polar.gateway.body import ClientLeft
from polar.gateway.responder import Responder


class Client:
    """An ASGI server's side: `full` makes each write wait until `take` is set."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.take = asyncio.Event()
        self.full = False
        self.error: Exception | None = None

    async def send(self, event: MutableMapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        if self.full:
            await self.take.wait()
        self.sent.append(event["body"])

    async def receive(self) -> MutableMapping[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}


def made() -> tuple[Client, Responder]:
    client = Client()
    return client, Responder(client.send, client.receive)


async def test_a_write_is_out_before_the_call_returns() -> None:
    client, reply = made()
    reply.send_now(b"a")
    reply.send_now(b"")
    reply.send_now(b"b")
    assert client.sent == [b"a", b"b"]
    assert reply.free
    assert not await reply.bell.wait(0.01)


async def test_a_full_client_is_waited_for_in_order() -> None:
    client, reply = made()
    client.full = True
    reply.send_now(b"a")
    assert not reply.free
    assert client.sent == []
    task = asyncio.create_task(reply.send(b"b"))
    await asyncio.sleep(0)
    assert not reply.free
    client.take.set()
    await task
    assert client.sent == [b"a", b"b"]
    assert reply.free


async def test_the_bell_wakes_who_waits_and_the_rest_is_written() -> None:
    client, reply = made()
    client.full = True
    waiting = asyncio.create_task(reply.until(lambda: client.sent == [b"a"], 5))
    await asyncio.sleep(0)
    reply.send_now(b"a")
    await asyncio.sleep(0.01)
    assert not waiting.done()
    client.take.set()
    assert await asyncio.wait_for(waiting, 1)


async def test_one_who_gives_up_waiting_leaves_nothing_behind() -> None:
    client, reply = made()
    client.full = True
    reply.send_now(b"a")
    waiting = asyncio.create_task(reply.until(lambda: False, 5))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    client.take.set()
    await asyncio.sleep(0.01)
    assert client.sent == []


async def test_a_closed_socket_is_a_client_that_left() -> None:
    client, reply = made()
    client.error = ConnectionResetError("gone")
    reply.send_now(b"a")
    assert not reply.free
    with pytest.raises(ClientLeft):
        await reply.until(lambda: False, 5)
    assert reply.gone


async def test_what_else_goes_wrong_is_raised_to_who_waits() -> None:
    client, reply = made()
    client.error = RuntimeError("broken")
    reply.send_now(b"a")
    with pytest.raises(RuntimeError, match="broken"):
        await reply.until(lambda: False, 5)
