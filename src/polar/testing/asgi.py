"""Drives an ASGI app in process: no socket, but all of its bytes. For tests that make thousands of calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson


@dataclass(slots=True)
class Answer:
    """What came back. `chunks` are the body's pieces in the order they were sent."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return orjson.loads(self.body)

    def events(self) -> list[Any]:
        """The data of all server-sent events, parsed; `[DONE]` as the string."""
        found = []
        for block in self.body.decode().split("\n\n"):
            data = "\n".join(line[5:].lstrip() for line in block.split("\n") if line.startswith("data:"))
            if data:
                found.append(data if data == "[DONE]" else orjson.loads(data))
        return found


class Exchange:
    """A request under way. `answer` fills as the app writes; `leave` drops the connection; `await finished()` is its end."""

    def __init__(self, app: Callable[..., Any], scope: dict[str, Any], body: bytes) -> None:
        self.answer = Answer()
        self._gone = asyncio.Event()
        self._body: bytes | None = body
        self._task: asyncio.Future[None] = asyncio.ensure_future(app(scope, self._receive, self._send))
        self._task.add_done_callback(lambda _: self._gone.set())

    @property
    def done(self) -> bool:
        return self._task.done()

    def leave(self) -> None:
        self._gone.set()

    async def finished(self) -> Answer:
        await self._task
        return self.answer

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            self.answer.status = event["status"]
            self.answer.headers = {name.decode().lower(): value.decode() for name, value in event["headers"]}
        elif event.get("body"):
            self.answer.chunks.append(event["body"])


class AsgiClient:
    """`await client.post(path, body)` on an app. `leave_after_s` drops the connection while the answer is still due."""

    def __init__(self, app: Callable[..., Any], headers: Mapping[str, str] | None = None) -> None:
        self.app = app
        self.headers = dict(headers or {})

    def start(self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None) -> Exchange:
        """Sends a request without waiting for its answer."""
        split = urlsplit(url)
        raw = body if isinstance(body, bytes) else b"" if body is None else orjson.dumps(body)
        sent = {"content-type": "application/json", **self.headers, **(headers or {})}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(split.path),
            "raw_path": split.path.encode(),
            "query_string": split.query.encode(),
            "headers": [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 1),
        }
        return Exchange(self.app, scope, raw)

    async def request(
        self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None, *, leave_after_s: float | None = None
    ) -> Answer:
        exchange = self.start(method, url, body, headers)
        if leave_after_s is not None:
            asyncio.get_running_loop().call_later(leave_after_s, exchange.leave)
        return await exchange.finished()

    async def post(self, url: str, body: Any, headers: Mapping[str, str] | None = None, *, leave_after_s: float | None = None) -> Answer:
        return await self.request("POST", url, body, headers, leave_after_s=leave_after_s)

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.request("GET", url, None, headers)
