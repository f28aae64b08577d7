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


class AsgiClient:
    """`await client.post(path, body)` on an app. `leave_after_s` drops the connection while the answer is still due."""

    def __init__(self, app: Callable[..., Any], headers: Mapping[str, str] | None = None) -> None:
        self.app = app
        self.headers = dict(headers or {})

    async def request(
        self, method: str, url: str, body: Any = None, headers: Mapping[str, str] | None = None, *, leave_after_s: float | None = None
    ) -> Answer:
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
        answer = Answer()
        given = False
        finished = asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": raw, "more_body": False}
            if leave_after_s is None:
                await finished.wait()
            else:
                await asyncio.sleep(leave_after_s)
            return {"type": "http.disconnect"}

        async def send(event: dict[str, Any]) -> None:
            if event["type"] == "http.response.start":
                answer.status = event["status"]
                answer.headers = {name.decode().lower(): value.decode() for name, value in event["headers"]}
            elif event.get("body"):
                answer.chunks.append(event["body"])

        try:
            await self.app(scope, receive, send)
        finally:
            finished.set()
        return answer

    async def post(self, url: str, body: Any, headers: Mapping[str, str] | None = None, *, leave_after_s: float | None = None) -> Answer:
        return await self.request("POST", url, body, headers, leave_after_s=leave_after_s)

    async def get(self, url: str, headers: Mapping[str, str] | None = None) -> Answer:
        return await self.request("GET", url, None, headers)
