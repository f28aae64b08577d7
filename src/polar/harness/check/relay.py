"""A pass-through between a CLI and the gateway that keeps a copy of every request, so that a run can be played again.

Changes nothing on the way: bodies go through byte for byte, answers as they come. Loopback only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

_HOP = frozenset({"host", "connection", "keep-alive", "transfer-encoding", "upgrade", "content-length", "accept-encoding"})


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request as the CLI sent it (`path` with its query) and the status of its answer."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int


@dataclass(slots=True)
class Relay:
    """A running relay: point a CLI at `url` instead of at the gateway."""

    target: str
    url: str = ""
    requests: list[Recorded] = field(default_factory=list)

    async def send(self, client: aiohttp.ClientSession, recorded: Recorded, *, to: str | None = None, body: bytes | None = None) -> int:
        """Sends a recorded request again, to `to` (the relay's own target by default), and reads its answer. Returns the status."""
        url = (to or self.target) + recorded.path
        async with client.request(recorded.method, url, headers=recorded.headers, data=recorded.body if body is None else body) as answer:
            await answer.read()
            return answer.status


@asynccontextmanager
async def relaying(target: str) -> AsyncIterator[Relay]:
    """A relay to `target` on a free port of 127.0.0.1, until the block ends."""
    relay = Relay(target.rstrip("/"))
    async with aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None)) as client:

        async def forward(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP}
            async with client.request(request.method, relay.target + request.path_qs, headers=headers, data=body) as answer:
                relay.requests.append(Recorded(request.method, request.path_qs, headers, body, answer.status))
                response = web.StreamResponse(status=answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in _HOP:
                        response.headers[name] = value
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        application = web.Application(client_max_size=256 * 1024 * 1024)
        application.router.add_route("*", "/{path:.*}", forward)
        runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        relay.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield relay
        finally:
            await runner.cleanup()
            await asyncio.sleep(0)
