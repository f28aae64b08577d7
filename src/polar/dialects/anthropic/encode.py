"""Answers to Anthropic's stream events, and to the one body that the same events add up to. Knows no request body.

Event order (https://docs.anthropic.com/en/docs/build-with-claude/streaming): `message_start`; for each block `content_block_start`,
deltas, `content_block_stop`; `message_delta` with stop reason and usage; `message_stop`. `ping` and `error` stand between any two.

Every thinking block is signed with the completion's reference and every tool call's id carries it, so that what the harness echoes
leads back to the recorded tokens. A tool call reaches the harness only if its arguments are a JSON object; one that is not is written
out as text, so that no half call is ever executed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import orjson

from polar.chat import (
    Answer,
    ChatDelta,
    FinishDelta,
    JsonObject,
    LogprobsDelta,
    RefusalDelta,
    TextDelta,
    ThinkingDelta,
    ToolCall,
    ToolCallDelta,
    Usage,
    deltas,
)
from polar.dialects.anthropic.errors import error_body
from polar.dialects.base import Encoder, Reply, sse
from polar.errors import CallError


class AnthropicEncoder(Encoder):
    """One stream. `events` is the state machine; the rest writes its events out."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._index = -1
        self._open: str | None = None
        self._calls = 0
        self._demoted = False
        self._refused = False

    def start(self) -> bytes:
        return _write([self.opening()])

    def feed(self, delta: ChatDelta) -> bytes:
        if isinstance(delta, TextDelta) and self._open == "text" and delta.text and not delta.choice:
            # live, nearly every delta goes on with the open text: what `events` yields for it, without the machine
            return sse(self._delta({"type": "text_delta", "text": delta.text}), "content_block_delta")
        return _write(self.events(delta))

    def end(self) -> bytes:
        return _write([{"type": "message_stop"}])

    def ping(self) -> bytes:
        return _write([{"type": "ping"}])

    def error(self, error: CallError) -> bytes:
        return _write([error_body(error, f"req_{self.reply.ref}")])

    def opening(self) -> JsonObject:
        """`message_start`; its counts are what is known before the answer. Clients differ in which event they take which count from."""
        cached = min(self.reply.cached_tokens, self.reply.prompt_tokens)
        message: JsonObject = {
            "id": f"msg_{self.reply.ref}",
            "type": "message",
            "role": "assistant",
            "model": self.reply.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": {
                "input_tokens": self.reply.prompt_tokens - cached,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": cached,
                "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
                "output_tokens": 0,
                "service_tier": "standard",
            },
        }
        return {"type": "message_start", "message": message}

    def events(self, delta: ChatDelta) -> Iterator[JsonObject]:
        """The events that one delta causes. The protocol knows one choice; further ones, and log-probabilities, have no place in it."""
        if isinstance(delta, LogprobsDelta) or delta.choice:
            return
        match delta:
            case ThinkingDelta(text):
                if text:
                    yield from self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                    if not self.reply.request.options.get("thinking_omitted"):
                        yield self._delta({"type": "thinking_delta", "thinking": text})
            case TextDelta(text):
                yield from self._text(text)
            case RefusalDelta(text):
                self._refused = True
                yield from self._text(text)
            case ToolCallDelta(index, call):
                yield from self._tool_call(index, call)
            case FinishDelta():
                yield from self._close()
                yield self._message_delta(delta)

    def _text(self, text: str) -> Iterator[JsonObject]:
        if text:
            yield from self._switch("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": text})

    def _tool_call(self, index: int, call: ToolCall) -> Iterator[JsonObject]:
        arguments = call.arguments if call.arguments.strip() else "{}"
        if not _is_object(arguments):
            self._demoted = True
            line = "\n" if self._open == "text" else ""
            yield from self._text(f'{line}{{"name": {orjson.dumps(call.name).decode()}, "arguments": {call.arguments}}}')
            return
        self._calls += 1
        identifier = f"toolu_{self.reply.ref}{index:02x}"
        yield from self._switch("tool_use", {"type": "tool_use", "id": identifier, "name": call.name, "input": {}})
        yield self._delta({"type": "input_json_delta", "partial_json": arguments})
        yield from self._close()

    def _switch(self, kind: str, block: JsonObject) -> Iterator[JsonObject]:
        """Opens a block of `kind`, unless one is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: JsonObject) -> JsonObject:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[JsonObject]:
        if self._open is None:
            return
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": f"polar_{self.reply.ref}"})
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _message_delta(self, finish: FinishDelta) -> JsonObject:
        reason = self._stop_reason(finish)
        details = {"type": "refusal", "category": None, "explanation": None} if reason == "refusal" else None
        sequence = finish.stop_sequence if reason == "stop_sequence" else None
        event: JsonObject = {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence, "stop_details": details},
            "usage": self._usage(finish.usage),
        }
        if self.reply.request.options.get("context_management"):
            event["context_management"] = {"applied_edits": []}
        return event

    def _stop_reason(self, finish: FinishDelta) -> str:
        """`tool_use` whenever calls went out and the model stopped by itself; a call cut off at the limit is `max_tokens`."""
        if self._refused or finish.finish == "content_filter":
            return "refusal"
        if finish.finish == "length":
            context = self.reply.context
            told = self.reply.request.options.get("tells_full_context")
            full = told and context is not None and self._prompt(finish.usage) + finish.usage.completion >= context
            return "model_context_window_exceeded" if full else "max_tokens"
        if finish.finish == "stop_sequence":
            return "stop_sequence"
        limit = self.reply.request.sampling.max_tokens
        if self._demoted and limit is not None and finish.usage.completion >= limit:
            return "max_tokens"
        return "tool_use" if self._calls else "end_turn"

    def _prompt(self, usage: Usage) -> int:
        return usage.prompt or self.reply.prompt_tokens

    def _usage(self, usage: Usage) -> JsonObject:
        """Cumulative; the provider's `input_tokens` leaves out what was read from the cache."""
        prompt = self._prompt(usage)
        cached = min(usage.cached, prompt)
        return {
            "input_tokens": prompt - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage.completion,
            "output_tokens_details": {"thinking_tokens": min(usage.thinking, usage.completion)},
        }


def whole_message(reply: Reply, answer: Answer) -> JsonObject:
    """The unstreamed body: by construction what the stream of the same answer adds up to."""
    encoder = AnthropicEncoder(reply)
    message: JsonObject = encoder.opening()["message"]
    arguments: dict[int, str] = {}
    for delta in deltas(answer):
        for event in encoder.events(delta):
            _fold(message, event, arguments)
    for index, text in arguments.items():
        message["content"][index]["input"] = orjson.loads(text)
    return message


def _fold(message: JsonObject, event: JsonObject, arguments: dict[int, str]) -> None:
    """Adds one event to the message, as a client does; the JSON of tool calls is gathered in `arguments`."""
    match event["type"]:
        case "content_block_start":
            message["content"].append(copy.copy(event["content_block"]))
        case "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
        case "message_delta":
            message.update(event["delta"])
            message["usage"] |= event["usage"]
            if "context_management" in event:
                message["context_management"] = event["context_management"]


def _is_object(arguments: str) -> bool:
    try:
        return isinstance(orjson.loads(arguments), dict)
    except orjson.JSONDecodeError:
        return False


def _write(events: Iterable[JsonObject]) -> bytes:
    return b"".join(sse(event, event["type"]) for event in events)
