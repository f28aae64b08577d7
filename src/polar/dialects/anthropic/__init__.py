"""Anthropic Messages: `/v1/messages` and what its clients ask besides. See `parse`, `content`, `tools`, `encode` and `errors`.

Served: generation, token counts, the list of models and one of them, and the `HEAD` probes of Claude Code. The paths of models are
OpenAI's too; the `anthropic-version` header, which every client of this provider must send, tells them apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from polar.chat import Answer, ChatRequest, JsonObject
from polar.dialects.anthropic.encode import AnthropicEncoder, whole_message
from polar.dialects.anthropic.errors import error_reply
from polar.dialects.anthropic.parse import parse_request
from polar.dialects.base import Dialect, Encoder, ErrorReply, Operation, Reply, Route, register
from polar.errors import CallError

__all__ = ["Anthropic", "AnthropicEncoder"]

_VERSION = "anthropic-version"
_FULL_BETA = "model-context-window-exceeded"
"""Who names this beta knows the stop reason of an answer that fills the context; others fail on it (Pi 1.6.0 does)."""


@register
class Anthropic(Dialect):
    """The Messages API, version 2023-06-01, with the beta fields that harnesses send."""

    name = "anthropic"
    request_id = "request-id"

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        path = path.rstrip("/")
        if method in ("HEAD", "GET") and (path == "/api/hello" or (path == "" and method == "HEAD")):
            return Route(Operation.PROBE)
        path = path.removeprefix("/v1")
        if method == "POST":
            operations = {"/messages": Operation.GENERATE, "/messages/count_tokens": Operation.COUNT}
            betas = headers.get("anthropic-beta", "")
            return Route(operations[path], {"beta": _FULL_BETA} if _FULL_BETA in betas else {}) if path in operations else None
        if method == "GET" and _VERSION in headers:
            if path == "/models":
                return Route(Operation.MODELS)
            if path.startswith("/models/"):
                return Route(Operation.MODEL, {"model": path.removeprefix("/models/")})
        return None

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return _VERSION in headers or "x-api-key" in headers or path.startswith(("/v1/messages", "/messages"))

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        if key := headers.get("x-api-key", "").strip():
            return key
        scheme, _, token = headers.get("authorization", "").strip().partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None

    def parse(self, body: JsonObject, route: Route) -> ChatRequest:
        request = parse_request(body, counting=route.operation is Operation.COUNT)
        if "beta" in route.params:
            request = replace(request, options={**request.options, "tells_full_context": True})
        return request

    def encoder(self, reply: Reply) -> Encoder:
        return AnthropicEncoder(reply)

    def complete(self, reply: Reply, answers: Sequence[Answer]) -> JsonObject:
        return whole_message(reply, answers[0])

    def error(self, error: CallError) -> ErrorReply:
        return error_reply(error)

    def count(self, tokens: int, request: ChatRequest) -> JsonObject:
        return {"input_tokens": tokens}

    def models(self, names: Sequence[str]) -> JsonObject:
        return {
            "data": [self.model(name) for name in names],
            "has_more": False,
            "first_id": names[0] if names else None,
            "last_id": names[-1] if names else None,
        }

    def model(self, name: str) -> JsonObject:
        """`created_at` is the epoch: the provider's own word for an unknown date."""
        return {"type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
