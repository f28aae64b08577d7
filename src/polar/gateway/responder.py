"""Writes one HTTP answer over ASGI and notices when its client leaves. Knows no session, no call and no dialect but its encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

import orjson

from polar.chat import JsonObject
from polar.dialects import Encoder
from polar.gateway.bell import Bell
from polar.gateway.body import ClientLeft

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Responder:
    """Writes one HTTP answer and notices when its client leaves."""

    def __init__(self, send: Send, receive: Receive) -> None:
        self._send = send
        self._receive = receive
        self._watcher: asyncio.Task[None] | None = None
        self._left = False
        self.bell = Bell()
        """To be rung by whatever `until` waits for."""
        self.started = False
        self.status = 0
        self.gone = False

    async def json(self, status: int, body: JsonObject, headers: Mapping[str, str] | None = None, *, head: bool = False) -> None:
        data = orjson.dumps(body)
        await self._begin(status, "application/json", headers, length=len(data))
        await self._put({"type": "http.response.body", "body": b"" if head else data})
        self._stop()

    async def start_stream(self, encoder: Encoder) -> None:
        await self._begin(200, encoder.content_type, {"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def send(self, data: bytes) -> None:
        if data:
            await self._put({"type": "http.response.body", "body": data, "more_body": True})

    async def finish_stream(self, data: bytes) -> None:
        await self._put({"type": "http.response.body", "body": data})
        self._stop()

    async def until(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `happened()`, which is asked again whenever the bell rings. False if `timeout_s` passes without a ring; `ClientLeft`
        if the client goes first."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._until_gone())
        while not happened():
            if self._left:
                self.gone = True
                raise ClientLeft
            if not await self.bell.wait(timeout_s):
                return False
        return True

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._left = True
        self.bell.ring()

    def _stop(self) -> None:
        if self._watcher is not None:
            self.gone = self._left
            self._watcher.cancel()

    async def _begin(self, status: int, content_type: str, headers: Mapping[str, str] | None = None, length: int | None = None) -> None:
        self.started = True
        self.status = status
        lines = [(b"content-type", content_type.encode())]
        if length is not None:
            lines.append((b"content-length", str(length).encode()))
        lines += [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
        await self._put({"type": "http.response.start", "status": status, "headers": lines})

    async def _put(self, event: MutableMapping[str, Any]) -> None:
        try:
            await self._send(event)
        except OSError as error:
            self.gone = True
            raise ClientLeft from error
