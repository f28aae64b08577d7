"""Answers and streams of Google's API.

One chunk carries one part. Each part is held until the next one, or the finish, is known, so that the last chunk has both a
part and the `finishReason`, as Google's has: the official SDKs drop a turn from a chat's history if any of its chunks has no
part. Only an answer without a part ends in a chunk without one. No part has an empty text.

Thoughts go out only where `includeThoughts` asked for them. The first part of a candidate and its first function call
carry a `thoughtSignature`: base64 of `polar:` and the completion's reference, which clients echo.

Two facts of the official SDKs shape the bytes. Both read anything but `data:` lines as an event of its own (a comment makes the
Python one fail and the JavaScript one stall), so a ping is an empty line; and an error in a stream is bare JSON, not an event, which is
what both look for.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import orjson

from polar.chat import (
    Answer,
    ChatDelta,
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
    deltas,
)
from polar.dialects.base import Encoder, Reply, line
from polar.dialects.google.errors import error_body
from polar.errors import CallError

SIGNATURE_PREFIX = "polar:"


def signature(ref: str) -> str:
    """The `thoughtSignature` of a completion: 32 bytes in base64, so that clients which check the form accept it."""
    return base64.b64encode(f"{SIGNATURE_PREFIX}{ref}".encode()).decode()


class _Candidates:
    """Deltas as parts, and what a finish needs to know; shared by streams and complete bodies so that they add up."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self._include_thoughts = bool(reply.request.options.get("include_thoughts"))
        self._signed: set[int] = set()
        self._called: set[int] = set()
        self._refused: set[int] = set()
        self._calls = 0
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._usages: list[Usage] = []

    def part(self, delta: ChatDelta) -> JsonObject | None:
        """The part that a delta adds to its candidate, if any."""
        match delta:
            case ThinkingDelta(text, choice):
                return self._sign(choice, {"text": text, "thought": True}) if text and self._include_thoughts else None
            case TextDelta(text, choice):
                return self._sign(choice, {"text": text}) if text else None
            case RefusalDelta(text, choice):
                self._refused.add(choice)
                return self._sign(choice, {"text": text}) if text else None
            case ToolCallDelta(_, call, choice):
                if choice not in self._called:
                    self._called.add(choice)
                    self._signed.discard(choice)
                return self._sign(choice, {"functionCall": self._function_call(call)})
            case LogprobsDelta(logprobs, choice):
                if self.reply.request.top_logprobs is not None:
                    self._logprobs.setdefault(choice, []).extend(logprobs)
                return None
            case FinishDelta():
                return None

    def candidate(self, choice: int, parts: list[JsonObject], finish: FinishDelta | None = None) -> JsonObject:
        content: JsonObject = {"parts": parts, "role": "model"} if parts else {"role": "model"}
        if finish is None:
            return {"content": content, "index": choice}
        self._usages.append(finish.usage)
        reason = "SAFETY" if choice in self._refused else _REASONS[finish.finish]
        candidate: JsonObject = {"content": content, "finishReason": reason, "index": choice}
        if logprobs := self._logprobs.pop(choice, None):
            candidate.update(_logprobs_result(logprobs, self.reply.request.top_logprobs or 0))
        return candidate

    def response(self, candidates: list[JsonObject]) -> JsonObject:
        """A chunk or a whole body. Usage is cumulative: what is known so far, never a difference."""
        usage = usage_body(self._usages) if self._usages else _prompt_usage(self.reply.prompt_tokens)
        return {"candidates": candidates, "usageMetadata": usage, "modelVersion": self.reply.model, "responseId": self.reply.ref}

    def _sign(self, choice: int, part: JsonObject) -> JsonObject:
        if choice not in self._signed:
            self._signed.add(choice)
            part["thoughtSignature"] = signature(self.reply.ref)
        return part

    def _function_call(self, call: ToolCall) -> JsonObject:
        number, self._calls = self._calls, self._calls + 1
        return {"id": f"call_{self.reply.ref}{number:02x}", "name": call.name, "args": _arguments(call.arguments)}


class _GoogleEncoder(Encoder):
    """What both stream forms share; they differ in how one response is framed."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._candidates = _Candidates(reply)
        self._held: dict[int, JsonObject] = {}

    def feed(self, delta: ChatDelta) -> bytes:
        choice = delta.choice
        if isinstance(delta, FinishDelta):
            held = self._held.pop(choice, None)
            return self._send(self._candidates.candidate(choice, [] if held is None else [held], delta))
        part = self._candidates.part(delta)
        if part is None:
            return b""
        held = self._held.pop(choice, None)
        self._held[choice] = part
        return b"" if held is None else self._send(self._candidates.candidate(choice, [held]))

    def _released(self) -> bytes:
        """What was held, where no finish will come: text that was sampled is shown even if an error follows it."""
        held, self._held = self._held, {}
        return b"".join(self._send(self._candidates.candidate(choice, [part])) for choice, part in held.items())

    def _send(self, candidate: JsonObject) -> bytes:
        return self._frame(line(self._candidates.response([candidate])))

    def _frame(self, data: bytes) -> bytes:
        raise NotImplementedError


class SseEncoder(_GoogleEncoder):
    """`alt=sse`."""

    def start(self) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def ping(self) -> bytes:
        return b"\n"

    def error(self, error: CallError) -> bytes:
        return self._released() + line(error_body(error)) + b"\n\n"

    def _frame(self, data: bytes) -> bytes:
        return b"data: " + data + b"\n\n"


class ArrayEncoder(_GoogleEncoder):
    """The default form: one JSON array that grows."""

    content_type = "application/json"

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply)
        self._separator = b""

    def start(self) -> bytes:
        return b"["

    def end(self) -> bytes:
        return b"]"

    def ping(self) -> bytes:
        return b"\n"

    def error(self, error: CallError) -> bytes:
        return self._released() + self._frame(line(error_body(error))) + b"]"

    def _frame(self, data: bytes) -> bytes:
        separator, self._separator = self._separator, b",\r\n"
        return separator + data


def complete_body(reply: Reply, answers: Sequence[Answer]) -> JsonObject:
    """What the stream of the same answers adds up to."""
    candidates = _Candidates(reply)
    listed = []
    for choice, answer in enumerate(answers):
        parts = [part for delta in deltas(answer, choice) if (part := candidates.part(delta)) is not None]
        listed.append(candidates.candidate(choice, parts, FinishDelta(answer.finish, answer.usage, choice=choice)))
    return candidates.response(listed)


def usage_body(usages: Sequence[Usage]) -> JsonObject:
    """Candidates and thoughts are counted apart; the prompt counts once, however many candidates it had."""
    prompt = max(usage.prompt for usage in usages)
    thinking = sum(usage.thinking for usage in usages)
    completion = sum(usage.completion for usage in usages)
    body: JsonObject = {
        "promptTokenCount": prompt,
        "candidatesTokenCount": completion - thinking,
        "totalTokenCount": prompt + completion,
        "promptTokensDetails": [{"modality": "TEXT", "tokenCount": prompt}],
    }
    if thinking:
        body["thoughtsTokenCount"] = thinking
    if cached := max(usage.cached for usage in usages):
        body["cachedContentTokenCount"] = cached
    return body


def _prompt_usage(prompt: int) -> JsonObject:
    return {"promptTokenCount": prompt, "totalTokenCount": prompt}


_REASONS: dict[FinishReason, str] = {
    "stop": "STOP",
    "stop_sequence": "STOP",
    "tool_calls": "STOP",
    "length": "MAX_TOKENS",
    "content_filter": "SAFETY",
}


def _arguments(text: str) -> JsonObject:
    """Arguments as the object that Google's form demands. What is no object is kept whole under `arguments`, never dropped."""
    if not text.strip():
        return {}
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = text
    return value if isinstance(value, dict) else {"arguments": text}


def _logprobs_result(logprobs: list[TokenLogprob], top: int) -> JsonObject:
    result: JsonObject = {"chosenCandidates": [{"token": entry.token, "logProbability": entry.logprob} for entry in logprobs]}
    if top:
        result["topCandidates"] = [
            {"candidates": [{"token": token, "logProbability": logprob} for token, logprob in entry.top[:top]]} for entry in logprobs
        ]
    return {"avgLogprobs": sum(entry.logprob for entry in logprobs) / len(logprobs), "logprobsResult": result}
