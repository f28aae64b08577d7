"""The model API: the listener that sandboxes see. A raw ASGI app; every answer has the caller's own dialect's shape.

The way of a request: session key, dialect and route by path, body, session, operation. No control route exists here, and no
path is ever guessed to be a generation (law 6, law 7).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import orjson

from polar.chat import ChatRequest, JsonObject
from polar.dialects import Dialect, Operation, Route, registered, replay
from polar.errors import CallError, NotFound
from polar.gateway.body import ClientLeft, decompress, parse_json, read_body
from polar.gateway.calls import Call, Context
from polar.gateway.planning import count_prompt
from polar.gateway.recorded import Incoming
from polar.gateway.responder import Responder
from polar.gateway.responses import StoredResponses
from polar.gateway.sending import Internal, LiveAnswer, send_replayed, send_whole
from polar.gateway.served import Models
from polar.gateway.sessions import Sessions, SessionState, hash_key
from polar.gateway.shards import Shards

log = logging.getLogger("polar.gateway")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

HINT_HEADERS = (
    "user-agent",
    "originator",
    "x-app",
    "session-id",
    "thread-id",
    "x-session-id",
    "x-session-affinity",
    "x-parent-session-id",
    "x-claude-code-session-id",
    "x-claude-code-agent-id",
    "x-openai-subagent",
    "x-codex-parent-thread-id",
    "x-codex-window-id",
    "x-stainless-retry-count",
)
"""Headers that harness recipes read to tag a call. None of them ever decides whose session it is."""


NO_WEBSOCKET = "WebSocket is not served here; use HTTP with server-sent events"
CLIENT_LEFT = 499
"""What metrics call the status of an answer that had no taker (nginx's number for it)."""


class Upgrade(CallError):
    """A WebSocket upgrade: refused so that the client falls back to HTTP at once."""

    kind = "invalid_request"
    default_status = 426


@dataclass(slots=True)
class Request:
    """What is known of an HTTP request before its body is read."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    key: str | None
    dialect: Dialect
    route: Route | None


class ModelApi:
    """The ASGI application."""

    def __init__(
        self, context: Context, sessions: Sessions, models: Models, health: Callable[[], JsonObject], shards: Shards | None = None
    ) -> None:
        self._context = context
        self._shards = shards
        self._sessions = sessions
        self._models = models
        self._health = health
        self._stored = StoredResponses(context.store)
        self._limit = context.config.max_body_mb * 1024 * 1024

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = parse_scope(scope)
        began = time.perf_counter()
        reply = Responder(send, receive, head=request.method == "HEAD")
        if request.path == "/health" and request.method in ("GET", "HEAD"):
            health = self._health()
            await reply.json(200 if health["status"] == "ok" else 503, health)
            return
        if self._shards is not None and (owner := self._owner(request.key)) != self._shards.index:
            try:
                if is_upgrade(request):  # a hop's own affair: it cannot be handed over
                    raise Upgrade(NO_WEBSOCKET)
                await self._shards.hand_over(owner, scope, receive, send, self._limit)
            except ClientLeft:
                return
            except CallError as error:
                await self._refuse(request, reply, error)
            return
        operation = "unknown" if request.route is None else request.route.operation.value
        try:
            await self._handle(request, receive, reply)
        except ClientLeft:
            reply.gone = True
        except CallError as error:
            await self._refuse(request, reply, error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("a call failed inside the gateway", extra={"dialect": request.dialect.name, "operation": operation})
            await self._refuse(request, reply, Internal("internal error of the gateway; its log says more"))
        metrics = self._context.metrics
        if reply.gone:
            metrics.left.inc()
        metrics.requests.labels(request.dialect.name, operation, str(reply.status or CLIENT_LEFT)).inc()
        metrics.request_seconds.labels(request.dialect.name).observe(time.perf_counter() - began)

    def _owner(self, key: str | None) -> int:
        """The worker of a request's session; this one where the key is none that Polar gives out: in a header it might become another one
        on its way, of another worker."""
        assert self._shards is not None
        return self._shards.owner(hash_key(key)) if key and key.isascii() else self._shards.index

    async def _refuse(self, request: Request, reply: Responder, error: CallError) -> None:
        if reply.started:
            return
        shape = request.dialect.error(error)
        status = 426 if isinstance(error, Upgrade) else shape.status
        headers = dict(shape.headers)
        if isinstance(error, Upgrade):
            headers["upgrade"] = "HTTP/1.1"
        await reply.json(status, shape.body, headers)

    async def _handle(self, request: Request, receive: Receive, reply: Responder) -> None:
        route = request.route
        if route is not None and route.operation is Operation.PROBE:
            await reply.json(200, {})
            return
        state = await self._sessions.get(request.key)
        if is_upgrade(request):
            raise Upgrade(NO_WEBSOCKET)
        if route is None:
            raise NotFound(f"{request.method} {request.path} is not part of this API")
        match route.operation:
            case Operation.MODELS:
                await reply.json(200, request.dialect.models(self._models.names))
            case Operation.MODEL:
                name = route.params["model"]
                await reply.json(200, request.dialect.card(name, self._models.find(name).context))
            case Operation.RETRIEVE:
                stored, answer = await self._stored.answered(state, route.params["response_id"])
                if route.params.get("stream") == "true":
                    encoder = request.dialect.encoder(stored)
                    await reply.start_stream(encoder)
                    await reply.finish_stream(request.dialect.resumed(b"".join(replay(encoder, [answer])), route.params))
                else:
                    await reply.json(200, request.dialect.complete(stored, [answer]))
            case Operation.INPUT_ITEMS:
                await reply.json(200, await self._stored.items(request.dialect, state, route.params))
            case Operation.DELETE:
                response_id = route.params["response_id"]
                await self._stored.forget(state, response_id)
                await reply.json(200, request.dialect.deleted(response_id))
            case Operation.COUNT:
                chat = await self._parse(request, receive, state)
                context = self._context
                tokens = await count_prompt(chat, state, self._models.find(chat.model), context.store, context.renderer, context.turnstile)
                await reply.json(200, request.dialect.count(tokens, chat))
            case _:
                await self._generate(request, receive, reply, state)

    # --- generation --------------------------------------------------------------------------------------------

    async def _parse(self, request: Request, receive: Receive, state: SessionState) -> ChatRequest:
        assert request.route is not None
        raw = await self._raw(request, receive)
        return await self._stored.resolved(state, request.dialect.parse(parse_json(raw), request.route))

    async def _raw(self, request: Request, receive: Receive) -> bytes:
        raw = await read_body(receive, self._limit)
        return decompress(raw, request.headers.get("content-encoding", ""), self._limit)

    async def _generate(self, request: Request, receive: Receive, reply: Responder, state: SessionState) -> None:
        assert request.route is not None
        raw = await self._raw(request, receive)
        await self._context.turnstile.step(len(raw))
        parsed = request.dialect.parse(parse_json(raw), request.route)
        digest = digest_of(request.dialect, request.route, raw)
        chat = await self._stored.resolved(state, parsed)
        state = await self._sessions.get(request.key)  # once more: while the body came, it may have ended, or been dropped from memory
        call = next((call for call in state.calls.get(digest, ()) if call.adopt()), None)
        if call is None:
            state.check_budget(self._context.clock())
            live = chat.stream and (state.record.settings.get("stream") or self._context.config.stream) == "live"
            incoming = Incoming(request.dialect.name, chat, digest, hints(request), live=live)
            call = Call(self._context, state, self._models.find(chat.model), incoming)
        call.attach(reply.bell.ring)
        delivered = False
        try:
            if call.incoming.live:
                await LiveAnswer(request.dialect, chat, call, reply, self._context.config).send()
            elif chat.stream:
                await send_replayed(request.dialect, chat, call, reply, self._context.config)
            else:
                await send_whole(request.dialect, chat, call, reply)
            delivered = not reply.gone
        finally:
            call.leave(delivered=delivered)
            if delivered:
                for number in call.recorded:
                    state.history.delivered(number)
                    await self._context.store.mark_delivered(state.record.id, number)


def parse_scope(scope: Scope) -> Request:
    """Key, dialect and route of an HTTP request; nothing of it fails."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
    path = re.sub("//+", "/", scope["path"])  # a base URL that ends in a slash makes two of it
    key: str | None = None
    if path.startswith("/s/"):
        key, _, rest = path[3:].partition("/")
        path = "/" + rest
    dialects = registered()
    dialect, route = _routed(scope["method"], path, query, headers)
    if dialect is None:
        dialect = next((candidate for candidate in dialects.values() if candidate.speaks(path, headers)), dialects["openai_chat"])
    if key is None:
        keys = (candidate.key(headers, query) for candidate in (dialect, *dialects.values()))
        key = next((found for found in keys if found), None)
    return Request(scope["method"], path, query, headers, key, dialect, route)


def _routed(method: str, path: str, query: dict[str, str], headers: dict[str, str]) -> tuple[Dialect | None, Route | None]:
    """Whose path it is, and what it asks for. A HEAD that is not a probe of its own asks for what a GET does, without the body."""
    for asked in (method, "GET") if method == "HEAD" else (method,):
        for dialect in registered().values():
            route = dialect.route(asked, path, query, headers)
            if route is not None:
                return dialect, route
    return None, None


def is_upgrade(request: Request) -> bool:
    return request.headers.get("upgrade", "").lower() == "websocket"


def digest_of(dialect: Dialect, route: Route, raw: bytes) -> bytes:
    """What makes two requests byte-equal: their body, and what their paths ask for (a Google path names model and streaming)."""
    digest = hashlib.blake2b(raw, digest_size=16, person=dialect.name.encode()[:16])
    digest.update(orjson.dumps([route.operation.value, sorted(route.params.items())]))
    return digest.digest()


def hints(request: Request) -> JsonObject:
    found: JsonObject = {name: request.headers[name] for name in HINT_HEADERS if name in request.headers}
    found["path"] = request.path
    return found
