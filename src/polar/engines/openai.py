"""Any server that speaks OpenAI Chat Completions. Untrainable unless it returns ids and log-probabilities, vLLM's way.

What not every server knows (ids, log-probabilities, template arguments) is asked for until the server refuses it by name, and
then never again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import urlsplit

from polar.chat import JsonObject
from polar.engines.arrays import ids_array, settle
from polar.engines.base import Engine, EngineInfo, Generation, MessagesRequest, register
from polar.engines.chat import answer_message, chat_body, finish_reason, refusal_of, usage_counts
from polar.engines.http import HttpEngine, reading, split_login
from polar.engines.vllm import chat_logprobs, choices_of
from polar.errors import EngineRejected

_OPTIONAL = ("return_token_ids", "logprobs", "top_logprobs", "chat_template_kwargs", "top_k", "min_p", "repetition_penalty", "seed")


@register
class OpenAIEngine(HttpEngine):
    name: ClassVar[str] = "openai"
    returns_tokens: ClassVar[bool] = True

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 1800.0) -> None:
        url, self._login = split_login(url)
        Engine.__init__(self, url, api_key=api_key, timeout_s=timeout_s)
        self._base = "" if urlsplit(self.url).path.strip("/") else "/v1"
        self._refused: set[str] = set()

    async def info(self) -> EngineInfo:
        listing = await self.get(f"{self._base}/models")
        cards = [card for card in listing.get("data", []) if isinstance(card, dict)] if isinstance(listing, dict) else []
        context = cards[0].get("max_model_len") if cards else None
        return EngineInfo(tuple(str(card.get("id")) for card in cards), context, None, cards[0].get("root") if cards else None)

    async def chat(self, request: MessagesRequest) -> list[Generation]:
        answer = await self._ask(request)
        usage, choices = usage_counts(answer), choices_of(answer)
        with reading(self.url):
            generations = [self._generation(choice, answer, usage, bool(request.top_logprobs)) for choice in choices]
            settle(generations, usage.get("completion_tokens"), prompt_expected=True)
        return generations

    async def _ask(self, request: MessagesRequest) -> Any:
        while True:
            body = self._body(request)
            try:
                return await self.post(f"{self._base}/chat/completions", body)
            except EngineRejected as error:
                refused = self._named(error.message, body)
                if error.status not in (400, 422) or not refused:
                    raise
                self._refused |= refused

    def _body(self, request: MessagesRequest) -> JsonObject:
        body = {**chat_body(request), "return_token_ids": True, "logprobs": True, "top_logprobs": request.top_logprobs or 0}
        if request.effort is not None:
            body["reasoning_effort"] = request.effort
        if "max_tokens" in self._refused and "max_tokens" in body:
            body["max_completion_tokens"] = body.pop("max_tokens")
        return {key: value for key, value in body.items() if key not in self._refused}

    def _named(self, words: str, body: JsonObject) -> set[str]:
        """The optional fields of `body` that the refusal names."""
        named = {name for name in (*_OPTIONAL, "reasoning_effort", "max_tokens") if name in body and re.search(rf"\b{name}\b", words)}
        return named | {"top_logprobs"} if "logprobs" in named else named

    def _generation(self, choice: JsonObject, answer: JsonObject, usage: Mapping[str, int], with_top: bool) -> Generation:
        logprobs, tops = chat_logprobs(choice, with_top)
        wire = choice.get("message") or {}
        ids = ids_array(choice.get("token_ids"))
        return Generation(
            prompt_ids=ids_array(answer.get("prompt_token_ids")),
            token_ids=ids,
            logprobs=logprobs,
            finish=finish_reason(choice.get("finish_reason")),
            message=answer_message(wire),
            stop=choice.get("stop_reason"),
            refusal=refusal_of(wire),
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens") or (0 if ids is None else len(ids)),
            cached_tokens=usage.get("cached_tokens", 0),
            top=tops,
        )
