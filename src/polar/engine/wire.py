"""Writes vLLM 0.32's response bodies (`/v1/completions`, `/v1/chat/completions`) from sampled ids. Pure functions.

Log-probabilities have vLLM's floor of -9999.0, so that a body is always JSON.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from polar.engine.api import JsonObject, Tokenizer
from polar.engine.parsing import Parsed
from polar.engine.play import Output, Piece

FLOOR = -9999.0


def floor(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, FLOOR)


def _names(tokenizer: Tokenizer, ids: Sequence[int], as_ids: bool) -> list[str]:
    return [f"token_id:{token}" if as_ids else tokenizer.decode([token], skip_special=False) for token in ids]


def completion_logprobs(
    body: Mapping[str, Any], tokenizer: Tokenizer, ids: Sequence[int], logprobs: Sequence[float | None], tops: Sequence[Any]
) -> JsonObject | None:
    """The `logprobs` object of `/v1/completions`; `None` unless the request has an integer `logprobs`."""
    if body.get("logprobs") is None:
        return None
    as_ids = bool(body.get("return_tokens_as_token_ids"))
    names = _names(tokenizer, ids, as_ids)
    offsets, at = [], 0
    for name in names:
        offsets.append(at)
        at += len(name)
    alternatives = [
        {name: floor(logprob), **{_names(tokenizer, [token], as_ids)[0]: floor(value) for token, value in top}}
        for name, logprob, top in zip(names, logprobs, tops, strict=True)
    ]
    return {
        "text_offset": offsets,
        "token_logprobs": [floor(item) for item in logprobs],
        "tokens": names,
        "top_logprobs": alternatives,
    }


def chat_logprobs(body: Mapping[str, Any], tokenizer: Tokenizer, output: Output) -> JsonObject | None:
    """The `logprobs` object of Chat Completions; `None` unless asked for with an integer `top_logprobs` (B67)."""
    if not body.get("logprobs") or body.get("top_logprobs") is None:
        return None
    as_ids = bool(body.get("return_tokens_as_token_ids"))

    def entry(token: int, logprob: float | None) -> JsonObject:
        text = tokenizer.decode([token], skip_special=False)
        return {"token": f"token_id:{token}" if as_ids else text, "logprob": floor(logprob), "bytes": list(text.encode())}

    content = [
        {**entry(token, logprob), "top_logprobs": [entry(other, value) for other, value in top]}
        for token, logprob, top in zip(output.token_ids, output.logprobs, output.top, strict=True)
    ]
    return {"content": content}


def usage(prompt: int, completion: int, cached: int = 0) -> JsonObject:
    details = {"cached_tokens": cached} if cached else None
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }


def completion_choice(body: Mapping[str, Any], tokenizer: Tokenizer, prompt_ids: Sequence[int], output: Output, index: int) -> JsonObject:
    ids = bool(body.get("return_token_ids"))
    return {
        "index": index,
        "text": output.text,
        "logprobs": completion_logprobs(body, tokenizer, output.token_ids, output.logprobs, output.top),
        "finish_reason": output.finish,
        "stop_reason": output.stop,
        "prompt_token_ids": list(prompt_ids) if ids else None,
        "token_ids": output.token_ids if ids else None,
    }


def completion_chunk(
    body: Mapping[str, Any], tokenizer: Tokenizer, pieces: Sequence[Piece], index: int, prompt_ids: Sequence[int] | None
) -> JsonObject:
    """One streamed choice; `prompt_ids` on the first chunk only, and only where ids were asked for."""
    last = pieces[-1]
    ids = [piece.token_id for piece in pieces]
    choice: JsonObject = {
        "index": index,
        "text": "".join(piece.text for piece in pieces),
        "logprobs": completion_logprobs(body, tokenizer, ids, [piece.logprob for piece in pieces], [piece.top for piece in pieces]),
        "finish_reason": last.finish,
        "stop_reason": last.stop,
    }
    if body.get("return_token_ids"):
        choice["token_ids"] = ids
        if prompt_ids is not None:
            choice["prompt_token_ids"] = list(prompt_ids)
    return choice


def chat_choice(body: Mapping[str, Any], tokenizer: Tokenizer, output: Output, parsed: Parsed, index: int) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": parsed.content, "refusal": None, "reasoning": parsed.reasoning}
    if parsed.calls:
        message["tool_calls"] = [
            {"id": f"chatcmpl-tool-{uuid.uuid4().hex[:16]}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for name, arguments in parsed.calls
        ]
    return {
        "index": index,
        "message": message,
        "logprobs": chat_logprobs(body, tokenizer, output),
        "finish_reason": "tool_calls" if parsed.calls and output.finish == "stop" else output.finish,
        "stop_reason": output.stop,
        "token_ids": output.token_ids if body.get("return_token_ids") else None,
    }


def chat_chunks(choice: JsonObject, first: bool) -> list[JsonObject]:
    """A finished choice as Chat Completions deltas; for people who stream straight from the server."""
    message = choice["message"]
    deltas: list[JsonObject] = [{"role": "assistant", "content": ""}] if first else []
    if message.get("reasoning"):
        deltas.append({"reasoning": message["reasoning"]})
    if message.get("content"):
        deltas.append({"content": message["content"]})
    deltas += [{"tool_calls": [{"index": at, **call}]} for at, call in enumerate(message.get("tool_calls") or ())]
    chunks = [{"index": choice["index"], "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    end = {"index": choice["index"], "delta": {}, "logprobs": choice["logprobs"], "finish_reason": choice["finish_reason"]}
    return [*chunks, {**end, "stop_reason": choice["stop_reason"], "token_ids": choice["token_ids"]}]
