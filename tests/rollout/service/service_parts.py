"""What these tests share: a plain HTTP client with the token, tasks as JSON, a receiver of callbacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from polar.testing.rollout import TOKEN, listening


def http(url: str, token: str | None = TOKEN) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {token}"} if token else {}, timeout=20)


def task(name: str = "t", samples: int = 1, **fields: Any) -> dict[str, Any]:
    return {"task_id": name, "instruction": "do it", "num_samples": samples, "agent": {"harness": "pi"}, **fields}


async def submit(client: httpx.AsyncClient, *args: Any, **fields: Any) -> dict[str, Any]:
    answer = await client.post("/rollout/task/submit", json=task(*args, **fields))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ended(client: httpx.AsyncClient, name: str = "t", timeout_s: float = 20.0) -> dict[str, Any]:
    """The task's status once it is not running."""

    async def look() -> dict[str, Any] | None:
        status = (await client.get(f"/rollout/task/{name}")).json()
        return None if status["status"] == "running" else status

    found: dict[str, Any] = await until(look, timeout_s)
    return found


async def until(look: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    """What `look` gives once it is true."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = look()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.02)


class Receiver:
    """Takes callbacks; `fail_first` are answered with 500."""

    def __init__(self, fail_first: int = 0) -> None:
        self.fail_first = fail_first
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.app = Starlette(routes=[Route("/done", self._take, methods=["POST"])])

    async def _take(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        self.bodies.append(orjson.loads(await request.body()))
        return Response(status_code=500 if len(self.bodies) <= self.fail_first else 200)


@asynccontextmanager
async def receiving(fail_first: int = 0) -> AsyncIterator[tuple[Receiver, str]]:
    receiver = Receiver(fail_first)
    async with listening(receiver.app) as url:
        yield receiver, f"{url}/done"
