"""Errors in the OpenAI shape, as an HTTP answer and as the end of a stream.

A stream that fails ends with an `error` event and a `response.failed`. Codex reads only the latter, and decides by its `code`
(openai/codex, codex-api/src/sse/responses.rs): `context_length_exceeded` makes it compact, `rate_limit_exceeded` makes it wait
for the time that the message names ("try again in 3s"), `invalid_prompt` makes it stop, anything else makes it try again.
"""

from __future__ import annotations

import re

from polar.chat import JsonObject
from polar.dialects.base import ErrorReply
from polar.errors import CallError, ContextOverflow

_TYPES = {
    "rate_limit": "rate_limit_error",
    "overloaded": "server_error",
    "unavailable": "server_error",
    "timeout": "server_error",
    "internal": "server_error",
    "authentication": "authentication_error",
}
_CODES = {"authentication": "invalid_api_key", "rate_limit": "rate_limit_exceeded"}
_STATUS = {"rate_limit": 429, "overloaded": 503}
_STREAM_CODES = {"context_overflow": "context_length_exceeded", "rate_limit": "rate_limit_exceeded"}
_OVERFLOW = "Your input exceeds the context window of this model."


def error_object(error: CallError) -> JsonObject:
    """The `error` of both forms: message, type, param and code."""
    message, param = error.message, error.param
    if isinstance(error, ContextOverflow):
        param = param or "input"
        if "context" not in message:
            message = f"{_OVERFLOW} {message}"
    return {
        "message": message,
        "type": _TYPES.get(error.kind, "invalid_request_error"),
        "param": param,
        "code": error.code or _CODES.get(error.kind),
    }


def error_reply(error: CallError) -> ErrorReply:
    """The error as a plain HTTP answer."""
    status = _STATUS.get(error.kind, error.status)
    if error.code == "previous_response_not_found":
        status = 400
    headers = {} if error.retry_after is None else {"retry-after": error.retry_after}
    return ErrorReply(status, {"error": error_object(error)}, headers)


def stream_error(error: CallError) -> tuple[str, str, JsonObject]:
    """Code and message of a `response.failed`, and the `error` object beside them."""
    shown = error_object(error)
    message = str(shown["message"])
    if isinstance(error, ContextOverflow) and _OVERFLOW not in message:
        message = f"{_OVERFLOW} {message}"
    if error.kind == "rate_limit" and error.retry_after and re.fullmatch(r"\d+(\.\d+)?", error.retry_after):
        message = f"{message} Please try again in {error.retry_after}s."
    default = "invalid_prompt" if shown["type"] == "invalid_request_error" else "server_error"
    code = _STREAM_CODES.get(error.kind, default)
    return code, message, {**shown, "message": message, "code": code}
