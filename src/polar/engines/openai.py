"""Any server that speaks OpenAI Chat Completions. Untrainable unless it returns ids and log-probabilities, vLLM's way.

What not every server knows (ids, log-probabilities, template arguments) is asked for until the server refuses it by name, and
then never again. So is a longer answer than the server gives: harnesses ask for 32,000 tokens and more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from polar.chat import Image, JsonObject, Message
from polar.engines.arrays import settle
from polar.engines.base import Engine, EngineInfo, Generation, MessagesRequest, register
from polar.engines.chat import answer_message, chat_body, finish_reason, refusal_of, usage_counts
from polar.engines.http import HttpEngine, reading, split_login
from polar.engines.vllm import chat_ids, chat_logprobs, choices_of
from polar.errors import EngineRejected

_OPTIONAL = ("return_token_ids", "logprobs", "top_logprobs", "chat_template_kwargs", "top_k", "min_p", "repetition_penalty", "seed")

_MOST = re.compile(
    r"at most (\d+) completion tokens"  # OpenAI
    r"|max_(?:completion_)?tokens\b.{0,100}? expected a value <= (\d+)"  # Volcengine
    r"|max_tokens (?:should be|is) \[1, ?(\d+)\]"  # DashScope, DeepSeek
    r"|max_(?:completion_)?tokens`? must be less than or equal to `?(\d+)"  # Groq
    r"|> (\d+), which is the maximum allowed number of output tokens"  # Anthropic
    r"|greater than max_model_len=(?:max_total_tokens=)?(\d+)"  # vLLM
)
"""The longest answer that a server gives, in the words that it refuses a longer one with."""


@register
class OpenAIEngine(HttpEngine):
    name: ClassVar[str] = "openai"
    returns_tokens: ClassVar[bool] = True

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 1800.0) -> None:
        url, self._login = split_login(url)
        Engine.__init__(self, url, api_key=api_key, timeout_s=timeout_s)
        self._base = "" if urlsplit(self.url).path.strip("/") else "/v1"
        self._refused: set[str] = set()
        self._most: int | None = None

    async def info(self) -> EngineInfo:
        return await self.listed(f"{self._base}/models")

    async def chat(self, request: MessagesRequest) -> list[Generation]:
        answer = await self._ask(request)
        usage, choices = usage_counts(answer), choices_of(answer)
        with reading(self.url):
            generations = [self._generation(choice, answer, usage, request) for choice in choices]
            settle(generations, usage.get("completion_tokens"), prompt_expected=True)
        return generations

    async def _ask(self, request: MessagesRequest) -> Any:
        while True:
            body = self._body(request)
            try:
                return await self.post(f"{self._base}/chat/completions", body)
            except EngineRejected as error:
                if error.status not in (400, 422):
                    raise
                most, refused = _most(error.message), self._named(error.message, body)
                if most is not None and most < (request.sampling.max_tokens or 0) and most != self._most:
                    self._most = most
                elif refused:
                    self._refused |= refused
                else:
                    raise

    def _body(self, request: MessagesRequest) -> JsonObject:
        request = replace(request, messages=_images_from_users(request.messages))
        body = {**chat_body(request), "return_token_ids": True, "logprobs": True, "top_logprobs": request.top_logprobs or 0}
        if request.effort is not None:
            body["reasoning_effort"] = request.effort
        if (most := self._cut(request)) is not None:
            body["max_tokens"] = most
        if "max_tokens" in self._refused and "max_tokens" in body:
            body["max_completion_tokens"] = body.pop("max_tokens")
        return {key: value for key, value in body.items() if key not in self._refused}

    def _cut(self, request: MessagesRequest) -> int | None:
        """The server's longest answer, where the request asks for a longer one."""
        return self._most if self._most is not None and self._most < (request.sampling.max_tokens or 0) else None

    def _named(self, words: str, body: JsonObject) -> set[str]:
        """The optional fields of `body` that the refusal names."""
        named = {name for name in (*_OPTIONAL, "reasoning_effort", "max_tokens") if name in body and re.search(rf"\b{name}\b", words)}
        return named | {"top_logprobs"} if "logprobs" in named else named

    def _generation(self, choice: JsonObject, answer: JsonObject, usage: Mapping[str, int], request: MessagesRequest) -> Generation:
        logprobs, tops = chat_logprobs(choice, bool(request.top_logprobs))
        wire = choice.get("message") or {}
        prompt_ids, ids = chat_ids(choice, answer)
        return Generation(
            prompt_ids=prompt_ids,
            token_ids=ids,
            logprobs=logprobs,
            finish=finish_reason(choice.get("finish_reason")),
            message=answer_message(wire),
            stop=choice.get("stop_reason"),
            refusal=refusal_of(wire),
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens") or (0 if ids is None else len(ids)),
            cached_tokens=usage.get("cached_tokens", 0),
            reasoning_tokens=usage.get("reasoning_tokens", 0),
            top=tops,
            max_tokens=self._cut(request),
        )


def _images_from_users(messages: Sequence[Message]) -> list[Message]:
    """OpenAI takes images from users only: those of tool results go into a user message after the last result of their turn."""
    sent: list[Message] = []
    images: list[Image] = []
    for message in (*messages, None):
        if images and (message is None or message.role != "tool"):
            sent.append(Message("user", tuple(images)))
            images = []
        if message is not None and message.role == "tool" and message.images:
            images.extend(message.images)
            message = replace(message, content=message.text)
        if message is not None:
            sent.append(message)
    return sent


def _most(words: str) -> int | None:
    found = _MOST.search(words)
    return None if found is None else int(found[found.lastindex or 0])
