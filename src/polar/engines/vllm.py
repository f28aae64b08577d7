"""vLLM, as of 0.32 (and `polar engine`, which speaks the same wire).

Mode `tokens` uses `/v1/completions` with a prompt of ids, which every vLLM server has (`/inference/v1/generate` needs
`--enable-scale-out`). The sampled ids come as `logprobs.tokens` in the form `token_id:N` (`return_tokens_as_token_ids`):
unlike `return_token_ids` that does not send the whole prompt back with each answer. The ids include the stop token.

Mode `messages` uses `/v1/chat/completions` with `return_token_ids`, never streamed: streamed ids lose what the parsers eat (B92).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from polar.chat import JsonObject, Message, Tool
from polar.engines.arrays import (
    FLOOR,
    are_ids,
    ids_array,
    ids_from_names,
    ids_of_names,
    logprobs_array,
    name_or_id,
    routed_experts,
    settle,
    top_ids,
)
from polar.engines.base import Chunk, EngineInfo, Floats, Generation, Ids, MessagesRequest, TokensRequest, register
from polar.engines.chat import (
    answer_message,
    chat_body,
    chat_message,
    finish_reason,
    refusal_of,
    sampling_body,
    tools_body,
    usage_counts,
)
from polar.engines.echo import EchoedPrompts
from polar.engines.http import MISREAD, loads, misread, reading
from polar.engines.vllm_weights import VllmWeights
from polar.errors import EngineRejected, EngineUnavailable


@register
class VllmEngine(VllmWeights):
    name: ClassVar[str] = "vllm"
    takes_tokens: ClassVar[bool] = True
    returns_tokens: ClassVar[bool] = True

    _context: int | None = None
    _routes = False
    """Whether the server was seen to return expert routing (`--enable-return-routed-experts`)."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 1800.0) -> None:
        super().__init__(url, api_key=api_key, timeout_s=timeout_s)
        self._echoed = EchoedPrompts()

    async def info(self) -> EngineInfo:
        info = await self.listed()
        self._context = info.context
        return replace(info, version=await self._version())

    async def _version(self) -> str | None:
        try:
            answer = await self.get("/version")
        except EngineRejected:
            return None
        return str(answer["version"]) if isinstance(answer, dict) and "version" in answer else None

    # --- mode tokens -------------------------------------------------------------------------------------------

    async def _body(self, request: TokensRequest) -> JsonObject:
        body: JsonObject = {
            "model": request.model,
            "prompt": request.prompt_ids,
            **sampling_body(request.sampling),
            "logprobs": request.top_logprobs or 0,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": False,
        }
        if "max_tokens" not in body:
            body["max_tokens"] = await self._room(len(request.prompt_ids))
        if request.stop_token_ids:
            body["stop_token_ids"] = list(request.stop_token_ids)
        if request.return_prompt_ids:
            body["return_token_ids"] = True
        if request.response_format is not None:
            body["response_format"] = request.response_format
        if self._routes and len(request.prompt_ids):  # the prompt's own routing would be megabytes
            body["routed_experts_prompt_start"] = len(request.prompt_ids) - 1
        if request.n != 1:
            body["n"] = request.n
        if request.session is not None:
            body["session_id"] = request.session
        return body

    async def _room(self, prompt_tokens: int) -> int:
        """What is left of the context: the server would take null for 16."""
        return max(1, (await self._known_context() or 1 << 20) - prompt_tokens)

    async def _known_context(self) -> int | None:
        if self._context is None:
            await self.info()
        return self._context

    async def generate(self, request: TokensRequest) -> list[Generation]:
        answer = await self.post("/v1/completions", await self._body(request))
        usage, choices = usage_counts(answer), choices_of(answer)
        with reading(self.url):
            generations = [self._generation(choice, usage, bool(request.top_logprobs)) for choice in choices]
            settle(generations, usage.get("completion_tokens"), prompt_expected=request.return_prompt_ids, sent=request.prompt_ids)
        return generations

    def _generation(self, choice: JsonObject, usage: Mapping[str, int], with_top: bool) -> Generation:
        ids, logprobs = _sampled(choice)
        wire = choice.get("logprobs") or {}
        tops = wire.get("top_logprobs")
        return Generation(
            prompt_ids=ids_array(choice.get("prompt_token_ids")),
            token_ids=ids,
            logprobs=logprobs,
            finish=finish_reason(choice.get("finish_reason")),
            stop=choice.get("stop_reason"),
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=0 if ids is None else len(ids),
            cached_tokens=usage.get("cached_tokens", 0),
            top=[top_ids(entry) for entry in tops] if with_top and isinstance(tops, list) else None,
            routed_experts=self._routed(choice, ids),
        )

    def _routed(self, choice: JsonObject, ids: Ids | None) -> str | None:
        found = routed_experts(choice.get("routed_experts"), 0 if ids is None else len(ids))
        self._routes = self._routes or found is not None
        return found

    async def stream_into(self, request: TokensRequest, take: Callable[[Sequence[Chunk]], object]) -> None:
        body = {**await self._body(request), "stream": True, "stream_options": {"include_usage": True}}
        reader = _StreamReader(self.url, take)
        await self.events("/v1/completions", body, reader.feed)
        reader.finish()

    # --- mode messages -----------------------------------------------------------------------------------------

    async def chat(self, request: MessagesRequest) -> list[Generation]:
        body = {**chat_body(request), "logprobs": True, "top_logprobs": request.top_logprobs or 0, "return_token_ids": True}
        body["return_tokens_as_token_ids"] = True
        body["include_reasoning"] = True
        if request.session is not None:
            body["session_id"] = request.session
        context = await self._known_context()
        if context is not None and (request.sampling.max_tokens or 0) > context:
            # More than the whole context is refused; more than the room that is left is cut to it by the server.
            body["max_tokens"] = context
        conversation = (request.session, len(request.messages[0].text) if request.messages else 0)
        answer = await self.post("/v1/chat/completions", body, parse=lambda raw: self._echoed.read(raw, conversation, loads))
        usage, choices = usage_counts(answer), choices_of(answer)
        with reading(self.url):
            generations = [self._chat_generation(choice, answer, usage, bool(request.top_logprobs)) for choice in choices]
            settle(generations, usage.get("completion_tokens"), prompt_expected=True)
        return generations

    def _chat_generation(self, choice: JsonObject, answer: JsonObject, usage: Mapping[str, int], with_top: bool) -> Generation:
        prompt_ids, ids = chat_ids(choice, answer)
        logprobs, tops = chat_logprobs(choice, with_top)
        wire = choice.get("message") or {}
        return Generation(
            prompt_ids=prompt_ids,
            token_ids=ids,
            logprobs=logprobs,
            finish=finish_reason(choice.get("finish_reason")),
            message=answer_message(wire),
            stop=choice.get("stop_reason"),
            refusal=refusal_of(wire),
            prompt_tokens=usage.get("prompt_tokens", 0),
            completion_tokens=usage.get("completion_tokens", 0) if ids is None else len(ids),
            cached_tokens=usage.get("cached_tokens", 0),
            reasoning_tokens=usage.get("reasoning_tokens", 0),
            top=tops,
            routed_experts=self._routed(choice, ids),
        )

    async def tokenize(self, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool | None = None) -> Ids | None:
        body: JsonObject = {"messages": [chat_message(message) for message in messages], "add_generation_prompt": True}
        if tools:
            body["tools"] = tools_body(tools)
        if thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": thinking}
        try:
            answer = await self.post("/tokenize", body)
        except EngineRejected as error:
            if error.status in (404, 405):
                return None
            raise
        return ids_array(answer.get("tokens"))


class _StreamReader:
    """A stream's events as chunks. The last one waits for the usage, which comes after the finish reason."""

    def __init__(self, url: str, take: Callable[[Sequence[Chunk]], object]) -> None:
        self._url = url
        self._take = take
        self._last: Chunk | None = None
        self._usage: Mapping[str, int] = {}

    def feed(self, events: Sequence[Any]) -> None:
        """What came before a token without its id is given away before that is raised."""
        chunks: list[Chunk] = []
        try:
            for event in events:
                self._read(event, chunks)
        except MISREAD as error:
            raise misread(self._url, error) from error
        finally:
            if chunks:
                self._take(chunks)

    def _read(self, event: Any, chunks: list[Chunk]) -> None:
        if event.get("usage"):
            self._usage = usage_counts(event) or self._usage
        for choice in event.get("choices") or ():
            chunk = _streamed(choice)
            if chunk is None:
                raise EngineUnavailable(f"{self._url} streamed a token without its id")
            if chunk.token_ids:
                chunks.append(chunk)
            if choice.get("finish_reason") is not None:
                self._last = Chunk([], [], finish_reason(choice["finish_reason"]), choice.get("stop_reason"))

    def finish(self) -> None:
        if self._last is None:
            raise EngineUnavailable(f"{self._url} ended its stream without a finish reason")
        self._last.prompt_tokens = self._usage.get("prompt_tokens")
        self._last.completion_tokens = self._usage.get("completion_tokens")
        self._last.cached_tokens = self._usage.get("cached_tokens", 0)
        self._take((self._last,))


def choices_of(answer: Any) -> list[JsonObject]:
    """The choices of an answer in OpenAI's form, at least one. Raises `EngineUnavailable` where there are none."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices:
        raise EngineUnavailable("the engine's answer has no choices")
    return choices


def _sampled(choice: JsonObject) -> tuple[Ids | None, Floats | None]:
    """Ids and log-probabilities of a `/v1/completions` choice, whole or streamed."""
    wire = choice.get("logprobs") or {}
    ids = ids_array(choice.get("token_ids"))
    if ids is None:
        ids = ids_from_names(wire.get("tokens"))
    return ids, logprobs_array(wire.get("token_logprobs"))


def _streamed(choice: JsonObject) -> Chunk | None:
    """As `_sampled`, of a few tokens: without arrays, whose making costs more than a token does; `None` without ids. Log-probabilities
    that do not line up are missing."""
    wire = choice.get("logprobs") or {}
    ids = choice.get("token_ids")
    if ids is None or not are_ids(ids):
        ids = ids_of_names(wire.get("tokens"))
        if not are_ids(ids):
            return None
    values = wire.get("token_logprobs")
    if not isinstance(values, list) or len(values) != len(ids):
        return Chunk(ids, [math.nan] * len(ids))
    return Chunk(ids, [value if type(value) is float and FLOOR < value < math.inf else _odd_logprob(value) for value in values])


def _odd_logprob(value: Any) -> float:
    array = logprobs_array([value])
    return math.nan if array is None else float(array[0])


def chat_ids(choice: JsonObject, answer: JsonObject) -> tuple[Ids | None, Ids | None]:
    """(prompt ids, sampled ids) of a Chat Completions choice. Servers send the former beside the choices or in each; some releases of vLLM
    leave out the latter where a model has a format of its own (vllm-project/vllm#28246), and name them in the log-probabilities only."""
    prompt = ids_array(answer.get("prompt_token_ids"))
    sampled = ids_array(choice.get("token_ids"))
    if sampled is None:
        content = (choice.get("logprobs") or {}).get("content")
        sampled = ids_from_names([entry.get("token") for entry in content]) if isinstance(content, list) and content else None
    return ids_array(choice.get("prompt_token_ids")) if prompt is None else prompt, sampled


def chat_logprobs(choice: JsonObject, with_top: bool) -> tuple[Floats | None, list[list[tuple[int | str, float]]] | None]:
    """(float32[n], alternatives) of a Chat Completions choice; `None` where the server sent none, or they were not asked for."""
    content = (choice.get("logprobs") or {}).get("content")
    if not isinstance(content, list):
        return None, None
    tops = [_alternatives(entry) for entry in content] if with_top else None
    return logprobs_array([entry.get("logprob") for entry in content]), tops


def _alternatives(entry: JsonObject) -> list[tuple[int | str, float]]:
    return [
        (name_or_id(str(other.get("token"))), float(other["logprob"]))
        for other in entry.get("top_logprobs") or ()
        if other.get("logprob") is not None
    ]
