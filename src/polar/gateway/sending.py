"""How a call's answer goes to its client: whole, replayed as a stream, or live. Knows no path, no key and no engine."""

from __future__ import annotations

import asyncio
import logging

from polar.chat import ChatRequest, merged
from polar.dialects import Dialect, Encoder, Reply, replay
from polar.errors import CallError
from polar.gateway.calls import Call
from polar.gateway.config import GatewayConfig
from polar.gateway.responder import Responder

log = logging.getLogger("polar.gateway")

EARLY_S = 0.001
"""By how much a timer may come early: event loops count in milliseconds."""


class Internal(CallError):
    kind = "internal"
    default_status = 500


async def send_whole(dialect: Dialect, chat: ChatRequest, call: Call, reply: Responder) -> None:
    while not await reply.until(call.done, 3600.0):
        pass
    await reply.json(200, dialect.complete(reply_of(chat, call), call.answers()), headers_of(dialect, call))


async def send_replayed(dialect: Dialect, chat: ChatRequest, call: Call, reply: Responder, config: GatewayConfig) -> None:
    """The whole answer through the stream's encoder; pings only if it takes long, so that a quick failure keeps its status."""
    if not await reply.until(call.done, config.first_ping_s):
        await _send_with_pings(dialect, chat, call, reply, config)
        return
    error = call.failure()
    if error is not None and not (isinstance(error, CallError) and dialect.errors_in_stream(error, chat)):
        raise error
    encoder = dialect.encoder(reply_of(chat, call))
    # the whole stream before its status goes out: a fault of the encoder is a 500
    stream = b"".join(replay(encoder, call.answers())) if error is None else encoder.start() + encoder.error(as_call_error(error))
    await reply.start_stream(encoder, headers_of(dialect, call))
    await reply.finish_stream(stream)


async def _send_with_pings(dialect: Dialect, chat: ChatRequest, call: Call, reply: Responder, config: GatewayConfig) -> None:
    encoder = dialect.encoder(reply_of(chat, call))
    await reply.start_stream(encoder, headers_of(dialect, call))
    await reply.send(encoder.start() + encoder.ping())
    while not await reply.until(call.done, config.ping_s):
        await reply.send(encoder.ping())
    error = call.failure()
    if error is not None:
        await reply.finish_stream(encoder.error(as_call_error(error)))
        return
    early, late = replay(encoder, call.answers(), start=False)
    await reply.finish_stream(early + late)


class LiveAnswer:
    """Deltas as they are sampled; the finish is among them only once the completion is durable.

    Once the stream has begun, `came` writes what comes in the very turn of the event loop in which the engine's bytes came. The task of
    the request begins and ends the stream, pings, and takes over while the client is slower than the engine: then deltas wait, not bytes.
    """

    def __init__(self, dialect: Dialect, chat: ChatRequest, call: Call, reply: Responder, config: GatewayConfig) -> None:
        self._dialect = dialect
        self._chat = chat
        self._call = call
        self._reply = reply
        self._config = config
        self._encoder: Encoder | None = None
        self._seen = 0
        self._sent_at = 0.0
        self._time = asyncio.get_running_loop().time
        self._failed: Exception | None = None

    def came(self) -> None:
        """Deltas have come, or the end has."""
        encoder = self._encoder
        if encoder is None or self._failed is not None or not self._reply.free or self._call.done():
            self._reply.bell.ring()
            return
        try:
            self._reply.send_now(self._fresh(encoder))
        except Exception as error:  # the encoder's: it is the answer that fails, not the generation
            self._failed = error
            self._reply.bell.ring()

    async def send(self) -> None:
        call, reply, ping_s = self._call, self._reply, self._config.ping_s
        call.attach(self.came)
        come = await reply.until(self._has_come, self._config.first_ping_s)
        failure = call.failure() if come and not call.more(0) else None
        if isinstance(failure, CallError) and not self._dialect.errors_in_stream(failure, self._chat):
            raise failure
        encoder = self._dialect.encoder(reply_of(self._chat, call))
        await reply.start_stream(encoder, headers_of(self._dialect, call))
        await reply.send(encoder.start() + self._fresh(encoder))
        self._encoder = encoder
        while True:
            in_time = await reply.until(self._has_come, max(0.0, self._sent_at + ping_s - self._time()))
            if self._failed is not None:
                raise self._failed
            if call.more(self._seen):
                await reply.send(self._fresh(encoder))
            elif call.done():
                failure = call.failure()
                await reply.finish_stream(encoder.end() if failure is None else encoder.error(as_call_error(failure)))
                return
            elif not in_time and self._time() > self._sent_at + ping_s - EARLY_S:
                self._sent_at = self._time()
                await reply.send(encoder.ping())

    def _has_come(self) -> bool:
        return self._failed is not None or self._call.done() or bool(self._call.more(self._seen))

    def _fresh(self, encoder: Encoder) -> bytes:
        """The events of all deltas that were not sent yet."""
        deltas = self._call.more(self._seen)
        self._seen += len(deltas)
        self._sent_at = self._time()
        return encoder.feed(deltas[0]) if len(deltas) == 1 else b"".join(map(encoder.feed, merged(deltas)))


def reply_of(chat: ChatRequest, call: Call) -> Reply:
    cached = call.answers()[0].usage.cached if call.done() and call.failure() is None else 0
    return Reply(chat, call.ref, int(call.started), prompt_tokens=call.prompt_tokens, cached_tokens=cached, context=call.context)


def headers_of(dialect: Dialect, call: Call) -> dict[str, str]:
    return {} if dialect.request_id is None else {dialect.request_id: f"req_{call.ref}"}


def as_call_error(error: BaseException) -> CallError:
    """What an in-stream error says: our own errors as they are, anything else without its inside."""
    if isinstance(error, CallError):
        return error
    log.error("a call failed inside the gateway", exc_info=error)
    return Internal("internal error of the gateway; its log says more")
