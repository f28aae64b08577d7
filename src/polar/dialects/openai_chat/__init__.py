"""OpenAI Chat Completions: `/v1/chat/completions` and `/v1/models`, with or without the `/v1`.

`request` reads bodies, `reply` writes answers and streams; this file holds paths, keys and errors. It refuses to know
tokens, engines and the other OpenAI protocol. Source: https://platform.openai.com/docs/api-reference/chat.

`count` has no path of its own here: the protocol has no token count.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from polar.chat import Answer, ChatRequest, JsonObject
from polar.dialects.base import Dialect, Encoder, ErrorReply, Operation, Reply, Route, register
from polar.dialects.openai_chat.reply import ChatEncoder, complete_body, error_body, error_status
from polar.dialects.openai_chat.request import parse_request
from polar.errors import CallError

_GENERATE = re.compile(r"(?:/v1)?/chat/completions/?")
_MODELS = re.compile(r"(?:/v1)?/models/?")
_MODEL = re.compile(r"(?:/v1)?/models/(?P<model>.+?)/?")


@register
class OpenAIChat(Dialect):
    name = "openai_chat"
    request_id = "x-request-id"

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        """`/v1/models` is shared with Anthropic and Google, whose clients always send a header (or `?key=`) of their own."""
        if method == "POST" and _GENERATE.fullmatch(path):
            return Route(Operation.GENERATE)
        if method != "GET" or _another_provider(query, headers):
            return None
        if _MODELS.fullmatch(path):
            return Route(Operation.MODELS)
        if match := _MODEL.fullmatch(path):
            return Route(Operation.MODEL, {"model": match["model"]})
        return None

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        if _another_provider({}, headers):
            return False
        return "/chat/" in path or path.startswith(("/v1/", "/models")) or "authorization" in headers

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """`Authorization: Bearer KEY`, or Azure's `api-key` header."""
        scheme, _, token = headers.get("authorization", "").strip().partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
        return headers.get("api-key", "").strip() or None

    def parse(self, body: JsonObject, route: Route) -> ChatRequest:
        return parse_request(body)

    def encoder(self, reply: Reply) -> Encoder:
        return ChatEncoder(reply)

    def complete(self, reply: Reply, answers: Sequence[Answer]) -> JsonObject:
        return complete_body(reply, answers)

    def error(self, error: CallError) -> ErrorReply:
        headers = {} if error.retry_after is None else {"retry-after": error.retry_after}
        return ErrorReply(error_status(error), error_body(error), headers)

    def count(self, tokens: int, request: ChatRequest) -> JsonObject:
        return {"input_tokens": tokens}

    def models(self, names: Sequence[str]) -> JsonObject:
        return {"object": "list", "data": [self.model(name) for name in names]}

    def model(self, name: str) -> JsonObject:
        return {"id": name, "object": "model", "created": 0, "owned_by": "polar"}

    def card(self, name: str, context: int | None) -> JsonObject:
        """`max_model_len` is vLLM's word; OpenAI has none."""
        return self.model(name) | ({} if context is None else {"max_model_len": context})


def _another_provider(query: Mapping[str, str], headers: Mapping[str, str]) -> bool:
    return "key" in query or any(name in headers for name in ("anthropic-version", "x-api-key", "x-goog-api-key", "x-goog-api-client"))
