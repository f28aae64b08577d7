"""The routes that nodes call, and those about them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from polar.errors import RolloutError
from polar.rollout import reading
from polar.rollout.api_docs import Endpoint
from polar.rollout.api_inference import Inference
from polar.rollout.leases import drain
from polar.rollout.models import Heartbeat, NodeRegistration, SessionResult
from polar.rollout.results import Delivered, StateReport, accept, moved

if TYPE_CHECKING:
    from polar.rollout.service import Service

_REPORTS: TypeAdapter[list[StateReport]] = TypeAdapter(list[StateReport])


SMALL = 32_000
"""Bytes of a result that are read at once; the reading of a larger one would keep others waiting, and has a thread of its own."""


def _read(raw: bytes) -> Delivered:
    return Delivered.of(SessionResult.model_validate_json(raw))


def node_endpoints(service: Service, inference: Inference) -> list[Endpoint]:
    from polar.rollout.api import Json, parsed, wrong  # they are made there for both files

    database = service.database

    async def register(request: Request) -> Response:
        registration = parsed(NodeRegistration, await request.body())
        inference.forget(registration.node_id)
        await inference.greet(registration.node_id, registration.gateway_url, registration.token)
        return Json(await service.register(registration))

    async def heartbeat(request: Request) -> Response:
        beat = parsed(Heartbeat, await request.body() or b"{}")
        answer = await service.heartbeat(request.path_params["node_id"], beat)
        await inference.greet(request.path_params["node_id"])
        return Json(answer)

    async def listed(request: Request) -> Response:
        return Json({"nodes": await database.read(reading.list_nodes)})

    async def show(request: Request) -> Response:
        node_id = request.path_params["node_id"]
        found = await database.read(lambda connection: reading.list_nodes(connection, node_id))
        if not found:
            raise RolloutError(f"no node is called {node_id!r}", code="not_found", status=404)
        return Json(found[0])

    async def leave(request: Request) -> Response:
        node_id = request.path_params["node_id"]
        if not await database.write(lambda tx: drain(tx, node_id)):
            raise RolloutError(f"no node is called {node_id!r}", code="not_found", status=404)
        return Json({"node_id": node_id, "draining": True})

    async def result(request: Request) -> Response:
        raw = await request.body()
        try:
            delivered = _read(raw) if len(raw) < SMALL else await asyncio.to_thread(_read, raw)
        except ValidationError as error:
            raise RolloutError(wrong(error), code="invalid_request", status=422) from error
        except ValueError as error:
            raise RolloutError(str(error), code="invalid_request", status=422) from error
        answer = await database.write(lambda tx: accept(tx, delivered))
        return Json({"status": answer.word, "session_id": delivered.result.session_id}, answer.status)

    async def states(request: Request) -> Response:
        try:
            body: Any = orjson.loads(await request.body() or b"[]")
            reports = _REPORTS.validate_python(body if isinstance(body, list) else [body])
        except ValidationError as error:
            raise RolloutError(wrong(error), code="invalid_request", status=422) from error
        except orjson.JSONDecodeError as error:
            raise RolloutError(f"Invalid JSON: {error}", code="invalid_request", status=422) from error
        await database.write(lambda tx: moved(tx, reports))
        return Json({"status": "ok"})

    return [
        Endpoint("POST", "/nodes/register", "A node has started", register, body=NodeRegistration),
        Endpoint(
            "POST", "/nodes/{node_id}/heartbeat", "A node lives; the answer says what to cancel and forget", heartbeat, body=Heartbeat
        ),
        Endpoint("GET", "/nodes", "All nodes", listed),
        Endpoint("GET", "/nodes/{node_id}", "One node", show),
        Endpoint("DELETE", "/nodes/{node_id}", "Drain a node: it gets nothing more, and what it has goes on", leave),
        Endpoint(
            "POST",
            "/callbacks/session_result",
            "A session's result. 200: it is durable; 410: nobody wants it",
            result,
            body=SessionResult,
        ),
        Endpoint("POST", "/callbacks/session_state", "Where attempts are: one report, or a list", states, body=StateReport),
    ]
