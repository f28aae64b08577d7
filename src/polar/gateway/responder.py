"""Writes one HTTP answer over ASGI and notices when its client leaves. Knows no session, no call and no dialect but its encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping
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

    def __init__(self, send: Send, receive: Receive, *, head: bool = False) -> None:
        """`head`: the answer goes out without its body."""
        self._send = send
        self._receive = receive
        self._head = head
        self._watcher: asyncio.Task[None] | None = None
        self._left = False
        self.bell = Bell()
        """To be rung by whatever `until` waits for."""
        self.started = False
        self.status = 0
        self.gone = False
        self._writing = False
        self._unfinished: _Unfinished | None = None
        self._failed: Exception | None = None

    async def json(self, status: int, body: JsonObject, headers: Mapping[str, str] | None = None) -> None:
        data = orjson.dumps(body)
        await self._begin(status, "application/json", headers, length=len(data))
        await self._put({"type": "http.response.body", "body": b"" if self._head else data})
        self._stop()

    async def start_stream(self, encoder: Encoder, headers: Mapping[str, str] | None = None) -> None:
        await self._begin(200, encoder.content_type, {"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})

    async def send(self, data: bytes) -> None:
        if data:
            await self._put({"type": "http.response.body", "body": data, "more_body": True})

    @property
    def free(self) -> bool:
        """Whether `send_now` may be called: no earlier write is under way, or waits for a client that is slower than its answer."""
        return not (self._writing or self._unfinished is not None or self._left or self._failed is not None)

    def send_now(self, data: bytes) -> None:
        """As `send`, in this turn of the event loop and for who must not wait; only while `free`. If the client is full, the rest of the
        write is left to the next `until` or `send`, for which the bell rings; what goes wrong is raised by the next `until`."""
        if not data:
            return
        steps = self._send({"type": "http.response.body", "body": data, "more_body": True}).__await__()
        try:
            self._unfinished = _Unfinished(steps, next(steps))
        except StopIteration:
            return
        except OSError:
            self.gone = self._left = True
        except Exception as error:
            self._failed = error
        self.bell.ring()

    async def finish_stream(self, data: bytes) -> None:
        await self._put({"type": "http.response.body", "body": b"" if self._head else data})
        self._stop()

    async def until(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until `happened()`, which is asked again whenever the bell rings. False if `timeout_s` passes without a ring; `ClientLeft`
        if the client goes first."""
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._until_gone())
        while True:
            if self._failed is not None:
                raise self._failed
            await self._settled()
            if happened():
                return True
            if self._left:
                self.gone = True
                raise ClientLeft
            if not await self.bell.wait(timeout_s):
                return False

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
        self._writing = True
        try:
            await self._settled()
            await self._send(event)
        except OSError as error:
            self.gone = True
            raise ClientLeft from error
        finally:
            self._writing = False

    async def _settled(self) -> None:
        """Waits until the client has taken what `send_now` left unfinished."""
        if self._unfinished is not None:
            try:
                await self._unfinished
            finally:
                self._unfinished = None


class _Unfinished:
    """A coroutine whose first step was taken by hand: who awaits this waits for what that step waits for, then takes the others."""

    def __init__(self, steps: Generator[Any, Any, None], waited_for: Any) -> None:
        self._steps = steps
        self._waited_for = waited_for

    def __await__(self) -> Generator[Any, Any, None]:
        try:
            yield self._waited_for
        except BaseException:
            self._steps.close()
            raise
        yield from self._steps
