"""A node without sandboxes: an ASGI app that speaks what `polar.rollout.node` speaks, and does what a test tells it. For whoever tests
against a rollout service."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from polar.chat import JsonObject
from polar.rollout.models import SessionDispatchRequest, SessionResult

Play = Callable[[SessionDispatchRequest], Awaitable[SessionResult | None]]
"""What becomes of an attempt; `None`: nothing is ever reported."""


def graded(request: SessionDispatchRequest, reward: float = 1.0, **fields: Any) -> SessionResult:
    """A result as a node gives it."""
    trajectory: JsonObject = {"status": "COMPLETED", "metadata": {}, "traces": [], "error": None}
    values: JsonObject = {
        "session_id": request.session_id,
        "task_id": request.task_id,
        "attempt": request.attempt,
        "sample": request.sample,
        "status": "COMPLETED",
        "outcome": "graded",
        "reward": reward,
        "turns": 3,
        "sampled_tokens": 30,
        "trajectory": trajectory,
        "metadata": request.metadata,
    }
    return SessionResult(**{**values, **fields})


def broken(request: SessionDispatchRequest, code: str = "sandbox", **fields: Any) -> SessionResult:
    """A failure of the infrastructure."""
    values: JsonObject = {
        "status": "ERROR",
        "outcome": "infrastructure",
        "error_code": code,
        "error": "as told",
        "reward": None,
        "trajectory": None,
        "turns": 0,
    }
    return graded(request, **{**values, **fields})


class StubNode:
    """`play` decides what each attempt comes to. Attributes may be changed at any time: `refuse` answers dispatches with that status
    (503 with `Retry-After`), `silent` stops heartbeats, `deaf` ignores cancellations. `dispatched` and `cancelled` tell what came."""

    def __init__(
        self,
        node_id: str = "stub",
        *,
        play: Play | None = None,
        max_run_workers: int = 2,
        interval_s: float = 0.2,
        token: str | None = "node-token",
        metrics: JsonObject | None = None,
    ) -> None:
        self.node_id = node_id
        self.play: Play = play or _succeed
        self.max_run_workers = max_run_workers
        self.interval_s = interval_s
        self.token = token
        self.metrics: JsonObject = metrics or {}
        self.instance = uuid.uuid4().hex
        self.refuse: int | None = None
        self.silent = False
        self.deaf = False
        self.list_attempts = True
        self.dispatched: list[SessionDispatchRequest] = []
        self.cancelled: list[str] = []
        self.forgotten: list[str] = []
        self.answers: list[tuple[str, int]] = []
        """Attempt and status of each delivery of a result."""
        self.running: dict[str, asyncio.Task[None]] = {}
        self.url = ""
        self._service: aiohttp.ClientSession | None = None
        self.service_url = ""
        """Where results and heartbeats go; `join` sets it."""
        self._beats: asyncio.Task[None] | None = None
        self.app = Starlette(
            routes=[
                Route("/sessions", self._dispatch, methods=["POST"]),
                Route("/sessions/{session_id}", self._cancel, methods=["DELETE"]),
                Route("/sessions/{session_id}/artifacts", self._artifacts),
                Route("/sessions/{session_id}/artifacts/{path:path}", self._artifact),
                Route("/sessions/{session_id}/log", self._log),
            ]
        )

    async def join(self, service_url: str, service_token: str | None, own_url: str) -> None:
        """Registers and begins to send heartbeats."""
        self.url = own_url
        headers = {"authorization": f"Bearer {service_token}"} if service_token else {}
        self.service_url = service_url
        connector = aiohttp.TCPConnector(limit=16)
        self._service = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=30), connector=connector)
        await self.register()
        self._beats = asyncio.create_task(self._keep_alive())

    async def leave(self) -> None:
        """As a node that dies: nothing more comes from it."""
        tasks = [task for task in (self._beats, *self.running.values()) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.running.clear()
        if self._service is not None:
            await self._service.close()
            self._service = None

    async def register(self) -> None:
        await self.post(
            "/nodes/register",
            {
                "node_id": self.node_id,
                "gateway_url": self.url,
                "max_init_workers": 1,
                "max_run_workers": self.max_run_workers,
                "max_postrun_workers": 1,
                "heartbeat_interval_seconds": self.interval_s,
                "token": self.token,
                "instance": self.instance,
                "metrics": self.metrics,
            },
        )

    async def heartbeat(self) -> None:
        body: JsonObject = {"metrics": self.metrics, "instance": self.instance}
        if self.list_attempts:
            body["attempts"] = list(self.running)
        status, said = await self.post(f"/nodes/{self.node_id}/heartbeat", body)
        if status == 404:
            await self.register()
            return
        for attempt in said.get("cancel", []):
            self._stop(attempt)
        self.forgotten += said.get("forget", [])

    async def deliver(self, result: SessionResult) -> int:
        """Brings a result once; returns the service's status."""
        complete = result.model_copy(update={"node_id": result.node_id or self.node_id})
        status, _ = await self.post("/callbacks/session_result", complete.model_dump())
        self.answers.append((f"{result.session_id}.{result.attempt}", status))
        return status

    async def report(self, request: SessionDispatchRequest, status: str, **fields: Any) -> None:
        body = {"session_id": request.session_id, "attempt": request.attempt, "status": status, **fields}
        await self.post("/callbacks/session_state", [body])

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON of the service's answer. Raises `aiohttp.ClientError` or `TimeoutError`."""
        assert self._service is not None, "the node has not joined a service"
        headers = {"content-type": "application/json"}
        async with self._service.post(self.service_url + path, data=orjson.dumps(body), headers=headers) as answer:
            return answer.status, orjson.loads(await answer.read())

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            if not self.silent:
                try:
                    await self.heartbeat()
                except (aiohttp.ClientError, TimeoutError):
                    continue  # the service is down; so are its answers

    async def _run(self, request: SessionDispatchRequest) -> None:
        name = request.attempt_id
        try:
            result = await self.play(request)
            while result is not None:
                try:
                    if await self.deliver(result) in (200, 409, 410):
                        break
                except (aiohttp.ClientError, TimeoutError):
                    pass  # the service is away: it is told again
                await asyncio.sleep(0.1)
            if result is None:
                await asyncio.Event().wait()
        finally:
            self.running.pop(name, None)

    def _stop(self, attempt: str) -> None:
        if not self.deaf:
            self.cancelled.append(attempt)
            task = self.running.pop(attempt, None)
            if task is not None:
                task.cancel()

    def _allowed(self, request: Request) -> bool:
        return self.token is None or request.headers.get("authorization") == f"Bearer {self.token}"

    async def _dispatch(self, request: Request) -> Response:
        if not self._allowed(request):
            return JSONResponse({"error": {"message": "no token"}}, 401)
        if self.refuse is not None:
            return JSONResponse({"error": {"message": "as told"}}, self.refuse, {"retry-after": "0.2"})
        dispatch = SessionDispatchRequest.model_validate_json(await request.body())
        told = {"session_id": dispatch.session_id, "task_id": dispatch.task_id, "status": "REGISTERED", "node_id": self.node_id}
        if dispatch.attempt_id in self.running:
            return JSONResponse(told, 409)
        self.dispatched.append(dispatch)
        self.running[dispatch.attempt_id] = asyncio.create_task(self._run(dispatch))
        return JSONResponse(told, 201)

    async def _cancel(self, request: Request) -> Response:
        if self.deaf:
            return JSONResponse({"error": {"message": "as told"}}, 500)
        self._stop(f"{request.path_params['session_id']}.{request.query_params.get('attempt', '0')}")
        return JSONResponse({"session_id": request.path_params["session_id"], "deleted": True})

    async def _artifacts(self, request: Request) -> Response:
        return JSONResponse({"files": [{"path": "logs/agent.txt", "size": 5}]})

    async def _artifact(self, request: Request) -> Response:
        if request.path_params["path"] != "logs/agent.txt":
            return JSONResponse({"error": {"message": "no such file"}}, 404)
        return Response(b"hello", media_type="application/octet-stream")

    async def _log(self, request: Request) -> Response:
        return PlainTextResponse("printed by the harness\n")


async def _succeed(request: SessionDispatchRequest) -> SessionResult:
    return graded(request)
