"""SGLang, as of 0.5.23.

Mode `tokens` uses `/generate` with `input_ids` and `return_logprob`: ids and log-probabilities come as pairs, and the answer
names the weight version. A stream is cumulative by default and incremental with `--incremental-streaming-output`; the running
`completion_tokens` tells which. Mode `messages` asks for `return_meta_info`, which SGLang refuses with streaming.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import orjson

from polar.chat import JsonObject, Message, Sampling, Tool, ToolChoice
from polar.engines.arrays import ids_array, logprobs_array, settle
from polar.engines.base import Chunk, EngineFinish, EngineInfo, Floats, Generation, Ids, MessagesRequest, TokensRequest, register
from polar.engines.chat import answer_message, chat_body, finish_reason, refusal_of, usage_counts
from polar.engines.http import reading
from polar.engines.refusals import error_for
from polar.engines.sglang_weights import SglangWeights
from polar.engines.vllm import chat_logprobs, choices_of
from polar.errors import EngineRejected, EngineUnavailable


@register
class SglangEngine(SglangWeights):
    name: ClassVar[str] = "sglang"
    takes_tokens: ClassVar[bool] = True
    returns_tokens: ClassVar[bool] = True

    _context: int | None = None
    _model = "default"

    async def info(self) -> EngineInfo:
        info = await self.listed()
        self._context = info.context
        self._model = info.models[0] if info.models else self._model
        return replace(info, version=await self._version())

    async def _version(self) -> str | None:
        version = (await self._server_info()).get("version")
        return None if version is None else str(version)

    # --- mode tokens -------------------------------------------------------------------------------------------

    async def _body(self, request: TokensRequest) -> JsonObject:
        sampling = sampling_params(request.sampling)
        if "max_new_tokens" not in sampling:
            if self._context is None:
                await self.info()
            sampling["max_new_tokens"] = max(1, (self._context or 1 << 20) - len(request.prompt_ids) - 1)
        sampling["skip_special_tokens"] = False
        if request.stop_token_ids:
            sampling["stop_token_ids"] = list(request.stop_token_ids)
        if request.response_format is not None:
            sampling.update(_grammar(request.response_format))
        if request.n != 1:
            sampling["n"] = request.n
        body: JsonObject = {"input_ids": request.prompt_ids, "sampling_params": sampling, "return_logprob": True}
        if request.top_logprobs:
            body["top_logprobs_num"] = request.top_logprobs
        if ":" in request.model:  # MODEL:ADAPTER, as its chat route takes it
            body["lora_path"] = request.model.rpartition(":")[2]
        return body

    async def generate(self, request: TokensRequest) -> list[Generation]:
        answer = await self.post("/generate", await self._body(request))
        answers = answer if isinstance(answer, list) else [answer]
        with reading(self.url):
            generations = [self._generation(item, request) for item in answers]
            for generation, item in zip(generations, answers, strict=True):
                settle([generation], item["meta_info"].get("completion_tokens"), sent=request.prompt_ids)
        return generations

    def _generation(self, answer: Any, request: TokensRequest) -> Generation:
        meta = _meta(answer)
        finish, stop = _finish(meta.get("finish_reason"))
        ids, logprobs = _sampled(answer.get("output_ids"), meta)
        return Generation(
            prompt_ids=request.prompt_ids if request.return_prompt_ids and meta.get("prompt_tokens") == len(request.prompt_ids) else None,
            token_ids=ids,
            logprobs=logprobs,
            finish=finish,
            stop=stop,
            prompt_tokens=meta.get("prompt_tokens") or 0,
            completion_tokens=meta.get("completion_tokens") or 0,
            cached_tokens=meta.get("cached_tokens") or 0,
            policy_version=_version_of(meta),
            top=_tops(meta) if request.top_logprobs else None,
        )

    async def stream_into(self, request: TokensRequest, take: Callable[[Sequence[Chunk]], object]) -> None:
        reader = _StreamReader(self.url, take)
        await self.events("/generate", {**await self._body(request), "stream": True}, reader.feed)
        reader.finish()

    # --- mode messages -----------------------------------------------------------------------------------------

    async def chat(self, request: MessagesRequest) -> list[Generation]:
        body = {**chat_body(request), "logprobs": True, "top_logprobs": request.top_logprobs or 0, "separate_reasoning": True}
        body.update(return_token_ids=True, return_prompt_token_ids=True, return_meta_info=True)
        answer = await self.post("/v1/chat/completions", body)
        usage, choices = usage_counts(answer), choices_of(answer)
        with reading(self.url):
            generations = [self._chat_generation(choice, usage, bool(request.top_logprobs)) for choice in choices]
            settle(generations, usage.get("completion_tokens"), prompt_expected=True)
        return generations

    def _chat_generation(self, choice: JsonObject, usage: Mapping[str, int], with_top: bool) -> Generation:
        meta = choice.get("meta_info") or {}
        ids, logprobs = _sampled(choice.get("response_token_ids"), meta)
        chat_values, tops = chat_logprobs(choice, with_top)
        wire = choice.get("message") or {}
        return Generation(
            prompt_ids=ids_array(choice.get("prompt_token_ids")),
            token_ids=ids,
            logprobs=logprobs if "output_token_logprobs" in meta else chat_values,
            finish=finish_reason(choice.get("finish_reason")),
            message=answer_message(wire),
            stop=choice.get("matched_stop"),
            refusal=refusal_of(wire),
            prompt_tokens=usage.get("prompt_tokens") or meta.get("prompt_tokens") or 0,
            completion_tokens=meta.get("completion_tokens") or (0 if ids is None else len(ids)),
            cached_tokens=meta.get("cached_tokens") or 0,
            reasoning_tokens=usage.get("reasoning_tokens", 0),
            policy_version=_version_of(meta),
            top=tops,
        )

    async def tokenize(self, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool | None = None) -> Ids | None:
        """SGLang has no route that renders messages: one token is sampled and the prompt's ids are read."""
        request = MessagesRequest(self._model, messages, tools, ToolChoice(), Sampling(max_tokens=1, temperature=0.0), thinking=thinking)
        return (await self.chat(request))[0].prompt_ids


class _StreamReader:
    """A stream's events as chunks, whether each repeats what came before it or not."""

    def __init__(self, url: str, take: Callable[[Sequence[Chunk]], object]) -> None:
        self._url = url
        self._take = take
        self._seen = 0
        self._finished = False

    def feed(self, events: Sequence[Any]) -> bool:
        """True once there was a finish reason. What came before an event that contradicts itself is given away before that is raised."""
        chunks: list[Chunk] = []
        try:
            for event in events:
                if not self._finished:
                    chunks.append(self._chunk(event))
        finally:
            if chunks:
                self._take(chunks)
        return self._finished

    def _chunk(self, event: Any) -> Chunk:
        meta = _meta(event)
        with reading(self._url):
            total = int(meta.get("completion_tokens") or 0)
            ids, logprobs = _pairs(meta)
        if ids is None or logprobs is None:
            raise EngineUnavailable(f"{self._url} streamed tokens without ids or log-probabilities")
        fresh, fresh_logprobs = (ids[self._seen :], logprobs[self._seen :]) if len(ids) == total else (ids, logprobs)
        if self._seen + len(fresh) != total:
            raise EngineUnavailable(f"{self._url} streamed {self._seen + len(fresh)} ids and counts {total} tokens")
        self._seen = total
        finish = meta.get("finish_reason")
        if finish is None:
            return Chunk(fresh.tolist(), fresh_logprobs.tolist())
        self._finished = True
        reason, stop = _finish(finish)
        cached, prompt = meta.get("cached_tokens") or 0, meta.get("prompt_tokens")
        return Chunk(fresh.tolist(), fresh_logprobs.tolist(), reason, stop, total, cached, _version_of(meta), prompt)

    def finish(self) -> None:
        if not self._finished:
            raise EngineUnavailable(f"{self._url} ended its stream without a finish reason")


def sampling_params(sampling: Sampling) -> JsonObject:
    """`sampling_params` of `/generate`."""
    params = sampling.as_dict()
    if "max_tokens" in params:
        params["max_new_tokens"] = params.pop("max_tokens")
    if "seed" in params:
        params["sampling_seed"] = params.pop("seed")
    if params.get("top_k") == 0:
        params["top_k"] = -1
    return params


def _grammar(response_format: JsonObject) -> JsonObject:
    """A Chat Completions `response_format` as a sampling parameter. Raises `EngineRejected` for a kind that SGLang lacks."""
    kind = response_format.get("type")
    if kind == "json_schema":
        return {"json_schema": orjson.dumps((response_format.get("json_schema") or {}).get("schema") or {}).decode()}
    if kind == "json_object":
        return {"json_schema": '{"type": "object"}'}
    if kind in (None, "text"):
        return {}
    raise EngineRejected(f"response_format {kind!r} is not known to SGLang")


def _meta(answer: Any) -> JsonObject:
    if isinstance(answer, dict) and isinstance(answer.get("meta_info"), dict):
        meta: JsonObject = answer["meta_info"]
        finish = meta.get("finish_reason")
        if isinstance(finish, dict) and finish.get("type") == "abort" and finish.get("status_code"):
            raise error_for(int(finish["status_code"]), str(finish.get("message") or "aborted").encode(), {})
        return meta
    raise EngineUnavailable("the engine's answer has no meta_info")


def _finish(reason: Any) -> tuple[EngineFinish, str | int | None]:
    if not isinstance(reason, dict):
        return finish_reason(reason), None
    matched = reason.get("matched")
    return finish_reason(reason.get("type")), matched if isinstance(matched, str | int) else None


def _sampled(output_ids: Any, meta: JsonObject) -> tuple[Ids | None, Floats | None]:
    """(ids, log-probabilities) of an answer. The pairs come from the sampler, `output_ids` through the detokenizer, and some releases leave
    the stop token out of them or put the prompt's end before them (sgl-project/sglang#17240): pairs that are as many as the server counts
    are then what was sampled. Where the two contradict each other otherwise, there are no log-probabilities."""
    ids = ids_array(output_ids)
    pair_ids, logprobs = _pairs(meta)
    if ids is None or pair_ids is None:
        return pair_ids if ids is None else ids, logprobs
    known, sampled = ids.tolist(), pair_ids.tolist()
    if known == sampled:
        return ids, logprobs
    same = known == sampled[: len(known)] or sampled == known[len(known) - len(sampled) :]
    return (pair_ids, logprobs) if same and len(sampled) == meta.get("completion_tokens") else (ids, None)


def _pairs(meta: JsonObject) -> tuple[Ids | None, Any]:
    """(ids, log-probabilities) of `output_token_logprobs`, a list of [logprob, id, text]."""
    entries = meta.get("output_token_logprobs")
    if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) >= 2 for entry in entries):
        return None, None
    return ids_array([entry[1] for entry in entries]), logprobs_array([entry[0] for entry in entries])


def _tops(meta: JsonObject) -> list[list[tuple[int | str, float]]] | None:
    entries = meta.get("output_top_logprobs")
    if not isinstance(entries, list):
        return None
    return [[(int(item[1]), float(item[0])) for item in entry or () if item[0] is not None] for entry in entries]


def _version_of(meta: JsonObject) -> str | None:
    """The server says "default" until somebody tells it a version: that is none."""
    version = meta.get("weight_version")
    return None if version in (None, "default") else str(version)
