"""A served model: its engines, its token path in both modes, and whether what it gives can be trained.

Which mode a call runs in is decided here, from what is known at start and from what the request needs; the reason is recorded.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from polar import __version__
from polar.chat import Answer, ChatRequest, JsonObject, TokenLogprob
from polar.engines import registered as engine_kinds
from polar.engines.base import Engine, EngineInfo, Generation, Mode
from polar.engines.check import Report, check, check_tools
from polar.engines.pool import EnginePool
from polar.errors import ConfigError, EngineError, NotFound
from polar.gateway.config import EngineConfig
from polar.records import Completion
from polar.tokens.path import TokenPath
from polar.tokens.plan import Plan
from polar.tokens.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("polar.gateway")

OPENAI_LOGPROB_FLOOR = -9999.0


class Served:
    """One model behind the gateway. `engines` replaces the clients that would be made from `config.urls`."""

    def __init__(self, name: str, config: EngineConfig, engines: Sequence[Engine] | None = None) -> None:
        if engines is None:
            if not config.urls:
                raise ConfigError(f"engines.{name}.urls: name at least one URL")
            kind = engine_kinds()[config.kind]
            engines = [kind(url, api_key=config.api_key, timeout_s=config.timeout_s) for url in config.urls]
        self.name = name
        self.config = config
        self.pool = EnginePool(list(engines))
        self.model = config.model or ""
        self.info = EngineInfo(())
        self.mode: Mode = "messages"
        self.mode_reason = "not started"
        self.report: Report | None = None
        self.provenance: JsonObject = {}
        self.tokenizer: Tokenizer | None = None
        self._refused_tools: dict[bytes, str] = {}
        self._agreed_tools: set[bytes] = set()
        self._checking: dict[bytes, asyncio.Lock] = {}

    @property
    def context(self) -> int | None:
        return self.info.context

    async def start(self, *, checked: bool) -> None:
        """Asks the engine what it serves, loads the tokenizer, chooses the mode and checks that all of it is true."""
        engine = self.pool.engines[0]
        self.info = await self._first_info()
        if not self.model:
            if not self.info.models:
                raise ConfigError(f"engines.{self.name}: {engine.url} names no model; set engines.{self.name}.model")
            self.model = self.info.models[0]
        self.tokenizer = self._load_tokenizer()
        renderer_problem = self._build_paths()
        wanted = self.config.mode
        if wanted == "messages":
            self.mode, self.mode_reason = "messages", "configured"
        elif renderer_problem is not None:
            self._no_tokens(renderer_problem)
        elif not engine.takes_tokens:
            self._no_tokens(f"engine kind {self.config.kind} takes no token ids")
        else:
            self.mode, self.mode_reason = (
                "tokens",
                "configured" if wanted == "tokens" else "the model has a renderer and the engine takes ids",
            )
        if checked:
            await self._check()
        self.provenance = {
            "polar": __version__,
            "engine": self.config.kind,
            "engine_version": self.info.version,
            **(self.tokens_path if self.mode == "tokens" else self.messages_path).provenance,
        }

    async def _first_info(self) -> EngineInfo:
        failures: list[str] = []
        for engine in self.pool.engines:
            try:
                return await engine.info()
            except EngineError as error:
                failures.append(str(error))
                self.pool.failed(engine, error)
        raise ConfigError(f"engines.{self.name}: no engine answers: {'; '.join(failures)}")

    def _load_tokenizer(self) -> Tokenizer | None:
        source = self.config.tokenizer or self.info.root
        if source is None or (self.config.tokenizer is None and not Path(source).exists()):
            return None
        return load_tokenizer(source)

    def _build_paths(self) -> str | None:
        """Makes both token paths; the reason why there is none for mode `tokens`, if so."""
        config = self.config
        problem: str | None = None

        def path(mode: Mode) -> TokenPath:
            return TokenPath(
                self.tokenizer,
                model=self.model,
                renderer=config.renderer if mode == "tokens" else None,
                mode=mode,
                thinking_retention=config.thinking_retention,
                bridging=config.bridging,
                text_only=config.text_only,
                context=self.info.context,
            )

        self.messages_path = path("messages")
        if self.tokenizer is None:
            problem = f"no tokenizer: set engines.{self.name}.tokenizer to a directory with tokenizer.json"
        else:
            try:
                self.tokens_path = path("tokens")
            except ConfigError as error:
                problem = str(error)
        return problem

    def _no_tokens(self, why: str) -> None:
        if self.config.mode == "tokens":
            raise ConfigError(f"engines.{self.name}: mode `tokens` is not possible: {why}")
        self.mode, self.mode_reason = "messages", why

    async def _check(self) -> None:
        engine = self.pool.pick("check", avoid=())
        if self.mode == "tokens":
            self.report = await check(engine, self.tokens_path, self.model)
            if self.report.prompts_differ is None:
                return
            self._no_tokens(self.report.prompts_differ)
        self.report = await check(engine, None, self.model)

    # --- per call ----------------------------------------------------------------------------------------------

    async def path_for(self, request: ChatRequest) -> TokenPath:
        """The token path for this request: mode `tokens` unless it needs what only the engine can do."""
        if self.mode == "messages" or (request.has_images and not self.config.text_only):
            return self.messages_path
        if request.tool_choice.mode in ("required", "named"):
            return self.messages_path
        if self.report is not None and request.tools and await self._tools_differ(request):
            return self.messages_path
        return self.tokens_path

    def path_of(self, plan: Plan) -> TokenPath:
        return self.tokens_path if plan.mode == "tokens" else self.messages_path

    async def _tools_differ(self, request: ChatRequest) -> bool:
        """Compares renderer and engine once for each new tool set; a difference sends it to mode `messages`."""
        key = self.tokens_path.tools_hash(request.tools)
        if key in self._agreed_tools:
            return False
        async with self._checking.setdefault(key, asyncio.Lock()):
            if key not in self._agreed_tools and key not in self._refused_tools:
                try:
                    difference = await check_tools(self.pool.pick("check", avoid=()), self.tokens_path, request.tools)
                except EngineError as error:
                    log.warning("a tool set could not be compared with the engine", extra={"why": str(error)})
                    return False
                if difference is None:
                    self._agreed_tools.add(key)
                else:
                    self._refused_tools[key] = difference
                    log.warning("renderer and engine differ on a tool set; it runs in mode messages", extra={"where": difference})
        return key in self._refused_tools

    async def count(self, request: ChatRequest, secret: bytes) -> int:
        """Prompt tokens of a request, never a generation. Asks the engine where there is no tokenizer here."""
        path = self.tokens_path if self.mode == "tokens" else self.messages_path
        request = path.normalise(request, secret)
        if self.mode == "tokens":
            return path.count(request)
        ids = await self.pool.pick("count", avoid=()).tokenize(request.messages, request.tools, thinking=request.thinking)
        return path.count(request) if ids is None else len(ids)

    def untrainable(self, completion: Completion) -> str | None:
        """Why nothing of this completion can be trained; `None` if it can."""
        if not self.config.trained:
            return "engine is configured as untrained"
        if self.report is None:
            return "engine was not checked"
        if not self.report.trainable:
            return "engine check failed: " + "; ".join(self.report.problems)
        if completion.prompt_ids is None or not len(completion.prompt_ids):
            return "engine returned no prompt ids"
        if completion.sampled_ids is None:
            return "engine returned no sampled ids"
        if completion.logprobs is None or len(completion.logprobs) != len(completion.sampled_ids):
            return "engine returned no log-probabilities that line up with the sampled ids"
        if self.report.logprobs == "raw" and not _plain(completion.sampling):
            return "engine returns raw log-probabilities, which are not those of the distribution sampled from"
        return None

    def with_logprobs(self, answer: Answer, generation: Generation, request: ChatRequest) -> Answer:
        """Adds the log-probabilities that the client asked for; finite, or OpenAI's floor."""
        if request.top_logprobs is None or generation.token_ids is None or generation.logprobs is None or self.tokenizer is None:
            return answer
        stops = set(self.tokens_path.stop_token_ids) if self.mode == "tokens" else set()
        tokens: list[TokenLogprob] = []
        values = np.where(np.isfinite(generation.logprobs), generation.logprobs, OPENAI_LOGPROB_FLOOR).tolist()
        for index, (token, value) in enumerate(zip(generation.token_ids.tolist(), values, strict=True)):
            if token in stops:
                continue
            top = generation.top[index] if generation.top is not None else []
            tokens.append(
                TokenLogprob(
                    self._text(token), value, tuple((self._text(other), logprob) for other, logprob in top[: request.top_logprobs])
                )
            )
        return Answer(answer.message, answer.finish, answer.usage, answer.stop_sequence, answer.refusal, tuple(tokens))

    def _text(self, token: int | str) -> str:
        if isinstance(token, str):
            return token
        assert self.tokenizer is not None
        return self.tokenizer.decode([token])

    def health(self) -> JsonObject:
        report = self.report
        return {
            "model": self.model,
            "mode": self.mode,
            "mode_reason": self.mode_reason,
            "trainable": bool(report and report.trainable and self.config.trained),
            "problems": ["engine was not checked"] if report is None else report.problems,
            "logprobs": None if report is None else report.logprobs,
            "context": self.info.context,
            "engines": self.pool.health(),
            "refused_tool_sets": list(self._refused_tools.values()),
            "provenance": self.provenance,
        }

    async def aclose(self) -> None:
        await self.pool.aclose()


class Models:
    """All served models, and which of them a requested name means."""

    def __init__(self, engines: dict[str, Served], default: str, patterns: dict[str, str]) -> None:
        if default not in engines:
            raise ConfigError(f"default_engine: {default!r} is not one of engines ({', '.join(engines)})")
        for pattern, name in patterns.items():
            if name not in engines:
                raise ConfigError(f"models.{pattern}: {name!r} is not one of engines ({', '.join(engines)})")
        self._engines = engines
        self._default = default
        self._patterns = patterns

    def find(self, requested: str) -> Served:
        """Any name is served: by its pattern in `models:`, else by the default engine."""
        for pattern, name in self._patterns.items():
            if fnmatch.fnmatchcase(requested, pattern):
                return self._engines[name]
        return self._engines[self._default]

    @property
    def names(self) -> Sequence[str]:
        return [served.model for served in self._engines.values()]

    @property
    def all(self) -> Sequence[Served]:
        return list(self._engines.values())

    def by_name(self, name: str) -> Served:
        if name not in self._engines:
            raise NotFound(f"no engine is called {name!r}; there are {', '.join(self._engines)}")
        return self._engines[name]


def _plain(sampling: JsonObject) -> bool:
    """Whether these parameters leave the model's own distribution as it is."""
    return (
        sampling.get("temperature", 1.0) == 1.0
        and sampling.get("top_p", 1.0) == 1.0
        and sampling.get("top_k", -1) in (-1, 0)
        and not sampling.get("min_p")
        and not sampling.get("presence_penalty")
        and not sampling.get("frequency_penalty")
        and sampling.get("repetition_penalty", 1.0) == 1.0
        and not sampling.get("logit_bias")
    )
