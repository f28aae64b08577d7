"""The model API: the listener that sandboxes see. A raw ASGI app; every answer has the caller's own dialect's shape.

The way of a request: session key, dialect and route by path, body, session, operation. No control route exists here, and no
path is ever guessed to be a generation (law 6, law 7).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

import orjson

from polar.chat import ChatRequest, JsonObject, merged
from polar.dialects import Dialect, Encoder, Operation, Reply, Route, registered, replay
from polar.errors import CallError, NotFound
from polar.gateway.body import ClientLeft, decompress, parse_json, read_body
from polar.gateway.calls import Call, Context, Incoming
from polar.gateway.planning import count_prompt
from polar.gateway.responder import Responder
from polar.gateway.responses import StoredResponses
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


class Internal(CallError):
    kind = "internal"
    default_status = 500


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
        reply = Responder(send, receive)
        if request.path == "/health" and request.method in ("GET", "HEAD"):
            health = self._health()
            await reply.json(200 if health["status"] == "ok" else 503, health, head=request.method == "HEAD")
            return
        if self._shards is not None and request.key and (owner := self._shards.owner(hash_key(request.key))) != self._shards.index:
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

    async def _refuse(self, request: Request, reply: Responder, error: CallError) -> None:
        if reply.started:
            return
        shape = request.dialect.error(error)
        status = 426 if isinstance(error, Upgrade) else shape.status
        headers = dict(shape.headers)
        if isinstance(error, Upgrade):
            headers["upgrade"] = "HTTP/1.1"
        await reply.json(status, shape.body, headers, head=request.method == "HEAD")

    async def _handle(self, request: Request, receive: Receive, reply: Responder) -> None:
        route = request.route
        if route is not None and route.operation is Operation.PROBE:
            await reply.json(200, {}, head=request.method == "HEAD")
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
                    await reply.finish_stream(b"".join(replay(encoder, [answer])))
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
                await self._send_live(request.dialect, chat, call, reply)
            elif chat.stream:
                await self._send_replayed(request.dialect, chat, call, reply)
            else:
                await self._send_whole(request.dialect, chat, call, reply)
            delivered = not reply.gone
        finally:
            call.leave(delivered=delivered)
            if delivered:
                for number in call.recorded:
                    state.history.delivered(number)
                    await self._context.store.mark_delivered(state.record.id, number)

    async def _send_whole(self, dialect: Dialect, chat: ChatRequest, call: Call, reply: Responder) -> None:
        while not await reply.until(call.done, 3600.0):
            pass
        await reply.json(200, dialect.complete(reply_of(chat, call), call.answers()))

    async def _send_replayed(self, dialect: Dialect, chat: ChatRequest, call: Call, reply: Responder) -> None:
        """The whole answer through the stream's encoder; pings only if it takes long, so that a quick failure keeps its status."""
        if not await reply.until(call.done, self._context.config.first_ping_s):
            await self._send_with_pings(dialect.encoder(reply_of(chat, call)), call, reply)
            return
        error = call.failure()
        if error is not None and not (isinstance(error, CallError) and dialect.errors_in_stream(error, chat)):
            raise error
        encoder = dialect.encoder(reply_of(chat, call))
        await reply.start_stream(encoder)
        if error is not None:
            await reply.finish_stream(encoder.start() + encoder.error(as_call_error(error)))
            return
        early, late = replay(encoder, call.answers())
        await reply.finish_stream(early + late)

    async def _send_with_pings(self, encoder: Encoder, call: Call, reply: Responder) -> None:
        await reply.start_stream(encoder)
        await reply.send(encoder.start() + encoder.ping())
        while not await reply.until(call.done, self._context.config.ping_s):
            await reply.send(encoder.ping())
        error = call.failure()
        if error is not None:
            await reply.finish_stream(encoder.error(as_call_error(error)))
            return
        early, late = replay(encoder, call.answers(), start=False)
        await reply.finish_stream(early + late)

    async def _send_live(self, dialect: Dialect, chat: ChatRequest, call: Call, reply: Responder) -> None:
        """Deltas as they are sampled, all that have come at a time; the finish is among them only once the completion is durable."""
        config = self._context.config
        encoder: Encoder | None = None
        seen = 0

        def happened() -> bool:
            return call.done() or bool(call.more(seen))

        while True:
            in_time = await reply.until(happened, config.first_ping_s if encoder is None else config.ping_s)
            fresh = call.more(seen)
            failure = call.failure() if call.done() and not fresh else None
            if encoder is None and isinstance(failure, CallError) and not dialect.errors_in_stream(failure, chat):
                raise failure
            if encoder is None:
                encoder = dialect.encoder(reply_of(chat, call))
                await reply.start_stream(encoder)
                await reply.send(encoder.start())
            if fresh:
                seen += len(fresh)
                await reply.send(encoder.feed(fresh[0]) if len(fresh) == 1 else b"".join(map(encoder.feed, merged(fresh))))
            elif failure is not None:
                await reply.finish_stream(encoder.error(as_call_error(failure)))
                return
            elif call.done():
                await reply.finish_stream(encoder.end())
                return
            elif not in_time:
                await reply.send(encoder.ping())


def parse_scope(scope: Scope) -> Request:
    """Key, dialect and route of an HTTP request; nothing of it fails."""
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
    query = dict(parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True))
    path: str = scope["path"]
    key: str | None = None
    if path.startswith("/s/"):
        key, slash, rest = path[3:].partition("/")
        path = slash + rest
    path = "/" + path.lstrip("/")  # a base URL that ends in a slash makes two of it
    dialects = registered()
    dialect, route = None, None
    for candidate in dialects.values():
        route = candidate.route(scope["method"], path, query, headers)
        if route is not None:
            dialect = candidate
            break
    if dialect is None:
        dialect = next((candidate for candidate in dialects.values() if candidate.speaks(path, headers)), dialects["openai_chat"])
    if key is None:
        keys = (candidate.key(headers, query) for candidate in (dialect, *dialects.values()))
        key = next((found for found in keys if found), None)
    return Request(scope["method"], path, query, headers, key, dialect, route)


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


def reply_of(chat: ChatRequest, call: Call) -> Reply:
    return Reply(request=chat, ref=call.ref, created=int(call.started), prompt_tokens=call.prompt_tokens, context=call.context)


def as_call_error(error: BaseException) -> CallError:
    """What an in-stream error says: our own errors as they are, anything else without its inside."""
    if isinstance(error, CallError):
        return error
    log.error("a call failed inside the gateway", exc_info=error)
    return Internal("internal error of the gateway; its log says more")
