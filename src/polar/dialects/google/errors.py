"""Google's error shape: `{"error": {code, message, status, details}}`.

The status words are those of google.rpc.Code; a wait that the cause asks for goes out both as `Retry-After` and as a
`google.rpc.RetryInfo`, since the official command line client reads only the latter.
"""

from __future__ import annotations

from polar.chat import JsonObject
from polar.errors import CallError, ContextOverflow

_SHAPES: dict[str, tuple[int | None, str]] = {
    "invalid_request": (None, "INVALID_ARGUMENT"),
    "authentication": (401, "UNAUTHENTICATED"),
    "not_found": (404, "NOT_FOUND"),
    "closed": (410, "FAILED_PRECONDITION"),
    "too_large": (413, "INVALID_ARGUMENT"),
    "budget": (None, "FAILED_PRECONDITION"),
    "context_overflow": (400, "INVALID_ARGUMENT"),
    "rate_limit": (429, "RESOURCE_EXHAUSTED"),
    "overloaded": (503, "UNAVAILABLE"),
    "unavailable": (503, "UNAVAILABLE"),
    "timeout": (504, "DEADLINE_EXCEEDED"),
    "internal": (None, "INTERNAL"),
}
"""HTTP status (`None`: the error's own) and status word by kind. Google has no 502 of its own: an engine gone is UNAVAILABLE."""

_BY_STATUS = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 409: "ABORTED", 429: "RESOURCE_EXHAUSTED"}
"""Where an engine refused a request with a status that has a word of its own."""


def error_body(error: CallError) -> JsonObject:
    fixed, word = _SHAPES[error.kind]
    code = fixed or error.status
    if fixed is None:
        word = _BY_STATUS.get(code, word)
    inner: JsonObject = {"code": code, "message": _message(error), "status": word}
    seconds = (error.retry_after or "").strip()
    if seconds.replace(".", "", 1).isdecimal() and seconds.isascii():
        inner["details"] = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{seconds}s"}]
    return {"error": inner}


def error_headers(error: CallError) -> dict[str, str]:
    return {} if error.retry_after is None else {"retry-after": error.retry_after}


def _message(error: CallError) -> str:
    """An overflow in the words that harnesses know; what the engine did not count is left out of the sentence."""
    if not isinstance(error, ContextOverflow):
        return error.message
    used = "" if error.prompt_tokens is None else f" ({error.prompt_tokens})"
    limit = "" if error.limit is None else f" ({error.limit})"
    return f"The input token count{used} exceeds the maximum number of tokens allowed{limit}."
