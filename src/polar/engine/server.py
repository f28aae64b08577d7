"""The HTTP side of the engine server: the subset of vLLM 0.32's API that the gateway uses, over any `Backend`.

Knows nothing of how tokens are sampled. A client that leaves ends its generation. Forced tool choice and JSON schemas need
guided decoding, which no backend here has: they are refused with a 400, unless the application was made with
`guided="ignore"` (scripts whose answers are given anyway).
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from polar import __version__
from polar.engine import wire
from polar.engine.api import MAX_TOP_LOGPROBS, ApiError, Backend, Job, JsonObject, Template, Tokenizer, parse_params
from polar.engine.gate import MODES, Gate
from polar.engine.http import answering, json_response, read_json, sse, until_disconnected
from polar.engine.parsing import parse_answer
from polar.engine.play import Output, Piece, play
from polar.engine.text import normalise_messages

VLLM_WIRE = "0.32.0"


class Server:
    """One served model. `tokens_per_chunk` groups streamed tokens; `weight_version` is what a trainer last set."""

    shows_forbidden_tools = True
    """Whether tools are in the prompt at `tool_choice: none`: vLLM's default, which keeps the prompt's prefix."""

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        template: Template,
        *,
        guided: Literal["reject", "ignore"] = "reject",
        tokens_per_chunk: int = 1,
        extra_routes: Sequence[Route] = (),
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.template = template
        self.guided = guided
        self.tokens_per_chunk = tokens_per_chunk
        self.weight_version = "default"
        self._gate = Gate()
        self.app = Starlette(routes=[*self._routes(), *extra_routes], lifespan=self._lifespan)

    def _routes(self) -> list[Route]:
        post, get = ["POST"], ["GET"]
        return [
            Route("/health", answering(self.health), methods=get),
            Route("/version", answering(self.version), methods=get),
            Route("/metrics", answering(self.metrics), methods=get),
            Route("/v1/models", answering(self.models), methods=get),
            Route("/v1/completions", answering(self.completions), methods=post),
            Route("/v1/chat/completions", answering(self.chat), methods=post),
            Route("/tokenize", answering(self.tokenize), methods=post),
            Route("/detokenize", answering(self.detokenize), methods=post),
            Route("/collective_rpc", answering(self.collective_rpc), methods=post),
            Route("/reset_prefix_cache", answering(self.reset_prefix_cache), methods=post),
            Route("/update_weight_version", answering(self.update_weight_version), methods=post),
            Route("/weight_info", answering(self.weight_info), methods=get),
            Route("/pause", answering(self.pause), methods=post),
            Route("/resume", answering(self.resume), methods=post),
            Route("/is_paused", answering(self.is_paused), methods=get),
        ]

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await self.backend.aclose()

    def _check_model(self, body: JsonObject) -> None:
        """Refuses a model that is not served here, as vLLM does; a request that names none means the one that is."""
        model = body.get("model")
        if model is not None and model != self.backend.name:
            raise ApiError(404, f"The model `{model}` does not exist.", param="model")

    # --- generation ------------------------------------------------------------------------------------------

    async def completions(self, request: Request) -> Response:
        body = await read_json(request)
        self._check_model(body)
        prompts = self._prompts(body.get("prompt"))
        n = _count(body)
        top = body.get("logprobs")
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP_LOGPROBS):
            raise ApiError(400, f"logprobs must be an integer between 0 and {MAX_TOP_LOGPROBS}.", param="logprobs")
        self._refuse_guided(body)
        jobs = [
            Job(ids, parse_params(body, len(ids), self.backend.context, 16, top or 0), "tokens", body, index)
            for ids in prompts
            for index in range(n)
        ]
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time()), "model": self.backend.name}
        if body.get("stream"):
            return StreamingResponse(self._stream_completions(body, jobs, head), media_type="text/event-stream")
        outputs = await until_disconnected(request, self._all(jobs, body))
        choices = [
            wire.completion_choice(body, self.tokenizer, job.prompt_ids, output, index)
            for index, (job, output) in enumerate(zip(jobs, outputs, strict=True))
        ]
        sampled = sum(len(output.token_ids) for output in outputs)
        return json_response({**head, "choices": choices, "usage": wire.usage(sum(map(len, prompts)), sampled)})

    async def chat(self, request: Request) -> Response:
        body = await read_json(request)
        self._check_model(body)
        prompt, prompt_ids = self._render(body)
        n = _count(body)
        top = body.get("top_logprobs")
        if top is not None and (isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MAX_TOP_LOGPROBS):
            raise ApiError(400, f"top_logprobs must be an integer between 0 and {MAX_TOP_LOGPROBS}.", param="top_logprobs")
        choice = body.get("tool_choice")
        if (choice == "required" or isinstance(choice, dict)) and self.guided == "reject":
            raise ApiError(400, "tool_choice can only be auto or none here: this server has no guided decoding.", param="tool_choice")
        self._refuse_guided(body)
        params = parse_params(body, len(prompt_ids), self.backend.context, None, top or 0)
        jobs = [Job(prompt_ids, params, "messages", body, index) for index in range(n)]
        outputs = await until_disconnected(request, self._all(jobs, body))
        tools = bool(body.get("tools")) and choice != "none"
        choices = [
            wire.chat_choice(body, self.tokenizer, output, parse_answer(output.text, prompt=prompt[-32:], tools=tools), index)
            for index, output in enumerate(outputs)
        ]
        head: JsonObject = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.backend.name}
        used = wire.usage(len(prompt_ids), sum(len(output.token_ids) for output in outputs))
        if body.get("stream"):
            return StreamingResponse(_stream_chat(body, choices, head, used), media_type="text/event-stream")
        ids = prompt_ids if body.get("return_token_ids") else None
        return json_response({**head, "object": "chat.completion", "choices": choices, "usage": used, "prompt_token_ids": ids})

    async def _all(self, jobs: Sequence[Job], body: JsonObject) -> list[Output]:
        skip, include = _text_options(body)
        async with self._gate.passed():
            return await asyncio.gather(*(self._collect(job, skip_special=skip, include_stop=include) for job in jobs))

    async def _collect(self, job: Job, **text_options: bool) -> Output:
        output = Output()
        async with aclosing(self._play(job, **text_options)) as pieces:
            async for piece in pieces:
                output.add(piece)
        return output

    async def _play(self, job: Job, **text_options: bool) -> AsyncGenerator[Piece, None]:
        """What the backend samples, up to its end, or to the token that came after `/pause?mode=abort`."""
        aborts = self._gate.aborts
        async with aclosing(play(self.backend, job, self.tokenizer, **text_options)) as pieces:
            async for piece in pieces:
                if self._gate.aborts != aborts and piece.finish is None:
                    yield replace(piece, finish="abort")
                    return
                yield piece

    async def _stream_completions(self, body: JsonObject, jobs: Sequence[Job], head: JsonObject) -> AsyncIterator[bytes]:
        if len(jobs) != 1:
            yield sse(ApiError(400, "a stream has one prompt and one choice here.", param="n").json())
            return
        job = jobs[0]
        skip, include = _text_options(body)
        pieces: list[Piece] = []
        sampled = 0
        try:
            played = self._play(job, skip_special=skip, include_stop=include)
            async with self._gate.passed(), aclosing(played):
                async for piece in played:
                    pieces.append(piece)
                    if len(pieces) < self.tokens_per_chunk and piece.finish is None:
                        continue
                    prompt_ids = job.prompt_ids if sampled == 0 else None
                    sampled += len(pieces)
                    yield sse({**head, "choices": [wire.completion_chunk(body, self.tokenizer, pieces, 0, prompt_ids)]})
                    pieces = []
        except ApiError as error:
            yield sse(error.json())
        if (body.get("stream_options") or {}).get("include_usage"):
            yield sse({**head, "choices": [], "usage": wire.usage(len(job.prompt_ids), sampled)})
        yield b"data: [DONE]\n\n"

    def _prompts(self, prompt: Any) -> list[list[int]]:
        if isinstance(prompt, str):
            return [self.tokenizer.encode(prompt)]
        if isinstance(prompt, list) and prompt:
            if all(type(item) is int and item >= 0 for item in prompt):
                return [prompt]
            if all(isinstance(item, str | list) for item in prompt):
                return [ids for item in prompt for ids in self._prompts(item)]
        raise ApiError(400, "prompt must be a string or a list of token ids that is not empty.", param="prompt")

    def _render(self, body: JsonObject) -> tuple[str, list[int]]:
        messages = normalise_messages(body.get("messages"))
        tools = body.get("tools") if body.get("tool_choice") != "none" or self.shows_forbidden_tools else None
        kwargs = dict(body.get("chat_template_kwargs") or {})
        kwargs["add_generation_prompt"] = body.get("add_generation_prompt", True)
        text = self.template.render(messages, tools, **kwargs)
        return text, self.tokenizer.encode(text)

    def _refuse_guided(self, body: JsonObject) -> None:
        kind = (body.get("response_format") or {}).get("type", "text")
        if kind != "text" and self.guided == "reject":
            raise ApiError(400, f"response_format {kind} needs guided decoding, which this server does not have.", param="response_format")

    # --- everything else ---------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        return json_response({"version": VLLM_WIRE, "server": f"polar-engine {__version__}"})

    async def models(self, request: Request) -> Response:
        card = {
            "id": self.backend.name,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "polar",
            "root": self.backend.root,
            "parent": None,
            "max_model_len": self.backend.context,
        }
        return json_response({"object": "list", "data": [card]})

    async def metrics(self, request: Request) -> Response:
        values = {"requests_running": float(self._gate.active), **self.backend.metrics()}
        return PlainTextResponse("".join(f"polar_engine_{name} {value:g}\n" for name, value in values.items()))

    async def tokenize(self, request: Request) -> Response:
        body = await read_json(request)
        self._check_model(body)
        if "messages" in body:
            ids = self._render(body)[1]
        elif isinstance(body.get("prompt"), str):
            ids = self.tokenizer.encode(body["prompt"])
        else:
            raise ApiError(400, "give messages, or prompt as a string.", param="prompt")
        return json_response({"count": len(ids), "max_model_len": self.backend.context, "tokens": ids, "token_strs": None})

    async def detokenize(self, request: Request) -> Response:
        body = await read_json(request)
        self._check_model(body)
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(item) is int for item in tokens):
            raise ApiError(400, "tokens must be a list of token ids.", param="tokens")
        return json_response({"prompt": self.tokenizer.decode(tokens, skip_special=False)})

    async def collective_rpc(self, request: Request) -> Response:
        body = await read_json(request)
        if body.get("method") != "reload_weights":
            raise ApiError(400, f"the only method here is reload_weights, not {body.get('method')!r}.", param="method")
        path = (body.get("kwargs") or {}).get("weights_path")
        await self.backend.reload(None if path is None else str(path))
        return json_response({"results": [None]})

    async def reset_prefix_cache(self, request: Request) -> Response:
        await self.backend.reset_prefix_cache()
        return json_response({"success": True})

    async def update_weight_version(self, request: Request) -> Response:
        body = await read_json(request)
        if not isinstance(body.get("new_version"), str):
            raise ApiError(400, "new_version must be a string.", param="new_version")
        self.weight_version = body["new_version"]
        return json_response({"success": True, "new_version": self.weight_version})

    async def weight_info(self, request: Request) -> Response:
        return json_response({"weight_version": self.weight_version})

    async def pause(self, request: Request) -> Response:
        """Holds new requests; ends those in flight with `?mode=abort` (the default, as vLLM's), waits for them with `wait`, lets them go on
        with `keep`."""
        mode = request.query_params.get("mode", "abort")
        if mode not in MODES:
            raise ApiError(400, f"mode must be abort, wait or keep, not {mode!r}.", param="mode")
        await self._gate.pause(mode)
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self._gate.resume()
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        return json_response({"is_paused": self._gate.paused})


def _count(body: JsonObject) -> int:
    n = body.get("n")
    n = 1 if n is None else n
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= 128:
        raise ApiError(400, "n must be an integer between 1 and 128.", param="n")
    return n


def _text_options(body: JsonObject) -> tuple[bool, bool]:
    return body.get("skip_special_tokens") is not False, bool(body.get("include_stop_str_in_output"))


async def _stream_chat(body: JsonObject, choices: Sequence[JsonObject], head: JsonObject, used: JsonObject) -> AsyncIterator[bytes]:
    head = {**head, "object": "chat.completion.chunk"}
    for choice in choices:
        for chunk in wire.chat_chunks(choice, first=True):
            yield sse({**head, "choices": [chunk]})
    if (body.get("stream_options") or {}).get("include_usage"):
        yield sse({**head, "choices": [], "usage": used})
    yield b"data: [DONE]\n\n"
