"""The control API: sessions, health, metrics, pause and resume. On a loopback listener of its own; every route but health needs
the admin token."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from polar.chat import JsonObject
from polar.errors import CallError, ConfigError, InvalidRequest, NotFound, Unauthenticated
from polar.records import Session

if TYPE_CHECKING:
    from polar.gateway.gateway import Answers, Gateway

Handler = Callable[[Request], Awaitable[Response]]

SESSION_ID = re.compile(r"[^\s/\x00-\x1f\x7f]{1,200}")
"""What a caller may name a session: the control routes hold it as one part of a path."""

INTERRUPT_S = 30.0
"""How long an interrupted call may take to leave its engine."""

SESSION_SETTINGS = ("budgets", "sampling", "stream")
SESSION_FIELDS = ("kind", "settings", "metadata", "session_id")


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def admin_app(gateway: Gateway) -> Starlette:
    """The ASGI app of the control listener."""

    def guarded(handler: Handler) -> Handler:
        async def wrapped(request: Request) -> Response:
            try:
                authorise(request, gateway.admin_token)
                return await handler(request)
            except CallError as error:
                return failure(error)

        return wrapped

    async def health(request: Request) -> Response:
        body = await (gateway.health() if "own" in request.query_params else gateway.full_health())
        return Json(body, 200 if body["status"] == "ok" else 503)

    async def metrics(request: Request) -> Response:
        text = await gateway.metrics_text(own="own" in request.query_params)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def create(request: Request) -> Response:
        body = await read_object(request)
        only(body, SESSION_FIELDS)
        kind = body.get("kind", "train")
        if kind not in ("train", "eval"):
            raise InvalidRequest("kind must be 'train' or 'eval'", param="kind")
        for name in ("settings", "metadata"):
            if not isinstance(body.get(name, {}), dict):
                raise InvalidRequest(f"{name} must be an object", param=name)
        only(body.get("settings", {}), SESSION_SETTINGS, within="settings.")
        session_id = body.get("session_id")
        if session_id is not None and (not isinstance(session_id, str) or not SESSION_ID.fullmatch(session_id)):
            raise InvalidRequest("session_id must be 1 to 200 characters, no spaces, slashes or control characters", param="session_id")
        try:
            record, key = await gateway.sessions.create(
                kind=kind, settings=body.get("settings"), metadata=body.get("metadata"), session_id=session_id
            )
        except ValueError as error:
            raise InvalidRequest(f"session_id: {error}", param="session_id", status=409) from error
        return Json({**shown(record), "key": key, "base_url": gateway.base_url(key), "context": gateway.default.context}, 201)

    async def listed(request: Request) -> Response:
        query = request.query_params
        try:
            limit = min(1000, max(1, int(query.get("limit", "100"))))
            before = None if query.get("before") is None else float(query["before"])
        except ValueError as error:
            raise InvalidRequest(f"limit and before must be numbers: {error}") from error
        rows = await gateway.store.sessions(limit=limit, before=before, open_only=query.get("status") == "open")
        return Json({"sessions": [shown(row) for row in rows], "next": rows[-1].created if len(rows) >= limit else None})

    async def show(request: Request) -> Response:
        record = await found(request)
        heads = await gateway.store.heads(record.id)
        return Json({**shown(record), "completion_count": len(heads), "sampled_tokens": sum(head.sampled for head in heads)})

    async def close(request: Request) -> Response:
        record = await found(request)
        return Json({"session_id": record.id, "closed": await gateway.close_session(record)})

    async def found(request: Request) -> Session:
        record = await gateway.store.session(request.path_params["session_id"])
        if record is None:
            raise NotFound(f"no session is called {request.path_params['session_id']!r}")
        return record

    async def status(request: Request) -> Response:
        return Json(whole_status(gateway.inference_status(), await spread(request)))

    async def pause(request: Request) -> Response:
        try:
            timeout_s = float(request.query_params.get("timeout_seconds", "300"))
        except ValueError as error:
            raise InvalidRequest("timeout_seconds must be a number of seconds", param="timeout_seconds") from error
        if not 0 <= timeout_s < float("inf"):
            raise InvalidRequest("timeout_seconds must be a number of seconds, 0 or more", param="timeout_seconds")
        interrupt = request.query_params.get("interrupt", "false")
        if interrupt not in ("true", "false"):
            raise InvalidRequest("interrupt must be true or false", param="interrupt")
        own, others = await asyncio.gather(drain(timeout_s, interrupt == "true"), spread(request))
        drained, interrupted = own
        interrupted += sum(int(answer[1].get("interrupted", 0)) for answer in others.values() if not isinstance(answer, CallError))
        body = {**whole_status(gateway.inference_status(), others), "interrupted": interrupted}
        return Json(body, 200 if drained and agreed(others) else 504)

    async def drain(timeout_s: float, interrupt: bool) -> tuple[bool, int]:
        """Closes the gate; whether nothing is in flight any more, and how many calls were interrupted for that."""
        if await gateway.gate.pause(timeout_s) or not interrupt:
            return not gateway.gate.inflight, 0
        interrupted = gateway.gate.interrupt()
        return await gateway.gate.drained(INTERRUPT_S), interrupted

    async def resume(request: Request) -> Response:
        gateway.gate.resume()
        others = await spread(request)
        return Json(whole_status(gateway.inference_status(), others), 200 if agreed(others) else 504)

    async def policy(request: Request) -> Response:
        body = await read_object(request)
        version = body.get("policy_version")
        if not isinstance(version, str | int) or isinstance(version, bool):
            raise InvalidRequest("policy_version must be a string or an integer", param="policy_version")
        gateway.gate.policy_version = str(version)
        await asyncio.gather(*(served.pool.note_versions() for served in gateway.models.all))
        others = await spread(request, body)
        return Json(whole_status(gateway.inference_status(), others), 200 if agreed(others) else 504)

    async def spread(request: Request, body: JsonObject | None = None) -> Answers:
        """The same control call of all other workers, unless it came from one of them."""
        if "own" in request.query_params:
            return {}
        query = "&".join(part for part in (request.url.query, "own=1") if part)
        return await gateway.everywhere(request.method, f"{request.url.path}?{query}", body)

    async def recheck(request: Request) -> Response:
        await spread(request)
        try:
            await gateway.recheck()
        except ConfigError as error:
            raise InvalidRequest(str(error)) from error
        return Json(await gateway.health())

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/metrics", guarded(metrics)),
            Route("/sessions", guarded(create), methods=["POST"]),
            Route("/sessions", guarded(listed)),
            Route("/sessions/{session_id}", guarded(show)),
            Route("/sessions/{session_id}", guarded(close), methods=["DELETE"]),
            Route("/admin/inference/status", guarded(status)),
            Route("/admin/inference/pause", guarded(pause), methods=["POST"]),
            Route("/admin/inference/resume", guarded(resume), methods=["POST"]),
            Route("/admin/policy", guarded(policy), methods=["POST"]),
            Route("/admin/recheck", guarded(recheck), methods=["POST"]),
        ]
    )


def agreed(others: Answers) -> bool:
    """Whether all other workers have done the same."""
    return all(not isinstance(answer, CallError) and answer[0] == 200 for answer in others.values())


def whole_status(own: JsonObject, others: Answers) -> JsonObject:
    """Of all workers that answer: their calls added up, and paused if all of them are."""
    answers = [own, *(answer[1] for answer in others.values() if not isinstance(answer, CallError) and "inflight" in answer[1])]
    counts = {name: sum(answer[name] for answer in answers) for name in ("inflight", "waiting")}
    return {**own, **counts, "paused": all(answer["paused"] for answer in answers)}


def authorise(request: Request, token: str) -> None:
    """Raises `Unauthenticated` unless the admin token is there, compared in constant time."""
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {token}".encode()):
        raise Unauthenticated("the control API needs the admin token: Authorization: Bearer TOKEN (printed when the gateway started)")


def failure(error: CallError) -> Response:
    body: JsonObject = {"error": {"type": error.kind, "message": error.message, "code": error.code, "param": error.param}}
    return Json(body, error.status)


async def read_object(request: Request) -> JsonObject:
    raw = await request.body()
    if not raw:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("the body must be a JSON object")
    return body


def only(body: JsonObject, known: Sequence[str], within: str = "") -> None:
    """Raises `InvalidRequest` for a field that would do nothing: a typing error would go unnoticed until the data is looked at."""
    for name in body:
        if name not in known:
            place = f"; it belongs into settings: settings.{name}" if name in SESSION_SETTINGS else ""
            raise InvalidRequest(f"there is no field {within}{name}{place}; there are {', '.join(known)}", param=within + name)


def shown(record: Session) -> JsonObject:
    """A session as the control API shows it: never its key or secret."""
    return {
        "session_id": record.id,
        "kind": record.kind,
        "status": "open" if record.closed is None else "closed",
        "created": record.created,
        "closed": record.closed,
        "age_seconds": round((record.closed or time.time()) - record.created, 3),
        "settings": record.settings,
        "metadata": record.metadata,
    }
