"""Bodies in and answers out of an engine server, over Starlette. Knows no endpoint and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from polar.engine.api import ApiError, Drop, JsonObject

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


def json_response(body: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(body), status, media_type="application/json")


def sse(body: JsonObject) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def answering(handler: Handler) -> Handler:
    """`handler`, whose `ApiError` becomes an error answer and whose `Drop` a connection that is cut."""

    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except ApiError as error:
            return error_response(error)
        except ClientDisconnect:
            return Response(status_code=499)
        except Drop:
            return StreamingResponse(_cut(), headers={"content-length": "4096"}, media_type="application/json")

    return wrapped


def error_response(error: ApiError) -> Response:
    if error.body is not None:
        return Response(error.body, error.status, headers=error.headers, media_type="application/json")
    response = json_response(error.json(), error.status)
    response.headers.update(error.headers)
    return response


async def read_json(request: Request) -> JsonObject:
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object.")
    return body


async def until_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Awaits `work`, and cancels it when the client leaves (`ClientDisconnect`)."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            continue

    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for pending in (task, watch):
            pending.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _cut() -> AsyncIterator[bytes]:
    """Half an answer, then the end of the connection: the body is shorter than its announced length."""
    yield b'{"id": "cut", "choices": [{"index": 0, "text": "'
    raise ConnectionAbortedError("connection cut on purpose")
