"""Answers, streams and errors of Chat Completions.

A stream is: one chunk with the role for each choice, chunks of `reasoning_content` (and `reasoning`, the same text: clients
read one or the other), `content`, `refusal` and `tool_calls`, one with the `finish_reason`, then (only where
`stream_options.include_usage` asked) one with `choices: []` and the usage, then `[DONE]`. Every chunk carries the same id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import orjson

from polar.chat import (
    Answer,
    ChatDelta,
    ChatRequest,
    FinishDelta,
    FinishReason,
    JsonObject,
    LogprobsDelta,
    RefusalDelta,
    TextDelta,
    ThinkingDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from polar.dialects.base import Encoder, Reply, sse
from polar.dialects.openai_chat.messages import RAW_CALL
from polar.errors import CallError, ContextOverflow


class ChatEncoder(Encoder):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._opened: set[int] = set()
        self._calls = 0
        self._choice_calls: dict[int, int] = {}
        self._logprobs: dict[int, list[JsonObject]] = {}
        self._usages: list[Usage] = []
        self._include_usage = bool(reply.request.options.get("include_usage"))

    def start(self) -> bytes:
        return self._open(0)

    def feed(self, delta: ChatDelta) -> bytes:
        opening = self._open(delta.choice)
        match delta:
            case ThinkingDelta(text, choice):
                return opening + self._chunk(choice, {"reasoning_content": text, "reasoning": text}) if text else opening
            case LogprobsDelta(logprobs, choice):
                if (top := self.reply.request.top_logprobs) is not None:
                    self._logprobs.setdefault(choice, []).extend(_logprob(entry, top) for entry in logprobs)
                return opening
            case TextDelta(text, choice):
                return opening + self._chunk(choice, {"content": text}, self._take_logprobs(choice)) if text else opening
            case RefusalDelta(text, choice):
                return opening + self._chunk(choice, {"refusal": text}, self._take_logprobs(choice)) if text else opening
            case ToolCallDelta():
                return opening + self._tool_call(delta)
            case FinishDelta(finish, usage, _, choice):
                self._usages.append(usage)
                legacy = bool(self.reply.request.options.get("legacy_functions"))
                reason = finish_reason(finish, bool(self._choice_calls.get(choice)), legacy)
                return opening + self._chunk(choice, {}, self._take_logprobs(choice), reason)

    def end(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._include_usage:
            return done
        return sse({**self._head(), "choices": [], "usage": usage_body(total(self._usages))}) + done

    def ping(self) -> bytes:
        return b": ping\n\n"

    def error(self, error: CallError) -> bytes:
        return sse(error_body(error))

    def _open(self, choice: int) -> bytes:
        if choice in self._opened:
            return b""
        self._opened.add(choice)
        return self._chunk(choice, {"role": "assistant", "content": "", "refusal": None})

    def _tool_call(self, delta: ToolCallDelta) -> bytes:
        request, choice = self.reply.request, delta.choice
        index = self._choice_calls.get(choice, 0)
        self._choice_calls[choice] = index + 1
        item = call_item(request, call_id(self.reply, self._calls), delta.call)
        self._calls += 1
        key = item["type"]
        payload_key = "input" if key == "custom" else "arguments"
        payload = item[key].pop(payload_key)
        first = {**item, key: {**item[key], payload_key: ""}}
        if request.options.get("legacy_functions"):
            if index == 0:
                deltas: list[JsonObject] = [{"function_call": first[key]}, {"function_call": {payload_key: payload}}]
            else:
                deltas = [{"tool_calls": [{"index": index - 1, **first, key: {**item[key], payload_key: payload}}]}]
        else:
            deltas = [{"tool_calls": [{"index": index, **first}]}, {"tool_calls": [{"index": index, key: {payload_key: payload}}]}]
        if not payload:
            del deltas[1:]
        first_chunk = self._chunk(choice, deltas[0], self._take_logprobs(choice))
        return first_chunk + b"".join(self._chunk(choice, each) for each in deltas[1:])

    def _take_logprobs(self, choice: int) -> JsonObject | None:
        entries = self._logprobs.pop(choice, None)
        return {"content": entries, "refusal": None} if entries else None

    def _head(self) -> JsonObject:
        return {
            "id": f"chatcmpl-{self.reply.ref}",
            "object": "chat.completion.chunk",
            "created": self.reply.created,
            "model": self.reply.model,
            "system_fingerprint": None,
        }

    def _chunk(self, choice: int, delta: JsonObject, logprobs: JsonObject | None = None, finish: str | None = None) -> bytes:
        body = self._head()
        body["choices"] = [{"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]
        if self._include_usage:
            body["usage"] = None
        return sse(body)


def complete_body(reply: Reply, answers: Sequence[Answer]) -> JsonObject:
    """What the stream of the same answers adds up to."""
    choices: list[JsonObject] = []
    calls = 0
    for index, answer in enumerate(answers):
        choices.append(_choice(reply, index, answer, calls))
        calls += len(answer.message.tool_calls)
    return {
        "id": f"chatcmpl-{reply.ref}",
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
        "usage": usage_body(total(answer.usage for answer in answers)),
        "system_fingerprint": None,
    }


def _choice(reply: Reply, index: int, answer: Answer, first_call: int) -> JsonObject:
    request = reply.request
    legacy = bool(request.options.get("legacy_functions"))
    message: JsonObject = {"role": "assistant", "content": answer.message.text, "refusal": answer.refusal or None}
    if not answer.message.text and (answer.message.tool_calls or answer.refusal):
        message["content"] = None
    if answer.message.reasoning:
        message["reasoning_content"] = message["reasoning"] = answer.message.reasoning
    items = [call_item(request, call_id(reply, first_call + offset), call) for offset, call in enumerate(answer.message.tool_calls)]
    if legacy and items:
        message["function_call"] = items.pop(0)["function"]
    if items:
        message["tool_calls"] = items
    logprobs = None
    if request.top_logprobs is not None and answer.logprobs:
        logprobs = {"content": [_logprob(entry, request.top_logprobs) for entry in answer.logprobs], "refusal": None}
    reason = finish_reason(answer.finish, bool(answer.message.tool_calls), legacy)
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def call_id(reply: Reply, number: int) -> str:
    """`number` counts the calls of the whole reply, over all of its choices."""
    return f"call_{reply.ref}{number:02x}"


def call_item(request: ChatRequest, item_id: str, call: ToolCall) -> JsonObject:
    """A call as the caller declared its tool. A freeform call whose arguments are not `{"input": string}` keeps them as its input, and
    its id says so (`RAW_CALL`): its echo reads back as what was sampled."""
    tool = request.tool(call.name)
    if tool is None or tool.kind != "custom":
        return {"id": item_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    try:
        value = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        value = None
    if isinstance(value, dict) and value.keys() == {"input"} and isinstance(value["input"], str):
        return {"id": item_id, "type": "custom", "custom": {"name": call.name, "input": value["input"]}}
    raw_id = RAW_CALL + item_id.removeprefix("call_")
    return {"id": raw_id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}


def finish_reason(finish: FinishReason, called: bool, legacy: bool) -> str:
    """Calls and their finish reason always come together, whatever an engine says; a cut or filtered answer stays one."""
    if finish in ("length", "content_filter"):
        return finish
    if not called:
        return "stop"
    return "function_call" if legacy else "tool_calls"


def total(usages: Iterable[Usage]) -> Usage:
    """The usage of one call with several choices: the prompt counts once."""
    listed = list(usages)
    return Usage(
        prompt=max((usage.prompt for usage in listed), default=0),
        completion=sum(usage.completion for usage in listed),
        cached=max((usage.cached for usage in listed), default=0),
        thinking=sum(usage.thinking for usage in listed),
    )


def usage_body(usage: Usage) -> JsonObject:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": usage.thinking,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _logprob(entry: TokenLogprob, top: int) -> JsonObject:
    alternatives = [_token(token, logprob) for token, logprob in entry.top[:top]]
    return {**_token(entry.token, entry.logprob), "top_logprobs": alternatives}


def _token(token: str, logprob: float) -> JsonObject:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode(errors="replace"))}


# --- errors ---------------------------------------------------------------------------------------------------------

_SHAPES: dict[str, tuple[str, str | None]] = {
    "invalid_request": ("invalid_request_error", None),
    "authentication": ("invalid_request_error", "invalid_api_key"),
    "not_found": ("invalid_request_error", None),
    "closed": ("invalid_request_error", "session_closed"),
    "too_large": ("invalid_request_error", "request_too_large"),
    "budget": ("invalid_request_error", "budget_exceeded"),
    "context_overflow": ("invalid_request_error", "context_length_exceeded"),
    "rate_limit": ("requests", "rate_limit_exceeded"),
    "overloaded": ("server_error", "server_is_overloaded"),
    "unavailable": ("server_error", "service_unavailable"),
    "timeout": ("server_error", "timeout"),
    "internal": ("server_error", None),
}
"""The provider's `type` and the `code` where the error names none of its own."""


def error_status(error: CallError) -> int:
    """529 is Anthropic's word for an overload; OpenAI says 503."""
    return 503 if error.status == 529 else error.status


def error_body(error: CallError) -> JsonObject:
    kind, code = _SHAPES[error.kind]
    param = "messages" if isinstance(error, ContextOverflow) else error.param
    return {"error": {"message": _message(error), "type": kind, "param": param, "code": error.code or code}}


def _message(error: CallError) -> str:
    """An overflow in the words that harnesses compact on, with whatever the engine said kept."""
    if not isinstance(error, ContextOverflow) or "maximum context length" in error.message or error.limit is None:
        return error.message
    used = "" if error.prompt_tokens is None else f" However, your messages resulted in {error.prompt_tokens} tokens."
    return f"This model's maximum context length is {error.limit} tokens.{used} {error.message}"
