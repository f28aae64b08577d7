"""A node's HTTP routes, on its gateway's control listener, before the gateway's own. Decides nothing about attempts.

The same paths serve attempts and the gateway's bare capture sessions: a `POST /sessions` with an agent is a dispatch, a session that is
no attempt's is the gateway's, and is passed on to it.

    GET    /health                           the reference's fields, beside the gateway's
    POST   /sessions                         dispatch: 201; 409 duplicate; 503 with Retry-After when full
    GET    /sessions?status&task_id&limit    attempts that run (`status=open|closed|all` lists the gateway's capture sessions)
    GET    /sessions/{id}?attempt            state, and the result while it is here
    DELETE /sessions/{id}?attempt            cancel, or drop an undelivered result
    GET    /sessions/{id}/completions        what was captured, one JSON object a line with `Accept: application/x-ndjson`
    GET    /sessions/{id}/artifacts[/{path}] files
    GET    /sessions/{id}/log?follow&stream  the harness's output
    GET    /events                           server-sent: hello, ping, session.state_changed, session.warning
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import orjson
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Match, Route

from polar.chat import JsonObject
from polar.errors import CallError, ConfigError, InvalidRequest, NotFound, RolloutError, StoreError
from polar.gateway.admin import Json, authorise, failure, read_object
from polar.rollout.models import ID_PATTERN, SessionDispatchRequest
from polar.rollout.node.artifacts import scrub
from polar.rollout.node.attempt import Attempt
from polar.store.export import completion_to_json
from polar.trajectory.text import loads

if TYPE_CHECKING:
    from polar.rollout.node.node import Node

Handler = Callable[[Request], Awaitable[Response]]

RETRY_AFTER_S = 1
PING_S = 15.0
LOG_POLL_S = 0.2
PIECE = 1 << 16
CAPTURE_STATES = ("open", "closed", "all")


class Served:
    """The handlers, over one node. `plain` are the gateway's own routes."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.plain = [route for route in node.gateway.admin.router.routes if isinstance(route, Route)]

    async def pass_on(self, request: Request) -> Response:
        """What the gateway answers to this request."""
        for route in self.plain:
            match, scope = route.matches(request.scope)
            if match is Match.FULL:
                request.scope.update(scope)
                answer: Response = await route.endpoint(request)
                return answer
        raise NotFound(f"{request.method} {request.url.path} is not part of this API")

    # --- the node ---

    async def health(self, request: Request) -> Response:
        node = self.node
        body = await (node.gateway.health() if "own" in request.query_params else node.gateway.full_health())
        stages = node.stages
        registration = node.registration()
        body |= {
            "node_id": node.config.id,
            "gateway_url": registration.gateway_url,
            "draining": node.draining,
            "metrics": registration.metrics.model_dump(),
            "active_status_counts": dict(Counter(one.status for one in node.attempts)),
            "active_sessions": len(node.attempts),
            "available_init": stages.init.free,
            "available_run": stages.run.free,
            "available_postrun": stages.post.free,
        }
        return Json(body, 200 if body["status"] == "ok" else 503)

    async def events(self, request: Request) -> Response:
        async def stream() -> AsyncIterator[bytes]:
            yield _event("hello", {"node_id": self.node.config.id, "instance": self.node.instance})
            async for event in self.node.feed.follow(PING_S):
                yield _event("ping", {}) if event is None else _event(str(event["type"]), event)

        return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    # --- sessions ---

    async def create(self, request: Request) -> Response:
        body = await read_object(request)
        if "agent" not in body:
            return await self.pass_on(request)
        try:
            dispatch = SessionDispatchRequest.model_validate(body)
        except ValidationError as error:
            lines = "; ".join(f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors())
            raise InvalidRequest(lines, status=422) from error
        try:
            attempt = await self.node.dispatch(dispatch)
        except ConfigError as error:
            raise InvalidRequest(str(error), status=422) from error
        return Json(self.shown(attempt), 201)

    async def listed(self, request: Request) -> Response:
        query = request.query_params
        if query.get("status") in CAPTURE_STATES or "before" in query:
            return await self.pass_on(request)
        limit = min(10_000, max(1, _number(query.get("limit")) or 1_000))
        found = [
            one
            for one in self.node.attempts
            if query.get("status") in (None, one.status) and query.get("task_id") in (None, one.request.task_id)
        ]
        return Json({"sessions": [self.shown(one) for one in found[:limit]], "total": len(found), "next": None})

    async def show(self, request: Request) -> Response:
        session_id, number = _asked(request)
        attempt = self.node.books.find(session_id, number)
        if attempt is not None:
            return Json({**self.shown(attempt), "result": None})
        owed = self.node.books.owed(session_id, number)
        if owed is not None:
            return await asyncio.to_thread(lambda: _with_result(self.node.spool.body(owed)))
        ended = self.node.books.ended(session_id, number)
        summary = await asyncio.to_thread(self._summary, session_id, number if ended is None else ended.attempt)
        if summary is None:
            return await self.pass_on(request)
        return _with_result(summary)

    async def remove(self, request: Request) -> Response:
        session_id, number = _asked(request)
        attempt = self.node.books.find(session_id, number)
        if attempt is not None:
            turns = attempt.turns
            self.node.cancel(attempt)
            return Json({"session_id": session_id, "attempt": attempt.request.attempt, "deleted": True, "messages_deleted": turns})
        owed = self.node.books.owed(session_id, number)
        if owed is not None:
            await self.node.deliveries.forget(owed)
            return Json({"session_id": session_id, "attempt": int(owed.rpartition(".")[2]), "deleted": True, "messages_deleted": 0})
        if number is not None:
            raise NotFound(f"the attempt {number} of session {session_id!r} is not here")
        if self.node.books.ended(session_id) is not None:
            return Json({"session_id": session_id, "deleted": False, "messages_deleted": 0})
        return await self.pass_on(request)

    async def completions(self, request: Request) -> Response:
        session_id, number = _asked(request)
        store = self.node.gateway.store
        wanted = [session_id] if number is None else []
        latest = self._latest(session_id) if number is None else number
        if latest is not None:
            wanted.insert(0, f"{session_id}.{latest}")
        found = [await store.session(name) for name in wanted]
        record = next((one for one in found if one is not None), None)
        if record is None:
            raise NotFound(f"no session is called {session_id!r}")

        async def lines() -> AsyncIterator[bytes]:
            async for completion in store.completions(record.id):
                yield completion_to_json(completion) + b"\n"

        if "application/x-ndjson" in request.headers.get("accept", ""):
            return StreamingResponse(lines(), media_type="application/x-ndjson")
        head = orjson.dumps({"session_id": session_id, "completions": []})[:-2]

        async def whole() -> AsyncIterator[bytes]:
            yield head
            first = True
            async for line in lines():
                yield line.rstrip() if first else b"," + line.rstrip()
                first = False
            yield b"]}"

        return StreamingResponse(whole(), media_type="application/json")

    # --- artefacts and logs ---

    async def artifacts(self, request: Request) -> Response:
        session_id, number = self._folder(request)
        files = await asyncio.to_thread(self.node.artifacts.files, session_id, number)
        return Json({"session_id": session_id, "attempt": number, "files": [{"path": one.path, "size": one.size} for one in files]})

    async def artifact(self, request: Request) -> Response:
        session_id, number = self._folder(request)
        path = request.path_params["path"]
        try:
            descriptor = await asyncio.to_thread(self.node.artifacts.open, session_id, number, path)
        except FileNotFoundError:
            raise NotFound(f"session {session_id!r} has no artefact {path!r}") from None
        size = os.fstat(descriptor).st_size
        headers = {"content-length": str(size), "x-content-type-options": "nosniff"}
        media_type = "application/json" if path.endswith(".json") else "application/octet-stream"
        if path.endswith((".txt", ".log", ".diff", ".stdout", ".stderr")):
            media_type = "text/plain; charset=utf-8"
        return StreamingResponse(_content(descriptor, size), media_type=media_type, headers=headers)

    async def log(self, request: Request) -> Response:
        """What the harness printed; with `follow` as it comes, until it has ended."""
        session_id, number = self._folder(request)
        stream = request.query_params.get("stream", "stdout")
        if stream not in ("stdout", "stderr"):
            raise InvalidRequest("stream must be stdout or stderr", param="stream")
        follow = request.query_params.get("follow", "0").lower() in ("1", "true", "yes")
        return StreamingResponse(self._lines(session_id, number, f"harness.{stream}", follow), media_type="text/plain; charset=utf-8")

    async def _lines(self, session_id: str, number: int, name: str, follow: bool) -> AsyncIterator[bytes]:
        """Whole lines, keys taken out."""
        descriptor, rest = -1, b""
        try:
            while True:
                attempt = self.node.books.find(session_id, number)
                live = follow and attempt is not None and not attempt.over
                if descriptor < 0:
                    try:
                        descriptor = self.node.artifacts.open(session_id, number, name)
                    except FileNotFoundError:
                        if not live:
                            return
                while descriptor >= 0 and (piece := await asyncio.to_thread(os.read, descriptor, PIECE)):
                    text, newline, rest = (rest + piece).rpartition(b"\n")
                    if newline:
                        yield scrub(text + newline)
                if not live:
                    yield scrub(rest)
                    return
                await asyncio.sleep(LOG_POLL_S)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _folder(self, request: Request) -> tuple[str, int]:
        session_id, number = _asked(request)
        number = self._latest(session_id) if number is None else number
        if number is None or not re.fullmatch(ID_PATTERN, session_id):
            raise NotFound(f"no session is called {session_id!r} here")
        return session_id, number

    def _latest(self, session_id: str) -> int | None:
        attempt = self.node.books.find(session_id)
        return self.node.artifacts.latest(session_id) if attempt is None else attempt.request.attempt

    def _summary(self, session_id: str, number: int | None) -> bytes | None:
        """`result.json` of an attempt that is no longer owed."""
        number = self.node.artifacts.latest(session_id) if number is None else number
        if number is None or not re.fullmatch(ID_PATTERN, session_id):
            return None
        try:
            descriptor = self.node.artifacts.open(session_id, number, "result.json")
        except FileNotFoundError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def shown(self, attempt: Attempt) -> JsonObject:
        request = attempt.request
        return {
            "session_id": request.session_id,
            "task_id": request.task_id,
            "status": attempt.status,
            "node_id": self.node.config.id,
            "attempt": request.attempt,
            "sample": request.sample,
            "turns": attempt.turns,
            "completion_count": attempt.turns,
            "created_at": attempt.created,
            "changed_at": attempt.changed,
            "timing": attempt.found.timing.model_dump(),
            "warnings": attempt.found.warnings,
        }


def routes(node: Node) -> list[Route]:
    """All of a node, each but health behind the control API's token."""
    served = Served(node)

    def guarded(handler: Handler) -> Handler:
        async def wrapped(request: Request) -> Response:
            try:
                authorise(request, node.gateway.admin_token)
                return await handler(request)
            except CallError as error:
                return _overloaded(error) if isinstance(error, StoreError) else failure(error)
            except RolloutError as error:
                headers = {"retry-after": str(RETRY_AFTER_S)} if error.status == 503 else None
                body = {"error": {"type": "rollout", "message": error.message, "code": error.code, "param": None}}
                return Json(body, error.status, headers=headers)

        return wrapped

    one = "/sessions/{session_id}"
    get, path = partial(Route, methods=["GET"]), "{path:path}"
    return [
        Route("/health", served.health),
        get("/events", guarded(served.events)),
        Route("/sessions", guarded(served.create), methods=["POST"]),
        get("/sessions", guarded(served.listed)),
        get(one, guarded(served.show)),
        Route(one, guarded(served.remove), methods=["DELETE"]),
        get(f"{one}/completions", guarded(served.completions)),
        get(f"{one}/artifacts", guarded(served.artifacts)),
        get(f"{one}/artifacts/{path}", guarded(served.artifact)),
        get(f"{one}/log", guarded(served.log)),
    ]


def _overloaded(error: StoreError) -> Response:
    """A disk that takes no intake record is like a full node: the dispatch waits at the service."""
    answer = failure(error)
    answer.headers["retry-after"] = str(RETRY_AFTER_S)
    return answer


def _asked(request: Request) -> tuple[str, int | None]:
    """Which session, and which of its attempts (`None`: its latest)."""
    return request.path_params["session_id"], _number(request.query_params.get("attempt"))


def _number(text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise InvalidRequest(f"{text!r} is not a number")
    return int(text)


def _with_result(result: bytes) -> Response:
    """The state of an ended session, around its result as it lies on disk."""
    known = loads(result)
    head = {name: known.get(name) for name in ("session_id", "task_id", "status", "node_id", "attempt", "sample", "turns", "outcome")}
    return Response(orjson.dumps(head)[:-1] + b',"result":' + result + b"}", media_type="application/json")


def _event(name: str, data: JsonObject) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + orjson.dumps(data) + b"\n\n"


async def _content(descriptor: int, size: int) -> AsyncIterator[bytes]:
    """Exactly `size` bytes of a file, which is closed at the end."""
    try:
        while size > 0:
            piece = await asyncio.to_thread(os.read, descriptor, min(PIECE * 16, size))
            if not piece:
                return
            size -= len(piece)
            yield piece
    finally:
        os.close(descriptor)
