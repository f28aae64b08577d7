"""A scripted engine: in process (`ScriptedEngine`) and over HTTP (`serve_scripted`), vLLM's wire and SGLang's.

The script decides what is "sampled"; everything around it is real: prompts are rendered and tokenised, answers are cut at
`max_tokens` and stop strings, tool calls are parsed. Log-probabilities are made up but deterministic (`fake_logprob`), so a
test can tell whether each one stayed with its token.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np

from polar.chat import Message, Sampling, Tool, ToolChoice
from polar.engine.api import ApiError, Drop, Finish, Job, JsonObject, Params, Step, Template, Tokenizer, overflow_error
from polar.engine.parsing import parse_answer
from polar.engine.play import Output, collect, play
from polar.engine.text import CHATML, ByteTokenizer, JinjaTemplate, load_text, normalise_messages
from polar.engines.base import Chunk, Engine, EngineInfo, Generation, Ids, MessagesRequest, TokensRequest
from polar.engines.chat import answer_message, chat_body, finish_reason, tools_body
from polar.errors import CallError, ContextOverflow, EngineRejected, EngineUnavailable
from polar.testing.serve import Running, serve_app


@dataclass(frozen=True, slots=True)
class Call:
    """What a script sees of one call. `messages` and `tools` are the wire's, in mode `messages` only. `number` counts the calls
    from 0; `index` is the choice. `text` is the whole prompt as text, special tokens included."""

    number: int
    mode: Literal["tokens", "messages"]
    prompt_ids: Sequence[int]
    tokenizer: Tokenizer
    body: JsonObject = field(default_factory=dict)
    index: int = 0

    @property
    def text(self) -> str:
        return self.tokenizer.decode(self.prompt_ids, skip_special=False)

    @property
    def messages(self) -> list[JsonObject]:
        found = self.body.get("messages")
        return found if isinstance(found, list) else []

    @property
    def tools(self) -> list[JsonObject]:
        found = self.body.get("tools")
        return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer. `ids` are taken as they are; `text` is encoded and, unless `finish` is `length`, ended with the end token.

    `logprobs` replaces the made-up ones (None: missing). `delay_s` passes before the first token, `token_delay_s` before each.
    `error` is raised after `error_after` tokens: a `CallError` or `ApiError` becomes that error answer, `Drop` cuts the connection.
    """

    text: str | None = None
    ids: Sequence[int] | None = None
    finish: Finish = "stop"
    logprobs: Sequence[float | None] | None = None
    delay_s: float = 0.0
    token_delay_s: float = 0.0
    error: Exception | None = None
    error_after: int = 0


Scripted = Reply | str | Sequence[int]
Script = Callable[[Call], Scripted | Awaitable[Scripted]] | Sequence[Scripted]


def fake_logprob(token_id: int, position: int) -> float:
    """Exact in float32, between -4 and 0: the log-probability that a script's token at `position` of its answer gets."""
    return -(((token_id * 2654435761 + position * 40503) % 4096) / 1024.0)


class ScriptedBackend:
    """Plays a script through the engine server's `Backend` interface. A list that has run out is a failed test: it raises."""

    def __init__(self, script: Script, tokenizer: Tokenizer, *, name: str = "scripted", context: int = 131072) -> None:
        self.script = script
        self.tokenizer = tokenizer
        self.name = name
        self.root = name
        self.context = context
        self.cached_tokens = 0
        self.calls: list[Call] = []
        self.cancelled = 0
        self.reloads: list[str | None] = []

    async def _reply(self, job: Job) -> Reply:
        call = Call(len(self.calls), job.mode, job.prompt_ids, self.tokenizer, job.body, job.index)
        self.calls.append(call)
        if callable(self.script):
            answer = self.script(call)
            if inspect.isawaitable(answer):
                answer = await answer
        elif call.number < len(self.script):
            answer = self.script[call.number]
        else:
            raise ApiError(500, f"the script has {len(self.script)} answers and was asked for one more.")
        if isinstance(answer, Reply):
            return answer
        return Reply(text=answer) if isinstance(answer, str) else Reply(ids=list(answer))

    async def run(self, job: Job) -> AsyncGenerator[Step, None]:
        finished = False
        try:
            reply = await self._reply(job)
            await asyncio.sleep(reply.delay_s)
            for step, number in self._steps(job.params, reply):
                if reply.error is not None and number >= reply.error_after:
                    raise _as_api_error(reply.error)
                if reply.token_delay_s:
                    await asyncio.sleep(reply.token_delay_s)
                finished = step.finish is not None
                yield step
            if reply.error is not None:
                raise _as_api_error(reply.error)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += not finished
            raise

    def _steps(self, params: Params, reply: Reply) -> Iterator[tuple[Step, int]]:
        if reply.ids is not None:
            ids = list(reply.ids)
        else:
            ids = self.tokenizer.encode(reply.text or "") + (list(self.tokenizer.eos_ids[:1]) if reply.finish == "stop" else [])
        cut = ids[: params.max_tokens]
        finish: Finish = reply.finish if len(cut) == len(ids) else "length"
        for at, token in enumerate(cut):
            logprob = fake_logprob(token, at) if reply.logprobs is None else reply.logprobs[at]
            top = _fake_top(token, 0.0 if logprob is None else logprob, params)
            last = at == len(cut) - 1
            stop = token if last and token in params.stop_token_ids and token not in self.tokenizer.eos_ids else None
            yield Step(token, logprob, top, finish if last else None, stop), at

    async def reload(self, path: str | None) -> None:
        self.reloads.append(path)

    async def reset_prefix_cache(self) -> None:
        """A script keeps no prefixes."""

    def metrics(self) -> Mapping[str, float]:
        return {"calls_total": float(len(self.calls)), "cancelled_total": float(self.cancelled)}

    async def aclose(self) -> None:
        """A script holds nothing open."""


def _fake_top(token: int, logprob: float, params: Params) -> list[tuple[int, float]]:
    """The token and one alternative, as an engine with processed log-probabilities would give them."""
    other = float("-inf") if params.top_p < 1.0 else logprob - 1.0 / max(params.temperature, 1e-3)
    return [(token, logprob), (token ^ 1, other)][: params.top_logprobs]


def _as_api_error(error: Exception) -> Exception:
    """A script may raise the gateway's own errors: over HTTP they become what a server would have sent."""
    if isinstance(error, CallError):
        headers = {"Retry-After": error.retry_after} if error.retry_after is not None else {}
        wrapped = ApiError(error.status, error.message, param=error.param, headers=headers)
        if isinstance(error, ContextOverflow):
            wrapped = overflow_error(error.prompt_tokens or 0, error.limit or 0)
        wrapped.__cause__ = error
        return wrapped
    return error


@lru_cache(maxsize=4)
def text_of(model: str | Path | None) -> tuple[Tokenizer, Template]:
    """Tokenizer and template of a model directory; without one, bytes and ChatML. Read once a process: neither has state."""
    if model is None:
        return ByteTokenizer(), JinjaTemplate(CHATML)
    return load_text(Path(model))


class ScriptedEngine(Engine):
    """An engine without a server. `tokenizer_dir` holds a real tokenizer and chat template; without it ids are bytes."""

    name = "scripted"
    takes_tokens = True
    returns_tokens = True

    def __init__(
        self,
        script: Script,
        *,
        tokenizer_dir: str | Path | None = None,
        model: str = "scripted",
        context: int = 131072,
        policy_version: str | None = None,
        tokens_per_chunk: int = 1,
    ) -> None:
        super().__init__("scripted:")
        self.tokenizer, self.template = text_of(tokenizer_dir)
        self.backend = ScriptedBackend(script, self.tokenizer, name=model, context=context)
        self.policy_version = policy_version
        self.tokens_per_chunk = tokens_per_chunk

    @property
    def calls(self) -> list[Call]:
        return self.backend.calls

    async def info(self) -> EngineInfo:
        return EngineInfo((self.backend.name,), self.backend.context, "scripted", self.backend.name)

    async def weight_version(self) -> str | None:
        return self.policy_version

    async def generate(self, request: TokensRequest) -> list[Generation]:
        job = self._job(request)
        outputs = await self._outputs(job, request.n)
        return [self._generation(job.prompt_ids, output) for output in outputs]

    async def stream(self, request: TokensRequest) -> AsyncGenerator[Chunk, None]:
        ids: list[int] = []
        logprobs: list[float] = []
        count = 0
        async with aclosing(play(self.backend, self._job(request), self.tokenizer)) as pieces:
            try:
                async for piece in pieces:
                    count += 1
                    ids.append(piece.token_id)
                    logprobs.append(float("nan") if piece.logprob is None else piece.logprob)
                    if len(ids) >= self.tokens_per_chunk or piece.finish is not None:
                        total = count if piece.finish is not None else None
                        finish = None if piece.finish is None else finish_reason(piece.finish)
                        yield Chunk(ids, logprobs, finish, piece.stop, total, 0, self.policy_version)
                        ids, logprobs = [], []
            except (ApiError, Drop) as error:
                raise _as_call_error(error) from error

    async def chat(self, request: MessagesRequest) -> list[Generation]:
        body = chat_body(request)
        tools = body.get("tools")
        try:
            messages = normalise_messages(_images_as_text(body["messages"]))
            prompt = self.template.render(messages, tools, **(body.get("chat_template_kwargs") or {}))
        except ApiError as error:
            raise _as_call_error(error) from error
        prompt_ids = self.tokenizer.encode(prompt)
        params = self._params(len(prompt_ids), request.sampling, (), request.top_logprobs)
        outputs = await self._outputs(Job(prompt_ids, params, "messages", body), request.n)
        generations = []
        for output in outputs:
            generation = self._generation(prompt_ids, output)
            parsed = parse_answer(output.text, prompt=prompt[-32:], tools=bool(tools) and request.tool_choice.mode != "none")
            calls = [
                {"id": f"call_{len(self.calls)}_{at}", "function": {"name": name, "arguments": arguments}}
                for at, (name, arguments) in enumerate(parsed.calls)
            ]
            generation.message = answer_message({"content": parsed.content, "reasoning": parsed.reasoning, "tool_calls": calls})
            if calls and generation.finish == "stop":
                generation.finish = "tool_calls"
            generations.append(generation)
        return generations

    async def tokenize(self, messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool | None = None) -> Ids | None:
        body = chat_body(MessagesRequest("", messages, tools, ToolChoice(), Sampling(), thinking=thinking))
        kwargs = body.get("chat_template_kwargs") or {}
        text = self.template.render(normalise_messages(body["messages"]), tools_body(tools), **kwargs)
        return np.asarray(self.tokenizer.encode(text), dtype=np.int32)

    def _job(self, request: TokensRequest) -> Job:
        prompt_ids: list[int] = request.prompt_ids.tolist()
        return Job(prompt_ids, self._params(len(prompt_ids), request.sampling, request.stop_token_ids, request.top_logprobs))

    def _params(self, prompt: int, sampling: Sampling, stop_ids: tuple[int, ...], top: int | None) -> Params:
        room = self.backend.context - prompt
        if room <= 0:
            raise ContextOverflow(overflow_error(prompt, self.backend.context).message, prompt_tokens=prompt, limit=self.backend.context)
        max_tokens = min(room, sampling.max_tokens if sampling.max_tokens is not None else room)
        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        return Params(max_tokens, temperature, top_p, stop=sampling.stop, stop_token_ids=stop_ids, top_logprobs=top or 0)

    async def _outputs(self, job: Job, n: int) -> list[Output]:
        try:
            return [await collect(self.backend, replace(job, index=index), self.tokenizer) for index in range(n)]
        except (ApiError, Drop) as error:
            raise _as_call_error(error) from error

    def _generation(self, prompt_ids: Sequence[int], output: Output) -> Generation:
        logprobs = [np.nan if item is None else item for item in output.logprobs]
        return Generation(
            prompt_ids=np.asarray(prompt_ids, dtype=np.int32),
            token_ids=np.asarray(output.token_ids, dtype=np.int32),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            finish=finish_reason(output.finish),
            stop=output.stop,
            prompt_tokens=len(prompt_ids),
            completion_tokens=len(output.token_ids),
            policy_version=self.policy_version,
            top=[list(top) for top in output.top] if any(output.top) else None,
        )


def _images_as_text(messages: Sequence[JsonObject]) -> list[JsonObject]:
    """The messages with `<image>` for each image, as if the model saw it: the templates here know text only."""
    seen: list[JsonObject] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = [part if "text" in part else {"type": "text", "text": "<image>"} for part in content]
        seen.append({**message, "content": content})
    return seen


def _as_call_error(error: Exception) -> Exception:
    if isinstance(error, Drop):
        return EngineUnavailable("the engine closed the connection before its answer was complete")
    if isinstance(error.__cause__, CallError):
        return error.__cause__
    if isinstance(error, ApiError) and 400 <= error.status < 500:
        return EngineRejected(error.message, status=error.status, param=error.param)
    return EngineUnavailable(str(error))


@dataclass(slots=True)
class ScriptedServer:
    """A running scripted server; `url` is its base (`http://127.0.0.1:PORT`)."""

    url: str
    backend: ScriptedBackend
    running: Running

    @property
    def calls(self) -> list[Call]:
        return self.backend.calls

    def stop(self) -> None:
        """Ends it early, as a dead engine would: open connections are cut."""
        self.running.stop(cut=True)


@contextmanager
def serve_scripted(
    script: Script,
    *,
    wire: Literal["vllm", "sglang"] = "vllm",
    tokenizer_dir: str | Path | None = None,
    model: str = "scripted",
    context: int = 131072,
    tokens_per_chunk: int = 1,
    port: int = 0,
) -> Iterator[ScriptedServer]:
    """Serves a script on 127.0.0.1 from a thread of its own (where the script runs, too) until the block ends."""
    from polar.engine.server import Server
    from polar.testing.sglang import SglangServer

    tokenizer, template = text_of(tokenizer_dir)
    backend = ScriptedBackend(script, tokenizer, name=model, context=context)
    kind: type[Server] = Server if wire == "vllm" else SglangServer
    server = kind(backend, tokenizer, template, guided="ignore", tokens_per_chunk=tokens_per_chunk)
    with serve_app(server.app, port=port) as running:
        yield ScriptedServer(running.url, backend, running)
