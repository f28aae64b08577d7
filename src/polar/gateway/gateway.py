"""The gateway as one object: store, served models, sessions, and the two ASGI apps that share them."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self
from urllib.parse import quote

from starlette.applications import Starlette

from polar.chat import JsonObject
from polar.errors import CallError, ConfigError, EngineOverloaded
from polar.gateway.admin import admin_app
from polar.gateway.api import ModelApi
from polar.gateway.calls import Context
from polar.gateway.config import GatewayConfig
from polar.gateway.gate import Gate
from polar.gateway.metrics import Metrics
from polar.gateway.served import Models, Served
from polar.gateway.sessions import Sessions, hash_key
from polar.gateway.shards import Shards, merged_health
from polar.records import Session
from polar.store import open_store
from polar.store.base import Store

log = logging.getLogger("polar.gateway")

Answers = dict[int, tuple[int, JsonObject] | CallError]
"""What the other workers said, by their number: status and body, or why nothing came."""


class Gateway:
    """Everything behind the listeners. Use as an async context manager, or call `start` and `aclose`.

    `api` is the model API's ASGI app, `admin` the control API's; `polar.gateway.serve` puts each on a listener.
    """

    def __init__(
        self,
        config: GatewayConfig,
        store: Store | None = None,
        served: dict[str, Served] | None = None,
        shards: Shards | None = None,
    ) -> None:
        if not config.engines and not served:
            raise ConfigError("engines: name at least one engine (polar gateway --engine URL)")
        self.config = config
        self.store = store if store is not None else open_store(config.store_url, cache_bytes=config.cache_mb * 1024 * 1024)
        self.gate = Gate()
        self.metrics = Metrics()
        self.admin_token = config.admin_token or "polar-admin-" + secrets.token_urlsafe(24)
        engines = served or {name: Served(name, engine) for name, engine in config.engines.items()}
        default = config.default_engine or next(iter(engines))
        self.models = Models(engines, default, config.models)
        self.default = engines[default]
        """What serves every name that no pattern matches."""
        self.sessions = Sessions(self.store, config)
        self._renderer = ThreadPoolExecutor(1, "polar-render")
        context = Context(config, self.store, self.gate, self.metrics, self._renderer)
        self.shards = shards
        self.api = ModelApi(context, self.sessions, self.models, self.public_health, shards)
        self.admin: Starlette = admin_app(self)
        self.metrics.inflight.set_function(lambda: float(self.gate.inflight))
        self.metrics.sessions.set_function(lambda: float(self.sessions.loaded))

    async def start(self, progress: Callable[[str], object] = lambda line: None) -> None:
        """Starts and checks every engine. Raises `ConfigError` where a demanded mode is not possible."""
        for served in self.models.all:
            progress(f"checking engine {served.name} at {', '.join(engine.url for engine in served.pool.engines)}")
            await served.start(checked=self.config.check, render_process=self.config.render_process)
        await self._take_up_version()

    async def _take_up_version(self) -> None:
        """The policy version that the trained engines tell, all the same: a trainer told it before this gateway, or worker, was started
        anew. Without it what is sampled until the next weight update would be of an unknown version, which is not trained."""
        trained = [served for served in self.models.all if served.config.trained]
        await asyncio.gather(*(served.pool.note_versions() for served in trained))
        told = {one["policy_version"] for served in trained for one in served.pool.health()}
        if len(told) == 1:
            self.gate.policy_version = told.pop()

    async def recheck(self) -> None:
        """Checks all engines again, after they were restarted or changed."""
        for served in self.models.all:
            await served.start(checked=self.config.check, render_process=self.config.render_process)

    async def aclose(self) -> None:
        """Refuses new calls, waits for those in flight, here and (as long again) in other workers for clients of this one, then closes
        engines and store. What is left is recorded as aborted."""
        if not await self.gate.shut(self.config.shutdown_s):
            log.warning("calls were still running at shutdown", extra={"inflight": self.gate.inflight})
            self.sessions.cancel_all(EngineOverloaded("the gateway shut down; try again", retry_after="5"))
            await asyncio.sleep(0)
        await self.sessions.settled()
        for served in self.models.all:
            await served.aclose()
        if self.shards is not None:
            await self.shards.aclose(self.config.shutdown_s)
        self._renderer.shutdown(wait=False, cancel_futures=True)
        await self.store.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def new_session(self, **options: object) -> tuple[Session, str]:
        """A session and its key, without HTTP."""
        return await self.sessions.create(**options)  # type: ignore[arg-type]

    def base_url(self, key: str) -> str:
        """The base URL that binds a harness to a session, without any provider's `/v1`."""
        root = self.config.model_url
        if self.shards is not None and self.config.public_url is None:
            root = self.shards.workers[self.shards.owner(hash_key(key))].model_url
        return f"{root.rstrip('/')}/s/{key}"

    def public_health(self) -> JsonObject:
        """What the sandboxes' listener tells: whether a call would be served and kept, and nothing else. Green only if the store
        takes writes and some engine of the default model answers."""
        self.default.pool.probe()
        return {"status": "ok" if self.store.healthy is None and self.default.pool.alive else "unhealthy"}

    async def everywhere(self, method: str, path: str, body: JsonObject | None = None) -> Answers:
        """One control call of all other workers, at once; none where there is one process."""
        if self.shards is None:
            return {}
        others = self.shards.others()
        answers = await asyncio.gather(*(self.shards.control(index, method, path, body) for index in others), return_exceptions=True)
        found: Answers = {}
        for index, answer in zip(others, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, CallError):
                raise answer
            found[index] = answer
        return found

    async def full_health(self) -> JsonObject:
        """This worker's health, and the others' beside it."""
        own = await self.health()
        return own if self.shards is None else merged_health(own, await self.everywhere("GET", "/health?own=1"))

    async def close_session(self, record: Session) -> bool:
        """Ends a session in the worker that it lives in."""
        if self.shards is not None and (owner := self.shards.owner(record.key_hash)) != self.shards.index:
            status, body = await self.shards.control(owner, "DELETE", f"/sessions/{quote(record.id, safe='')}")
            return status == 200 and bool(body["closed"])
        closed = await self.sessions.close(record.id)
        for served in self.models.all:  # last: a call of it may have picked an engine meanwhile
            served.pool.release(record.id)
        return closed

    async def health(self) -> JsonObject:
        """Green only if the store takes writes and some engine of each model answers."""
        problem = self.store.healthy
        for served in self.models.all:
            served.pool.probe()
        models = {served.name: served.health() for served in self.models.all}
        dead = [served.name for served in self.models.all if not served.pool.alive]
        return {
            "status": "ok" if problem is None and not dead else "unhealthy",
            "store": problem or "ok",
            "engines": models,
            "dead_engines": dead,
            "inference": self.inference_status(),
            "sessions_loaded": self.sessions.loaded,
            "stream": self.config.stream,
        }

    def inference_status(self) -> JsonObject:
        served = self.models.all[0]
        return {
            "paused": self.gate.paused,
            "inflight": self.gate.inflight,
            "waiting": self.gate.waiting,
            "base_url": served.pool.engines[0].url,
            "engine": served.config.kind,
            "policy_version": self.gate.policy_version,
            "engines": [one.where() for one in self.models.all],
        }

    async def metrics_text(self, *, own: bool) -> bytes:
        """Prometheus text: this worker's, or the sum of all."""
        text = self.metrics.exposition()
        return text if own or self.shards is None else await self.shards.all_metrics(text)
