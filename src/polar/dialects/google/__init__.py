"""Google's Gemini API: `generateContent`, `streamGenerateContent` (SSE and JSON array), `countTokens`, models.

`request` and `contents` read bodies, `schema` their two schema forms, `reply` writes answers and streams, `errors` failures; this file
holds paths and keys. It refuses to know tokens, engines and Vertex's authentication.
Source: https://ai.google.dev/api/generate-content and https://ai.google.dev/api/tokens.

A path is `/{version}/{resource}:{action}`. A model's name may hold slashes and colons (`models/org/name:tag:generateContent`):
the action is what follows the last colon, `models/` is taken off, any other collection (`tunedModels/x`) stays in the name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from polar.chat import Answer, ChatRequest, JsonObject
from polar.dialects.base import Dialect, Encoder, ErrorReply, Operation, Reply, Route, register
from polar.dialects.google.errors import error_body, error_headers
from polar.dialects.google.reply import ArrayEncoder, SseEncoder, complete_body
from polar.dialects.google.request import parse_request
from polar.errors import CallError

_VERSIONED = re.compile(r"/+v1(?:alpha|beta1?)?/(?P<resource>.+?)/*")
_VERTEX = re.compile(r"(?:projects/[^/]+/locations/[^/]+/)?publishers/google/")
_ACTIONS = {
    "generateContent": (Operation.GENERATE, "false"),
    "streamGenerateContent": (Operation.GENERATE, "true"),
    "countTokens": (Operation.COUNT, "false"),
}


@register
class Google(Dialect):
    name = "google"

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        """`params`: `model`, `stream` (`true` or `false`) and `alt` (`sse` or `json`).

        `GET /v1/models` is shared with OpenAI and Anthropic: it is Google's only with Google's key or client header.
        """
        match = _VERSIONED.fullmatch(path)
        if match is None:
            return None
        resource = _VERTEX.sub("", match["resource"], count=1)
        if method == "POST":
            name, _, action = resource.rpartition(":")
            if action not in _ACTIONS or "/" not in name:
                return None
            operation, stream = _ACTIONS[action]
            alt = "sse" if query.get("alt") == "sse" or query.get("$alt") == "sse" else "json"
            return Route(operation, {"model": name.removeprefix("models/"), "stream": stream, "alt": alt})
        if method != "GET" or (path.startswith("/v1/") and not ("key" in query or _google_headers(headers))):
            return None
        if resource == "models":
            return Route(Operation.MODELS)
        if resource.startswith(("models/", "tunedModels/")):
            return Route(Operation.MODEL, {"model": resource.removeprefix("models/")})
        return None

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith(("/v1beta", "/v1alpha")) or _google_headers(headers) or path.rpartition(":")[2] in _ACTIONS

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """`x-goog-api-key`, `?key=` or `Authorization: Bearer`, in this order."""
        if key := headers.get("x-goog-api-key", "").strip() or query.get("key", "").strip():
            return key
        scheme, _, token = headers.get("authorization", "").strip().partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None

    def parse(self, body: JsonObject, route: Route) -> ChatRequest:
        return parse_request(body, route)

    def encoder(self, reply: Reply) -> Encoder:
        return SseEncoder(reply) if reply.request.options.get("alt") == "sse" else ArrayEncoder(reply)

    def complete(self, reply: Reply, answers: Sequence[Answer]) -> JsonObject:
        return complete_body(reply, answers)

    def error(self, error: CallError) -> ErrorReply:
        body = error_body(error)
        return ErrorReply(body["error"]["code"], body, error_headers(error))

    def count(self, tokens: int, request: ChatRequest) -> JsonObject:
        return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}

    def models(self, names: Sequence[str]) -> JsonObject:
        return {"models": [self.model(name) for name in names]}

    def model(self, name: str) -> JsonObject:
        return {
            "name": name if name.startswith("tunedModels/") else f"models/{name}",
            "version": "1",
            "displayName": name,
            "description": "Served by Polar",
            "supportedGenerationMethods": ["generateContent", "countTokens"],
        }

    def card(self, name: str, context: int | None) -> JsonObject:
        limits = {} if context is None else {"inputTokenLimit": context, "outputTokenLimit": context}
        return self.model(name) | limits


def _google_headers(headers: Mapping[str, str]) -> bool:
    return "x-goog-api-key" in headers or "x-goog-api-client" in headers
