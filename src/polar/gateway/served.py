"""A served model: its engines, its token path in both modes, and whether what it gives can be trained.

Which mode a call runs in is decided here, from what is known at start and from what the request needs; the reason is recorded.
"""

from __future__ import annotations

import asyncio
import fnmatch
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from polar import __version__
from polar.chat import ChatRequest, JsonObject
from polar.engines import registered as engine_kinds
from polar.engines.base import Engine, EngineInfo, Mode
from polar.engines.check import Report, check, check_tools
from polar.engines.http import HttpEngine
from polar.engines.pool import EnginePool
from polar.errors import ConfigError, EngineError, EngineUnavailable
from polar.gateway.config import EngineConfig
from polar.gateway.renders import PathSpec, RenderProcess
from polar.records import Completion
from polar.store.cache import Cache
from polar.tokens import fingerprint
from polar.tokens.path import TokenPath
from polar.tokens.plan import Known
from polar.tokens.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("polar.gateway")

KNOWN_BYTES = 32 << 20
"""Memory for requests whose fingerprints are known, over all sessions."""


class Served:
    """One model behind the gateway. `engines` replaces the clients that would be made from `config.urls`."""

    def __init__(self, name: str, config: EngineConfig, engines: Sequence[Engine] | None = None) -> None:
        if engines is None:
            if not config.urls:
                raise ConfigError(f"engines.{name}.urls: name at least one URL")
            kinds = engine_kinds()
            if config.kind not in kinds:
                raise ConfigError(f"engines.{name}.kind: {config.kind!r} is not known; there are {', '.join(kinds)}")
            kind = kinds[config.kind]
            if issubclass(kind, HttpEngine):
                for url in config.urls:
                    _check_url(f"engines.{name}.urls", url)
            engines = [kind(url, api_key=config.api_key, timeout_s=config.timeout_s) for url in config.urls]
        self.name = name
        self.config = config
        self.pool = EnginePool(list(engines))
        self.renders: RenderProcess | None = None
        self.path: TokenPath
        """Set by `start`."""
        self.model = config.model or ""
        self.info = EngineInfo(())
        self.mode_reason = "not started"
        self.report: Report | None = None
        self.provenance: JsonObject = {}
        self._provenance_at: dict[str, JsonObject] = {}
        self.tokenizer: Tokenizer | None = None
        self.known: Cache[tuple[str, int], Known] = Cache(KNOWN_BYTES)
        """The last request of each conversation, for `TokenPath.keys`, by session and length of its opening."""
        self._refused_tools: dict[bytes, str] = {}
        self._agreed_tools: set[bytes] = set()
        self._checking: dict[bytes, asyncio.Lock] = {}

    @property
    def context(self) -> int | None:
        return self.info.context

    async def start(self, *, checked: bool, render_process: bool = False) -> None:
        """Asks the engine what it serves, loads the tokenizer, chooses the mode and checks that all of it is true."""
        engine = self.pool.engines[0]
        self.info = await self._first_info()
        if not self.model:
            if not self.info.models:
                raise ConfigError(f"engines.{self.name}: {engine.url} names no model; set engines.{self.name}.model")
            self.model = self.info.models[0]
        elif engine.takes_tokens and self.info.models and not {self.model, self.model.rpartition(":")[0]} & set(self.info.models):
            # hosted services leave aliases out, and SGLang its adapters (MODEL:ADAPTER)
            raise ConfigError(f"engines.{self.name}.model: {engine.url} serves {', '.join(self.info.models)}, not {self.model!r} (--model)")
        self.tokenizer = self._load_tokenizer()
        self._choose_mode(engine)
        for compared in (self._agreed_tools, self._refused_tools):  # with the engine as it was
            compared.clear()
        if checked:
            await self._check()
        if render_process:
            self._start_renders()
        self.provenance = {"polar": __version__, "engine": self.config.kind, "engine_version": self.info.version, **self.path.provenance}
        self._provenance_at.clear()

    async def _first_info(self) -> EngineInfo:
        failures: list[str] = []
        absent = True
        for engine in self.pool.engines:
            try:
                return await engine.info()
            except EngineError as error:
                words = str(error)
                failures.append(words if engine.url in words else f"{engine.url}: {words}")
                absent = absent and isinstance(error, EngineUnavailable)
                self.pool.failed(engine, error)
        advice = "is it started? (none at hand: polar engine tiny-qwen3)" if absent else "is that the URL of an inference server?"
        raise ConfigError(f"engines.{self.name}: {'; '.join(failures)}; {advice}")

    def _load_tokenizer(self) -> Tokenizer | None:
        source = self.config.tokenizer or self.info.root
        if source is None or (self.config.tokenizer is None and not Path(source).exists()):
            return None
        return load_tokenizer(source)

    def _choose_mode(self, engine: Engine) -> None:
        """Sets path, mode and the reason. Raises `ConfigError` where mode `tokens` is demanded and not possible."""
        if self.config.mode == "messages":
            self._use_messages("configured")
        elif not engine.takes_tokens:
            self._no_tokens(f"engine kind {self.config.kind} takes no token ids")
        elif self.tokenizer is None:
            self._no_tokens(f"no tokenizer: set engines.{self.name}.tokenizer (--tokenizer) to a directory with tokenizer.json")
        else:
            try:
                self.path = self._make_path("tokens")
            except ConfigError as error:
                if self.config.renderer is not None:  # asked for by name: to go on without it would hide a mistake
                    raise ConfigError(f"engines.{self.name}.renderer: {error}") from error
                self._no_tokens(str(error))
            else:
                self.mode_reason = "the model has a renderer and the engine takes ids" if self.config.mode == "auto" else "configured"

    def _make_path(self, mode: Mode) -> TokenPath:
        return TokenPath(self.tokenizer, **self._path_settings(mode))

    def _path_settings(self, mode: Mode) -> dict[str, Any]:
        config = self.config
        return {
            "model": self.model,
            "renderer": config.renderer if mode == "tokens" else None,
            "mode": mode,
            "thinking_retention": config.thinking_retention,
            "bridging": config.bridging,
            "text_only": config.text_only,
            "context": self.info.context,
        }

    def _use_messages(self, why: str) -> None:
        self.path = self._make_path("messages")
        self.mode_reason = why

    def _no_tokens(self, why: str) -> None:
        if self.config.mode == "tokens":
            raise ConfigError(f"engines.{self.name}: mode `tokens` is not possible: {why}")
        self._use_messages(why)

    async def _check(self) -> None:
        engine = self.pool.pick("check")
        if self.mode == "tokens":
            self.report = await check(engine, self.path, self.model)
            if self.report.prompts_differ is None:
                return
            self._no_tokens(self.report.prompts_differ)
        self.report = await check(engine, None, self.model)

    # --- per call ----------------------------------------------------------------------------------------------

    @property
    def mode(self) -> Mode:
        return self.path.mode

    async def mode_for(self, request: ChatRequest) -> Mode:
        """The mode of this call: the path's own, unless it asks for what only the engine can do."""
        if self.mode == "messages" or request.tool_choice.mode in ("required", "named"):
            return "messages"
        if self.report is not None and request.tools and await self._tools_differ(request):
            return "messages"
        return "tokens"

    async def _tools_differ(self, request: ChatRequest) -> bool:
        """Compares renderer and engine once for each new tool set; a difference sends it to mode `messages`."""
        key = fingerprint.tools_part(request.tools)
        if key in self._agreed_tools:
            return False
        if key not in self._refused_tools:
            try:
                async with self._checking.setdefault(key, asyncio.Lock()):
                    await self._compare_tools(key, request)
            finally:
                self._checking.pop(key, None)
        return key in self._refused_tools

    async def _compare_tools(self, key: bytes, request: ChatRequest) -> None:
        if key in self._agreed_tools or key in self._refused_tools:
            return
        try:
            difference = await check_tools(self.pool.pick("check"), self.path, request.tools)
        except EngineError as error:
            log.warning("a tool set could not be compared with the engine", extra={"why": str(error)})
            return
        if difference is None:
            self._agreed_tools.add(key)
        else:
            self._refused_tools[key] = difference
            log.warning("renderer and engine differ on a tool set; it runs in mode messages", extra={"where": difference})

    def provenance_at(self, url: str) -> JsonObject:
        """What is recorded of a completion of the engine at `url`: one object for all of them, only to be read, so that the store sees at
        a glance that nothing has changed."""
        known = self._provenance_at.get(url)
        if known is None:
            known = self._provenance_at[url] = {**self.provenance, "engine_url": url}
        return known

    async def count(self, request: ChatRequest) -> int:
        """Prompt tokens of a normalised request that the engine renders: as it says, or estimated where it can't tell."""
        ids = await self.pool.pick("count").tokenize(request.messages, request.tools, thinking=request.thinking)
        return self.path.count(request) if ids is None else len(ids)

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
        return self.report.untrainable(completion.sampling)

    def health(self) -> JsonObject:
        report = self.report
        problems = ["engine was not checked"] if report is None else list(report.problems)
        if not self.config.trained:
            problems.append("engine is configured as untrained")
        return {
            "model": self.model,
            "mode": self.mode,
            "mode_reason": self.mode_reason,
            "trainable": not problems,
            "problems": problems,
            "logprobs": None if report is None else report.logprobs,
            "context": self.info.context,
            "engines": self.pool.health(),
            "refused_tool_sets": list(self._refused_tools.values()),
            "provenance": self.provenance,
        }

    def where(self) -> JsonObject:
        """For whoever changes its weights."""
        urls = [engine.url for engine in self.pool.engines]
        return {"name": self.name, "model": self.model, "kind": self.config.kind, "urls": urls, "trained": self.config.trained}

    def _start_renders(self) -> None:
        """A process for long renders, where the tokenizer can be loaded there as here; a new one if it died, or the path has changed."""
        source = self.config.tokenizer or self.info.root
        spec = PathSpec(source, tuple(self._path_settings("tokens").items())) if self.mode == "tokens" and source is not None else None
        if self.renders is not None and (self.renders.spec != spec or not self.renders.alive):
            self.renders.close(at_once=False)
            self.renders = None
        if self.renders is None and spec is not None:
            self.renders = RenderProcess(spec)

    async def aclose(self) -> None:
        if self.renders is not None:
            self.renders.close()
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


def _check_url(setting: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        good = False
    if not good:
        raise ConfigError(f"{setting}: {url!r} is not a URL of an inference server; write it as http://127.0.0.1:8000")
