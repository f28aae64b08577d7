"""SGLang 0.5.23's wire over the engine server's parts, for the fields that the gateway reads."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from polar.engine import wire
from polar.engine.api import ApiError, Job, JsonObject, parse_params
from polar.engine.http import answering, json_response, read_json, sse, until_disconnected
from polar.engine.parsing import parse_answer
from polar.engine.play import Output
from polar.engine.server import Server

STREAM_REFUSED = ("return_token_ids", "return_prompt_token_ids", "return_meta_info")


class SglangServer(Server):
    """`/generate` (token ids in and out, streamed cumulatively as SGLang does by default) and Chat Completions."""

    shows_forbidden_tools = False

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.adapters: dict[str, str] = {}
        """Loaded LoRA adapters: name to folder. They change nothing here."""

    def _routes(self) -> list[Route]:
        kept = {"/health", "/v1/models"}
        return [
            *(route for route in super()._routes() if route.path in kept),
            Route("/server_info", answering(self.server_info), methods=["GET"]),
            Route("/generate", answering(self.generate), methods=["POST"]),
            Route("/v1/chat/completions", answering(self.chat), methods=["POST"]),
            Route("/flush_cache", answering(self.flush_cache), methods=["GET", "POST"]),
            Route("/update_weight_version", answering(self.update_weight_version), methods=["POST"]),
            Route("/update_weights_from_disk", answering(self.update_weights_from_disk), methods=["POST"]),
            Route("/model_info", answering(self.model_info), methods=["GET"]),
            Route("/pause_generation", answering(self.pause_generation), methods=["POST"]),
            Route("/continue_generation", answering(self.resume), methods=["POST"]),
            Route("/load_lora_adapter", answering(self.load_lora_adapter), methods=["POST"]),
            Route("/unload_lora_adapter", answering(self.unload_lora_adapter), methods=["POST"]),
        ]

    async def server_info(self, request: Request) -> Response:
        return json_response({"version": "0.5.23", "weight_version": self.weight_version})

    async def update_weights_from_disk(self, request: Request) -> Response:
        body = await read_json(request)
        try:
            await self.backend.reload(str(body.get("model_path")))
        except ApiError as error:
            return json_response({"success": False, "message": error.message, "num_paused_requests": 0}, 400)
        self.weight_version = str(body.get("weight_version") or self.weight_version)
        return json_response({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def model_info(self, request: Request) -> Response:
        return json_response({"model_path": self.backend.root, "is_generation": True, "weight_version": self.weight_version})

    async def flush_cache(self, request: Request) -> Response:
        """Refused while requests run, and answered in words."""
        if self._gate.active:
            return PlainTextResponse("Flush cache failed: there are running requests.", 400)
        await self.backend.reset_prefix_cache()
        return PlainTextResponse("Cache flushed.")

    async def pause_generation(self, request: Request) -> Response:
        """`abort` ends what runs; `retract` and `in_place` keep it (here it goes on to its end)."""
        mode = (await read_json(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise ApiError(400, f"Invalid mode: {mode!r}.", param="mode")
        await self._gate.pause("abort" if mode == "abort" else "keep")
        return json_response({"message": "Generation paused successfully."})

    async def load_lora_adapter(self, request: Request) -> Response:
        body = await read_json(request)
        name, path = str(body.get("lora_name")), Path(str(body.get("lora_path")))
        if name in self.adapters or not (path / "adapter_config.json").is_file():
            why = f"LoRA adapter {name} is already loaded." if name in self.adapters else f"{path} holds no adapter."
            return json_response({"success": False, "error_message": why, "loaded_adapters": self.adapters}, 400)
        self.adapters[name] = str(path)
        return json_response({"success": True, "error_message": "", "loaded_adapters": self.adapters})

    async def unload_lora_adapter(self, request: Request) -> Response:
        name = str((await read_json(request)).get("lora_name"))
        found = self.adapters.pop(name, None) is not None
        why = "" if found else f"LoRA adapter with name {name} does not exist."
        return json_response({"success": found, "error_message": why, "loaded_adapters": self.adapters}, 200 if found else 400)

    async def generate(self, request: Request) -> Response:
        body = await read_json(request)
        prompt_ids = body.get("input_ids")
        if prompt_ids is None:
            prompt_ids = self.tokenizer.encode(str(body.get("text") or ""))
        sampling = dict(body.get("sampling_params") or {})
        sampling["max_tokens"] = sampling.pop("max_new_tokens", 128)
        if len(prompt_ids) >= self.backend.context:
            raise ApiError(
                400, f"Input length ({len(prompt_ids)} tokens) exceeds the maximum allowed length ({self.backend.context - 1} tokens)."
            )
        top = int(body.get("top_logprobs_num") or 0)
        params = parse_params(sampling, len(prompt_ids), self.backend.context, None, top)
        jobs = [Job(prompt_ids, params, "tokens", body, index) for index in range(int(sampling.get("n") or 1))]
        if body.get("stream"):
            return StreamingResponse(self._stream_generate(body, jobs[0]), media_type="text/event-stream")
        outputs = await until_disconnected(request, self._all(jobs, sampling))
        answers = [self._generated(body, job, output) for job, output in zip(jobs, outputs, strict=True)]
        return json_response(answers[0] if len(answers) == 1 else answers)

    async def _stream_generate(self, body: JsonObject, job: Job) -> AsyncIterator[bytes]:
        output = Output()
        waiting = 0
        try:
            async with self._gate.passed(), aclosing(self._play(job)) as pieces:
                async for piece in pieces:
                    output.add(piece)
                    waiting += 1
                    if waiting < self.tokens_per_chunk and piece.finish is None:
                        continue
                    waiting = 0
                    answer = self._generated(body, job, output)
                    if piece.finish is None:
                        answer["meta_info"]["finish_reason"] = None
                    yield sse(answer)
        except ApiError as error:
            yield sse(error.json())
        yield b"data: [DONE]\n\n"

    def _generated(self, body: JsonObject, job: Job, output: Output) -> JsonObject:
        return {
            "text": output.text,
            "output_ids": list(output.token_ids),
            "meta_info": self._meta(len(job.prompt_ids), output, logprobs=bool(body.get("return_logprob"))),
        }

    def _meta(self, prompt_tokens: int, output: Output, *, logprobs: bool) -> JsonObject:
        meta: JsonObject = {
            "id": uuid.uuid4().hex,
            "finish_reason": _finish(output, self.tokenizer.eos_ids),
            "prompt_tokens": prompt_tokens,
            "weight_version": self.weight_version,
            "completion_tokens": len(output.token_ids),
            "cached_tokens": 0,
        }
        if logprobs:
            meta["output_token_logprobs"] = [
                [logprob, token, None] for token, logprob in zip(output.token_ids, output.logprobs, strict=True)
            ]
            meta["output_top_logprobs"] = [[[value, token, None] for token, value in top] or None for top in output.top]
        return meta

    async def chat(self, request: Request) -> Response:
        body = await read_json(request)
        refused = [name for name in STREAM_REFUSED if body.get("stream") and body.get(name)]
        if refused:
            raise ApiError(400, f"{refused[0]} is not supported with streaming.")
        prompt, prompt_ids = self._render(body)
        params = parse_params(body, len(prompt_ids), self.backend.context, None, int(body.get("top_logprobs") or 0))
        jobs = [Job(prompt_ids, params, "messages", body, index) for index in range(int(body.get("n") or 1))]
        outputs = await until_disconnected(request, self._all(jobs, body))
        choices = [self._chat_choice(body, prompt, prompt_ids, output, index) for index, output in enumerate(outputs)]
        return json_response(
            {
                "id": uuid.uuid4().hex,
                "object": "chat.completion",
                "created": int(time.time()),
                "model": self.backend.name,
                "choices": choices,
                "usage": wire.usage(len(prompt_ids), sum(len(output.token_ids) for output in outputs)),
            }
        )

    def _chat_choice(self, body: Mapping[str, Any], prompt: str, prompt_ids: Sequence[int], output: Output, index: int) -> JsonObject:
        parsed = parse_answer(output.text, prompt=prompt[-32:], tools=bool(body.get("tools")) and body.get("tool_choice") != "none")
        choice = wire.chat_choice({**body, "return_token_ids": False}, self.tokenizer, output, parsed, index)
        choice["message"]["reasoning_content"] = choice["message"].pop("reasoning")
        choice["matched_stop"] = choice.pop("stop_reason")
        del choice["token_ids"]
        if body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = list(prompt_ids)
        if body.get("return_token_ids"):
            choice["response_token_ids"] = list(output.token_ids)
        if body.get("return_meta_info"):
            choice["meta_info"] = self._meta(len(prompt_ids), output, logprobs=bool(body.get("logprobs")))
        return choice


def _finish(output: Output, eos_ids: Sequence[int]) -> JsonObject:
    if output.finish == "length":
        return {"type": "length", "length": len(output.token_ids)}
    if output.finish == "abort":
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    matched = output.stop
    if matched is None and output.token_ids and output.token_ids[-1] in eos_ids:
        matched = output.token_ids[-1]
    return {"type": "stop", "matched": matched}
