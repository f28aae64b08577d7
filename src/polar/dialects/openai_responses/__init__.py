"""OpenAI Responses: `/v1/responses`, retrieval, deletion, input items, compaction and token counts.

Source: the API reference at platform.openai.com/docs/api-reference/responses, the types of the official SDK, and what Codex
reads of a stream. `items` reads input, `listing` writes it back, `tools` maps tools and their calls, `encode` writes the
events, `compaction` carries summaries. A stored response is not kept apart: the gateway rebuilds it from the recorded
completion with `complete`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polar.chat import Answer, ChatRequest, JsonObject, Message, deltas
from polar.dialects.base import Dialect, Encoder, ErrorReply, Operation, Reply, Route, register
from polar.dialects.openai_responses.body import loaded_tools
from polar.dialects.openai_responses.encode import encoder_for
from polar.dialects.openai_responses.errors import error_reply
from polar.dialects.openai_responses.listing import items_of
from polar.dialects.openai_responses.parse import parse_request
from polar.errors import CallError, ContextOverflow

_POSTS = {"": Operation.GENERATE, "compact": Operation.COMPACT, "input_tokens": Operation.COUNT}
_PAGE = 20


@register
class OpenAIResponses(Dialect):
    name = "openai_responses"
    request_id = "x-request-id"

    def route(self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route | None:
        """`/v1/models` is left to Chat Completions, whose answer is the same. A cancel has nothing to cancel, as no response
        runs in the background: its route leads to the parser, which refuses it in the provider's words."""
        parts = path.strip("/").split("/")
        if parts[0] == "v1":
            parts = parts[1:]
        if not parts or parts[0] != "responses" or len(parts) > 3:
            return None
        response_id = parts[1] if len(parts) > 1 else ""
        if len(parts) < 3 and method == "POST" and response_id in _POSTS:
            return Route(_POSTS[response_id])
        if not response_id or response_id in _POSTS:
            return None
        params = {"response_id": response_id}
        match method, parts[2:]:
            case "GET", []:
                return Route(Operation.RETRIEVE, {**query, **params})
            case "DELETE", []:
                return Route(Operation.DELETE, params)
            case "GET", ["input_items"]:
                return Route(Operation.INPUT_ITEMS, {**query, **params})
            case "POST", ["cancel"]:
                return Route(Operation.GENERATE, {**params, "cancel": "true"})
        return None

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return "/responses" in path or headers.get("originator", "").startswith("codex")

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        return token.strip() or None if scheme.lower() == "bearer" else None

    def parse(self, body: JsonObject, route: Route) -> ChatRequest:
        return parse_request(body, route)

    def encoder(self, reply: Reply) -> Encoder:
        return encoder_for(reply)

    def complete(self, reply: Reply, answers: Sequence[Answer]) -> JsonObject:
        encoder = encoder_for(reply)
        for delta in deltas(answers[0]):
            encoder.feed(delta)
        return encoder.final

    def error(self, error: CallError) -> ErrorReply:
        return error_reply(error)

    def errors_in_stream(self, error: CallError, request: ChatRequest) -> bool:
        """Older Codex versions take an HTTP 400 as fatal, and compact only on the event; newer ones take either."""
        return request.stream and isinstance(error, ContextOverflow)

    def count(self, tokens: int, request: ChatRequest) -> JsonObject:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def models(self, names: Sequence[str]) -> JsonObject:
        return {"object": "list", "data": [self.model(name) for name in names]}

    def model(self, name: str) -> JsonObject:
        return {"id": name, "object": "model", "created": 0, "owned_by": "polar"}

    def deleted(self, response_id: str) -> JsonObject:
        return {"id": response_id, "object": "response", "deleted": True}

    def resumed(self, stream: bytes, params: Mapping[str, str]) -> bytes:
        """Sequence numbers count all events from 0, so the events after `starting_after` are those behind that many."""
        after = _whole(params, "starting_after")
        return stream if after is None else b"\n\n".join(stream.split(b"\n\n")[after + 1 :])

    def items(self, request: ChatRequest, params: Mapping[str, str] | None = None) -> JsonObject:
        """The input of a stored response, as far as its canonical messages hold it: a page of the query `params` (`limit`,
        `after`, `order`, by default newest first and 20), or all in order where there are none. Unreadable values mean the
        default."""
        instructions = request.options.get("instructions", "")
        messages = list(request.messages)
        if instructions and messages and messages[0].role == "system" and messages[0].text.startswith(instructions):
            rest = messages.pop(0).text.removeprefix(instructions).lstrip("\n")
            messages[:0] = [Message("system", rest)] if rest else []
        items = items_of(messages, request.tools, loaded_tools(request))
        more = False
        if params is not None:
            if params.get("order") != "asc":
                items.reverse()
            after = next((index for index, item in enumerate(items) if item["id"] == params.get("after")), -1)
            asked = _whole(params, "limit")
            limit = _PAGE if asked is None else max(1, min(asked, 100))
            items = items[after + 1 :]
            more = len(items) > limit
            items = items[:limit]
        ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
        return {"object": "list", "data": items, **ends, "has_more": more}


def _whole(params: Mapping[str, str], name: str) -> int | None:
    """A count in a query; `None` where there is none that can be read."""
    value = params.get(name, "")
    return int(value) if value.isdecimal() and len(value) < 16 else None
