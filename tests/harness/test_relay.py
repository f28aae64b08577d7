"""The relay: bytes go through unchanged, and a recorded request can be sent again."""

from __future__ import annotations

import asyncio

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from polar.harness.check.relay import relaying
from polar.testing import serve_app

BODY = b'{"odd" :  "spacing \\u00fc"}'


async def echo(request: Request) -> StreamingResponse:
    body = await request.body()

    async def pieces() -> object:
        yield b"data: "
        yield body + request.headers.get("x-key", "").encode()

    return StreamingResponse(pieces(), status_code=418, media_type="text/event-stream", headers={"x-answer": request.url.query})  # type: ignore[arg-type]


def test_a_request_passes_unchanged_and_can_be_played_again() -> None:
    async def scenario(target: str) -> None:
        async with relaying(target) as relay, aiohttp.ClientSession() as client:
            async with client.post(relay.url + "/a/b?beta=true", data=BODY, headers={"x-key": "k"}) as answer:
                assert (answer.status, answer.content_type, answer.headers["x-answer"]) == (418, "text/event-stream", "beta=true")
                assert await answer.read() == b"data: " + BODY + b"k"
            (recorded,) = relay.requests
            assert (recorded.method, recorded.path, recorded.body, recorded.status) == ("POST", "/a/b?beta=true", BODY, 418)
            assert await relay.send(client, recorded) == 418

    with serve_app(Starlette(routes=[Route("/{path:path}", echo, methods=["POST"])])) as server:
        asyncio.run(scenario(server.url))
