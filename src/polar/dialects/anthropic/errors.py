"""Refused calls in Anthropic's shape (https://docs.anthropic.com/en/api/errors). Knows no stream and no request.

Which status a client retries decides what each cause becomes: 429, 500, 504 and 529 are tried again, all others end the turn.
"""

from __future__ import annotations

import uuid

from polar.chat import JsonObject
from polar.dialects.base import ErrorReply
from polar.errors import CallError, ContextOverflow, EngineRejected, Kind

THREAD_NOT_FOUND = "thread_not_found"
"""The code on which the official SDKs send a whole conversation anew. It stands in the error's `details`."""

_SHAPES: dict[Kind, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "authentication": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "closed": (410, "invalid_request_error"),
    "too_large": (413, "request_too_large"),
    "budget": (400, "invalid_request_error"),
    "context_overflow": (400, "invalid_request_error"),
    "rate_limit": (429, "rate_limit_error"),
    "overloaded": (529, "overloaded_error"),
    "unavailable": (500, "api_error"),
    "timeout": (504, "timeout_error"),
    "internal": (500, "api_error"),
}


def error_reply(error: CallError) -> ErrorReply:
    """The error as an HTTP answer; `request-id` is fresh, Retry-After as its cause had it."""
    status, _ = _shape(error)
    request_id = f"req_{uuid.uuid4().hex[:26]}"
    headers = {"request-id": request_id}
    if error.retry_after is not None:
        headers["retry-after"] = error.retry_after
    if error.kind in ("closed", "budget"):
        headers["x-should-retry"] = "false"
    return ErrorReply(status, error_body(error, request_id), headers)


def error_body(error: CallError, request_id: str) -> JsonObject:
    """The JSON of the error, the same in an HTTP answer and in a stream."""
    _, kind = _shape(error)
    inner: JsonObject = {"type": kind, "message": _message(error)}
    if error.code == THREAD_NOT_FOUND:
        inner["details"] = {"error_code": error.code}
    return {"type": "error", "error": inner, "request_id": request_id}


def _message(error: CallError) -> str:
    """An overflow is worded exactly as the provider does: harnesses compact on this text."""
    if isinstance(error, ContextOverflow):
        if error.prompt_tokens is not None and error.limit is not None:
            return f"prompt is too long: {error.prompt_tokens} tokens > {error.limit} maximum"
        return f"prompt is too long: {error.message}"
    return error.message


def _shape(error: CallError) -> tuple[int, str]:
    status, kind = _SHAPES[error.kind]
    if isinstance(error, EngineRejected):
        return _rejected(error.status)
    if error.kind == "invalid_request" and 400 <= error.status < 500:
        return _SHAPES["not_found"] if error.status == 404 else (error.status, kind)
    return status, kind


def _rejected(status: int) -> tuple[int, str]:
    """What the engine's own 4xx is to the caller: its credentials and routes are the gateway's affair, not the harness's."""
    if status == 404:
        return _SHAPES["not_found"]
    if status == 413:
        return _SHAPES["too_large"]
    if status in (401, 403):
        return _SHAPES["internal"]
    return _SHAPES["invalid_request"]
