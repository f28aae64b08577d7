"""The response object: what a finished call, and every lifecycle event of a stream, says of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar.chat import ChatRequest, FinishReason, JsonObject, TokenLogprob, Usage
from polar.dialects.base import Reply

_INCOMPLETE: dict[FinishReason, str] = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_id(reply: Reply) -> str:
    return f"resp_{reply.ref}"


def incomplete_reason(finish: FinishReason) -> str | None:
    """Why an answer counts as incomplete, in the provider's word; `None` if it is complete."""
    return _INCOMPLETE.get(finish)


def response_object(
    reply: Reply,
    status: str,
    output: Sequence[JsonObject] = (),
    *,
    usage: Usage | None = None,
    reason: str | None = None,
    error: JsonObject | None = None,
) -> JsonObject:
    """The response with its request's settings repeated, defaults filled in as the provider does."""
    request = reply.request
    echo: JsonObject = request.options.get("echo", {})
    sampling = request.sampling
    return {
        "id": response_id(reply),
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "background": False,
        "error": error,
        "incomplete_details": None if reason is None else {"reason": reason},
        "instructions": request.options.get("instructions"),
        "max_output_tokens": sampling.max_tokens,
        "max_tool_calls": echo.get("max_tool_calls"),
        "metadata": echo.get("metadata", {}),
        "model": reply.model,
        "output": list(output),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": echo.get("previous_response_id"),
        "prompt_cache_key": echo.get("prompt_cache_key"),
        "reasoning": {"effort": request.effort, "summary": None, **_object(echo.get("reasoning"))},
        "safety_identifier": echo.get("safety_identifier"),
        "service_tier": "default",
        "store": request.store,
        "temperature": 1.0 if sampling.temperature is None else sampling.temperature,
        "text": {"format": {"type": "text"}, **_object(echo.get("text"))},
        "tool_choice": echo.get("tool_choice", "auto"),
        "tools": echo.get("tools", []),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if sampling.top_p is None else sampling.top_p,
        "truncation": echo.get("truncation", "disabled"),
        "usage": None if usage is None else usage_object(usage),
        "user": echo.get("user"),
    }


def compacted_object(reply: Reply, output: Sequence[JsonObject], usage: Usage) -> JsonObject:
    """The answer of the compact endpoint."""
    return {
        "id": response_id(reply),
        "object": "response.compaction",
        "created_at": reply.created,
        "output": list(output),
        "usage": usage_object(usage),
    }


def usage_object(usage: Usage) -> JsonObject:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.thinking},
        "total_tokens": usage.prompt + usage.completion,
    }


def logprob_objects(logprobs: Sequence[TokenLogprob]) -> list[JsonObject]:
    return [
        {
            **_token(entry.token, entry.logprob),
            "top_logprobs": [_token(token, logprob) for token, logprob in entry.top],
        }
        for entry in logprobs
    ]


def loaded_tools(request: ChatRequest) -> JsonObject:
    """The tools that were found by a search, in the form of `Toolset.wire`."""
    loaded: JsonObject = request.options.get("loaded", {})
    return loaded


def _token(token: str, logprob: float) -> JsonObject:
    return {"token": token, "bytes": list(token.encode()), "logprob": logprob}


def _object(value: Any) -> JsonObject:
    return value if isinstance(value, dict) else {}
