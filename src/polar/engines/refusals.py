"""How a server's refusals become Polar's errors: by status, and by the words with which it says that a prompt is too long.

Knows no engine's API and makes no call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from polar.chat import JsonObject
from polar.errors import (
    CallError,
    ContextOverflow,
    EngineBusy,
    EngineOverloaded,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
)

MAX_WORDS = 2000


def raise_error_body(answer: Any, raw: bytes) -> None:
    """Some servers and proxies say 200 and then that it failed."""
    if isinstance(answer, dict) and "choices" not in answer and (answer.get("error") or answer.get("object") == "error"):
        raise error_for(_status_of(answer), raw, {})


def _status_of(body: JsonObject) -> int:
    """The HTTP status that an error body names, as a number or as its digits; 500 where it names none."""
    error = body.get("error")
    code = str((error if isinstance(error, dict) else body).get("code"))
    return int(code) if re.fullmatch("[45][0-9][0-9]", code) else 500


def error_for(status: int, raw: bytes, headers: Mapping[str, str]) -> CallError:
    """A server's error answer as Polar's, its words and Retry-After kept."""
    words, code = error_words(raw)
    words = words or f"the engine answered {status} without a reason"
    retry_after = told(headers.get("Retry-After"))
    if 400 <= status <= 500 and status not in (401, 403, 404, 408, 429):  # 500: some servers crash on a prompt that is too long
        overflow = parse_overflow(words, code)
        if overflow is not None:
            return overflow
    if status in (401, 403):
        return EngineUnavailable(f"the engine refused the gateway's own key ({status}): {words}")
    if status in (408, 504):
        return EngineTimeout(words, retry_after=retry_after)
    if status == 429:
        return EngineBusy(words, code=code, retry_after=retry_after)
    if status in (503, 529):
        return EngineOverloaded(words, code=code, retry_after=retry_after)
    if status >= 500:
        return EngineUnavailable(words, code=code, retry_after=retry_after)
    return EngineRejected(words, status=status, code=code)


def told(value: str | None) -> str | None:
    """A header's value, where it can be told to others: what is not ASCII has no encoding here."""
    return value if value is not None and value.isascii() else None


def error_words(raw: bytes) -> tuple[str, str | None]:
    """(message, code) of an error body of any server's shape: `{"error": {...}}`, `{"error": "..."}`, `{"message": ...}`,
    `{"detail": ...}`, `{"error_message": ...}`, one of these in an array, or plain text. A shape that says it elsewhere is kept whole."""
    whole = raw[:MAX_WORDS].decode(errors="replace").strip()
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return whole, None
    if isinstance(body, list) and len(body) == 1:
        body = body[0]
    inner = body.get("error") or body if isinstance(body, dict) else body
    if not isinstance(inner, dict):
        return inner[:MAX_WORDS] if isinstance(inner, str) else whole, None
    message = inner.get("message") or inner.get("detail") or inner.get("error_message")
    code = inner.get("code")
    text = whole if not message else message if isinstance(message, str) else orjson.dumps(message).decode()
    return text[:MAX_WORDS], code if isinstance(code, str) else None


_NUMBER = r"(?:at least )?(\d[\d,]*)"
_OVERFLOWS: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), names)
    for pattern, names in (
        # vLLM: "... maximum context length is 4096 tokens. However, you requested 100 output tokens and your prompt contains at least 4200
        # input tokens" and "... However, your prompt contains 4200 input tokens"
        (rf"maximum context length (?:is|of) {_NUMBER} tokens.*?prompt contains {_NUMBER} input tokens", ("limit", "prompt")),
        # vLLM 0.10: "max_tokens is too large: 4000. This model's maximum context length is 4096 tokens and your request has 200 input
        # tokens"
        (rf"maximum context length (?:is|of) {_NUMBER} tokens and your request has {_NUMBER} input tokens", ("limit", "prompt")),
        # vLLM before 0.32: "You passed 4200 input tokens and requested 100 output tokens. However, the model's context length is only 4096
        # tokens, resulting in a maximum input length of 3996 tokens"
        (rf"passed {_NUMBER} input tokens.*?context length is only {_NUMBER} tokens", ("prompt", "limit")),
        # vLLM before 0.10, OpenAI: "... However, you requested 4300 tokens (4200 in the messages, 100 in the completion)"
        (rf"maximum context length (?:is|of) {_NUMBER} tokens.*?\({_NUMBER} in the (?:messages|prompt)", ("limit", "prompt")),
        # OpenAI: "... However, your messages resulted in 4200 tokens"
        (rf"maximum context length (?:is|of) {_NUMBER} tokens.*?resulted in {_NUMBER} tokens", ("limit", "prompt")),
        # SGLang chat: "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 4300
        # tokens: 4200 tokens from the input messages and 100 tokens for the completion"
        (rf"maximum context length (?:is|of) {_NUMBER} tokens.*?{_NUMBER} tokens from the input", ("limit", "prompt")),
        # SGLang: "The input (4200 tokens) is longer than the model's context length (4096 tokens)"
        (rf"input \({_NUMBER} tokens\) is longer than the model's context length \({_NUMBER} tokens\)", ("prompt", "limit")),
        # SGLang scheduler: "Input length (4200 tokens) exceeds the maximum allowed length (4095 tokens)"
        (rf"input length \({_NUMBER} tokens\) exceeds the maximum allowed length \({_NUMBER} tokens\)", ("prompt", "limit")),
        # vLLM engine core: "The decoder prompt (length 4200) is longer than the maximum model length of 4096"
        (rf"prompt \(length {_NUMBER}\) is longer than the maximum model length of {_NUMBER}", ("prompt", "limit")),
        # llama.cpp: "the request exceeds the available context size"; the numbers are beside the message
        (rf"request \({_NUMBER} tokens\) exceeds the available context size \({_NUMBER} tokens\)", ("prompt", "limit")),
        # Text Generation Inference: "`inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4200 `inputs` tokens and 100 ..."
        (rf"inputs` tokens \+ `max_new_tokens` must be <= {_NUMBER}\. Given: {_NUMBER}", ("limit", "prompt")),
        # TensorRT-LLM: "Prompt length (4200) exceeds maximum input length (4096)"
        (rf"prompt length \({_NUMBER}\) exceeds maximum input length \({_NUMBER}\)", ("prompt", "limit")),
        # LM Studio: "Trying to keep the first 4200 tokens when context the overflows. However, the model is loaded with context length of
        # only 4096 tokens"
        (rf"keep the first {_NUMBER} tokens.*?context length of only {_NUMBER} tokens", ("prompt", "limit")),
        # Mistral: "Prompt contains 4200 tokens and 0 draft tokens, too large for model with 4096 maximum context length"
        (rf"prompt contains {_NUMBER} tokens.*?too large for model with {_NUMBER} maximum context length", ("prompt", "limit")),
        # xAI: "This model's maximum prompt length is 4096 but the request contains 4200 tokens"
        (rf"maximum prompt length is {_NUMBER} but the request contains {_NUMBER} tokens", ("limit", "prompt")),
        # Google: "The input token count (4200) exceeds the maximum number of tokens allowed (4096)"
        (rf"input token count \(?{_NUMBER}\)? exceeds the maximum number of tokens allowed \(?{_NUMBER}", ("prompt", "limit")),
        # Anthropic: "prompt is too long: 4200 tokens > 4096 maximum"
        (rf"prompt is too long: {_NUMBER} tokens > {_NUMBER} maximum", ("prompt", "limit")),
        # vLLM where the prompt fills the context, or more than fills it
        (r"max_tokens must be at least 1, got (?:0|-\d+)\b", ()),
        (rf"maximum context length (?:is|of) {_NUMBER} tokens", ("limit",)),
        # llama.cpp, OpenAI, LM Studio, Ollama, Bedrock, Moonshot
        (r"exceeds the available context size|exceed(?:s|ed)? (?:the )?(?:model's )?(?:max(?:imum)? )?context (?:window|length)", ()),
        (r"greater than the context length|(?:prompt|input) (?:is )?too long|exceeded model token limit", ()),
    )
)


def parse_overflow(words: str, code: str | None = None) -> ContextOverflow | None:
    """A context overflow, with the numbers that the server's words give; `None` if it is something else."""
    for pattern, names in _OVERFLOWS:
        match = pattern.search(words)
        if match:
            numbers = {name: int(group.replace(",", "")) for name, group in zip(names, match.groups(), strict=True)}
            return ContextOverflow(words, prompt_tokens=numbers.get("prompt"), limit=numbers.get("limit"))
    if code in ("context_length_exceeded", "exceed_context_size_error"):
        return ContextOverflow(words, prompt_tokens=None, limit=None)
    return None
