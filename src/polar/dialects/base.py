"""What a provider's wire protocol is to Polar: pure functions between its bodies and `polar.chat`. No I/O, no tokens.

A new provider is one file beside this one: subclass `Dialect` and `Encoder`, decorate the dialect with `@register`.
Nothing else changes: the gateway asks each registered dialect whether a path is its own.

Parsing rules that hold for every dialect (laws 6 and 7):

* Unknown fields are ignored at every level; a wrong type in a known field is an `InvalidRequest` that names it in
  `param`. Nothing else may be raised.
* Every id, signature and encrypted blob that a harness echoes is kept as it came (`ToolCall.id`, `Message.refs`,
  `Thinking.signature`): the token path decides which are pointers.
* System messages stay where they stand; the token path folds them (`polar.chat.fold_system`).
* The same conversation gives the same canonical messages each time it is sent again: no random ids, no clock.

Encoding rules: an `Encoder` is fed `ChatDelta`s and returns the bytes to send at once (possibly none). Everything up to,
but not including, what `FinishDelta` brings may be sent before the completion is durable; what comes after may not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

import orjson

from polar.chat import Answer, ChatDelta, ChatRequest, FinishDelta, JsonObject, deltas
from polar.errors import CallError, InvalidRequest
from polar.jsonline import one_line


class Operation(StrEnum):
    """What a path asks for. Only `GENERATE` and `COMPACT` call the model and are recorded."""

    GENERATE = "generate"
    COMPACT = "compact"
    COUNT = "count"
    MODELS = "models"
    MODEL = "model"
    RETRIEVE = "retrieve"
    DELETE = "delete"
    INPUT_ITEMS = "input_items"
    PROBE = "probe"


@dataclass(frozen=True, slots=True)
class Route:
    """A recognised path. `params` holds what the path and query say (`model`, `response_id`, `stream`, `alt`, ...)."""

    operation: Operation
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """What an encoder may know besides the deltas.

    `ref` is the completion's authenticated reference (26 lower-case hex digits, one completion each; choice 0). Every id of the reply is a
    provider's prefix, then `ref`, then (where one completion has several) two hex digits of an index. `model` is the
    name that the caller asked for, `created` is in Unix seconds.
    """

    request: ChatRequest
    ref: str
    created: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """How many of the prompt's tokens were read from a cache, where that is known before the answer is written."""
    context: int | None = None
    """The model's maximum length in tokens (prompt and answer), where it is known."""

    @property
    def model(self) -> str:
        return self.request.model


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error in a provider's own shape. `headers` holds Retry-After where the cause has one."""

    status: int
    body: JsonObject
    headers: Mapping[str, str] = field(default_factory=dict)


class Encoder(ABC):
    """A small state machine from `ChatDelta`s to one stream's bytes. One per answered request."""

    content_type: ClassVar[str] = "text/event-stream"

    def __init__(self, reply: Reply) -> None:
        self.reply = reply

    @abstractmethod
    def start(self) -> bytes:
        """What opens the stream (`message_start`, `response.created`, ...); `b""` where nothing does."""

    @abstractmethod
    def feed(self, delta: ChatDelta) -> bytes:
        """The events that this delta causes. A `FinishDelta` closes its choice."""

    @abstractmethod
    def end(self) -> bytes:
        """What closes the stream after the last choice's `FinishDelta` (`[DONE]`, ...); `b""` where nothing does."""

    @abstractmethod
    def ping(self) -> bytes:
        """A keep-alive in the dialect's own form; legal between any two events after `start`."""

    @abstractmethod
    def error(self, error: CallError) -> bytes:
        """The error as an event of a stream that has begun; nothing follows it."""


class Dialect(ABC):
    """One provider. Instances hold no state."""

    name: ClassVar[str]
    """As in the design: `anthropic`, `openai_chat`, `openai_responses`, `google`."""
    request_id: ClassVar[str | None] = None
    """The header in which the provider names each request, for its support; here it names the completion."""

    @abstractmethod
    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        """What `path` (session prefix taken off, percent-decoded) asks for, or `None` if it is not this dialect's.

        `headers` (lower-case names) may only settle a path that two providers share (`/v1/models`).
        """

    @abstractmethod
    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        """Whether a caller of an unknown path seems to speak this dialect: the 404 takes its shape. A guess is enough."""

    @abstractmethod
    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """The session key where this provider's clients put it: header or query, never the body."""

    @abstractmethod
    def parse(self, body: JsonObject, route: Route) -> ChatRequest:
        """The canonical request. Raises `InvalidRequest` and nothing else, for any JSON object."""

    @abstractmethod
    def encoder(self, reply: Reply) -> Encoder:
        """A fresh stream encoder."""

    @abstractmethod
    def complete(self, reply: Reply, answers: Sequence[Answer]) -> JsonObject:
        """The whole answer as one body: what the stream of the same answers adds up to."""

    @abstractmethod
    def error(self, error: CallError) -> ErrorReply:
        """The error as a plain HTTP answer, with the provider's status for it."""

    @abstractmethod
    def count(self, tokens: int, request: ChatRequest) -> JsonObject:
        """The answer to a token count."""

    @abstractmethod
    def models(self, names: Sequence[str]) -> JsonObject:
        """The list of models."""

    @abstractmethod
    def model(self, name: str) -> JsonObject:
        """One model."""

    def card(self, name: str, context: int | None) -> JsonObject:
        """One model as the gateway serves it; `context` is its length in tokens, told where the dialect has a word for it."""
        return self.model(name)

    def deleted(self, response_id: str) -> JsonObject:
        """The answer to a deletion of a stored response."""
        return {"id": response_id, "deleted": True}

    def errors_in_stream(self, error: CallError, request: ChatRequest) -> bool:
        """Whether this error must arrive as an event of a 200 stream even if nothing was sent yet (Codex's overflow)."""
        return False

    def resumed(self, stream: bytes, params: Mapping[str, str]) -> bytes:
        """What of a stored response's whole stream a client still wants that says in the query `params` how much it has seen."""
        return stream

    def items(self, request: ChatRequest, params: Mapping[str, str] | None = None) -> JsonObject:
        """The input items of a stored response, paged as the query `params` say."""
        raise NotImplementedError(f"{self.name} has no input items")


def replay(encoder: Encoder, answers: Sequence[Answer], *, start: bool = True) -> tuple[bytes, bytes]:
    """The whole stream of finished answers: (what may go out at once, what must wait for the commit)."""
    early = [encoder.start()] if start else []
    late: list[bytes] = []
    for choice, answer in enumerate(answers):
        for delta in deltas(answer, choice):
            (late if late or isinstance(delta, FinishDelta) else early).append(encoder.feed(delta))
    late.append(encoder.end())
    return b"".join(early), b"".join(late)


def sse(data: JsonObject, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + line(data) + b"\n\n"


def line(data: JsonObject) -> bytes:
    """JSON that every client takes for one line."""
    return one_line(orjson.dumps(data))


_REGISTRY: dict[str, Dialect] = {}
D = TypeVar("D", bound=type[Dialect])


def register(cls: D) -> D:
    """Makes a dialect known to the gateway."""
    _REGISTRY[cls.name] = cls()
    return cls


def registered() -> Mapping[str, Dialect]:
    """All dialects by name, in order of registration."""
    return _REGISTRY


# --- reading untrusted JSON: each returns a value of the right type or raises `InvalidRequest` naming the field ------


def bad(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {message}", param=param)


def as_object(value: Any, param: str) -> JsonObject:
    if not isinstance(value, dict):
        raise bad(f"must be an object, not {type_name(value)}", param)
    return value


def as_list(value: Any, param: str) -> list[Any]:
    if not isinstance(value, list):
        raise bad(f"must be an array, not {type_name(value)}", param)
    return value


def as_str(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise bad(f"must be a string, not {type_name(value)}", param)
    return value


def optional_int(body: Mapping[str, Any], key: str, *, minimum: int | None = None, maximum: int | None = None) -> int | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(f"must be an integer, not {type_name(value)}", key)
    if minimum is not None and value < minimum:
        raise bad(f"must be at least {minimum}, not {value}", key)
    if maximum is not None and value > maximum:
        raise bad(f"must be at most {maximum}, not {value}", key)
    return value


def optional_float(body: Mapping[str, Any], key: str, *, minimum: float | None = None, maximum: float | None = None) -> float | None:
    value = body.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(f"must be a number, not {type_name(value)}", key)
    if minimum is not None and value < minimum:
        raise bad(f"must be at least {minimum}, not {value}", key)
    if maximum is not None and value > maximum:
        raise bad(f"must be at most {maximum}, not {value}", key)
    return float(value)


def optional_bool(body: Mapping[str, Any], key: str) -> bool | None:
    value = body.get(key)
    if value is not None and not isinstance(value, bool):
        raise bad(f"must be true or false, not {type_name(value)}", key)
    return value


def optional_str(body: Mapping[str, Any], key: str) -> str | None:
    value = body.get(key)
    return None if value is None else as_str(value, key)


def type_name(value: Any) -> str:
    """The JSON name of a value's type."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def json_text(value: Any) -> str:
    """Compact JSON text of an already parsed value."""
    return orjson.dumps(value).decode()


def data_url(media_type: str, base64_data: str) -> str:
    return f"data:{media_type};base64,{base64_data}"
