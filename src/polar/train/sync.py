"""New weights into every engine, between two completions.

    pause the gateways, drain or interrupt → every engine loads `folder` → every engine says the version → gateways record it → resume

What holds, whatever happens:

* A completion is sampled by one policy only, and carries its version: no call is in an engine while that loads, and gateways record a new
  version only when every engine has it.
* Nothing is half-way. Where no engine has changed (it was not drained in time, the folder was refused) the gateways go on with the old
  version. Once an engine may have changed and not all are known to have the new weights, everything stays paused and `SyncFailed`
  (`paused`) says which engine and why: harnesses wait meanwhile, with pings, and the same call made again, after the cause is gone, puts
  all of it right.

Knows no optimiser and no rows. Several processes train: one of them syncs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from polar.engines import registered
from polar.engines.base import Engine
from polar.errors import CallError, ConfigError, PolarError, SyncFailed
from polar.train.export import Exports, export_model, untie
from polar.train.gateways import Control, EngineAt, Gateways, Paused

T = TypeVar("T")
Slow = Literal["interrupt", "fail"]

RETRY_S = 1.0

log = logging.getLogger("polar.train")


@dataclass(frozen=True, slots=True)
class SyncReport:
    """`drain_s`: until no call was in the engines; `load_s`: of the slowest engine; `paused_s`: all of it, for which harnesses
    waited. `interrupted`: calls that were ended and begin anew."""

    version: int
    folder: Path
    engines: tuple[str, ...]
    drain_s: float
    load_s: float
    paused_s: float
    interrupted: int = 0

    def values(self) -> Mapping[str, float]:
        """For the metrics."""
        return {
            "sync/drain_s": self.drain_s,
            "sync/load_s": self.load_s,
            "sync/paused_s": self.paused_s,
            "sync/interrupted": float(self.interrupted),
        }


class Syncer:
    """`await syncer(folder, version)` after each step.

    `engines`: servers, or clients of them; `None` asks the gateways each time. `on_slow`: what becomes of calls that are still in the
    engines after `drain_s`: `interrupt` ends them, and they begin anew with the new policy; `fail` leaves everything as it was and raises.
    `patience_s`: how long a gateway that cannot be reached is tried again, before anything has changed: a node that has died is soon known
    to be lost. `adapter`: the folder is a LoRA adapter, served under this name.
    """

    def __init__(
        self,
        gateways: Sequence[Gateways],
        engines: Sequence[EngineAt | Engine] | None = None,
        *,
        drain_s: float = 120.0,
        on_slow: Slow = "interrupt",
        load_timeout_s: float = 600.0,
        patience_s: float = 60.0,
        adapter: str | None = None,
    ) -> None:
        if not gateways and not engines:
            raise ConfigError("weight sync: name at least one gateway, or an engine")
        self.version: int | None = None
        """That all engines have, as far as this object has brought it."""
        self._gateways = list(gateways)
        self._given = None if engines is None else list(engines)
        self._drain_s = drain_s
        self._on_slow = on_slow
        self._load_timeout_s = load_timeout_s
        self._patience_s = patience_s
        self._adapter = adapter
        self._clients: dict[EngineAt, Engine] = {}
        self._lock = asyncio.Lock()

    async def __call__(self, folder: Path, version: int) -> SyncReport:
        """Raises `ConfigError` for a folder that holds no weights and an adapter that nobody asks for, and `SyncFailed`."""
        folder = await asyncio.to_thread(_checked, folder, self._adapter is not None)
        if self._adapter is not None:
            await self._check_asked(self._adapter)
        async with self._lock:
            engines = self._folders(await self._persist(self._places), str(folder))
            began = time.monotonic()
            interrupted = await self._pause(list(engines))
            drained = time.monotonic()
            await self._load(engines, str(version))
            loaded = time.monotonic()
            await self._open(list(engines), version)
            self.version = version
            names = tuple(engine.url for engine in engines)
            return SyncReport(version, folder, names, drained - began, loaded - drained, time.monotonic() - began, interrupted)

    async def aclose(self) -> None:
        """Closes connections, but not the clients that it was given."""
        for client in self._clients.values():
            await client.aclose()
        for gateway in self._gateways:
            await gateway.aclose()

    # --- the steps -----------------------------------------------------------------------------------------------

    async def _pause(self, engines: Sequence[Engine]) -> int:
        """Nothing is in the engines when it returns. Whatever it raises, everything runs again with the old weights."""
        try:
            return await self._persist(lambda: self._paused(engines))
        except BaseException:
            await asyncio.shield(self._let_go(engines))
            raise

    async def _paused(self, engines: Sequence[Engine]) -> int:
        interrupt = self._on_slow == "interrupt"
        answers: list[Paused] = await _all([gateway.pause(self._drain_s, interrupt=interrupt) for gateway in self._gateways])
        for gateway, answer in zip(self._gateways, answers, strict=True):
            if not answer.drained:
                raise _Unmoved(f"{gateway.name}: calls are still in the engines after {self._drain_s:g} s; the weights were not changed")
        await _all([engine.pause(abort=interrupt, timeout_s=self._drain_s) for engine in engines])
        return sum(answer.interrupted for answer in answers)

    async def _load(self, engines: Mapping[Engine, str], version: str) -> None:
        outcomes = await asyncio.gather(
            *(self._load_one(engine, folder, version) for engine, folder in engines.items()), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not failures:
            return
        for failure in failures:
            if not isinstance(failure, PolarError):
                raise failure
        causes = "; ".join(str(failure) for failure in failures)
        if len(failures) == len(outcomes) and all(isinstance(failure, ConfigError) for failure in failures):
            await self._let_go(list(engines))
            raise SyncFailed(f"no engine has taken the weights of version {version}: {causes}. The gateways go on with the old ones.")
        raise SyncFailed(
            f"not every engine has the weights of version {version}: {causes}. Gateways and engines stay paused, so that nothing is "
            "sampled from a mixture. Put that right and sync again (a trainer that is started again does so first).",
            paused=True,
        )

    async def _load_one(self, engine: Engine, folder: str, version: str) -> None:
        """An engine that reports its version has to report this one."""
        if self._adapter is None:
            await engine.update_weights(folder, version, timeout_s=self._load_timeout_s)
        else:
            await engine.load_adapter(folder, self._adapter, version, timeout_s=self._load_timeout_s)
        try:
            told = await engine.weight_version()
        except ConfigError as error:  # not for "nothing has changed", which it would mean here
            raise SyncFailed(f"{engine.url} does not say which weights it has: {error}") from error
        if told not in (None, version):
            raise SyncFailed(f"{engine.url} says that its weights are version {told}")

    async def _open(self, engines: Sequence[Engine], version: int) -> None:
        """Engines first: a gateway that resumes must find one that answers."""
        try:
            await self._persist(lambda: _all([gateway.set_version(version) for gateway in self._gateways]))
            await _all([engine.resume() for engine in engines])
            await self._persist(lambda: _all([gateway.resume() for gateway in self._gateways]))
        except (CallError, SyncFailed) as error:
            raise SyncFailed(
                f"every engine has version {version}, but {error}. What could not be reached stays paused: sync again.", paused=True
            ) from error

    async def _let_go(self, engines: Sequence[Engine]) -> None:
        """Resumes what can be: the error that led here is the one to be told, and what stays paused is logged."""

        def told(asked: Sequence[Engine | Gateways], outcomes: Sequence[object]) -> None:
            for one, outcome in zip(asked, outcomes, strict=True):
                if isinstance(outcome, Exception):
                    name = one.url if isinstance(one, Engine) else one.name
                    log.warning("it may be paused still, after a weight sync that failed", extra={"url": name, "why": str(outcome)})

        told(engines, await asyncio.gather(*(engine.resume() for engine in engines), return_exceptions=True))
        told(self._gateways, await asyncio.gather(*(gateway.resume() for gateway in self._gateways), return_exceptions=True))

    # --- whom it concerns ----------------------------------------------------------------------------------------

    async def _check_asked(self, adapter: str) -> None:
        """An adapter that no gateway asks for would change nothing of what is sampled."""
        models = await self._persist(lambda: _all([gateway.models() for gateway in self._gateways]))
        asked = {name for names in models for name in names}
        if asked and adapter not in {name.rpartition(":")[2] for name in asked}:
            others = ", ".join(sorted(asked))
            raise ConfigError(
                f"weight sync: the adapter is served as {adapter!r}, and gateways ask for {others}, which it does not change; "
                f"set the engine's model to {adapter!r} (SGLang: 'MODEL:{adapter}')"
            )

    async def _places(self) -> Sequence[EngineAt | Engine]:
        """Each engine once, though several gateways may use it."""
        if self._given is not None:
            return self._given
        found = [place for served in await _all([gateway.engines() for gateway in self._gateways]) for place in served]
        if not found:
            raise SyncFailed("no gateway has a trained engine")
        return list({_bare(place.url): place for place in found}.values())

    def _folders(self, places: Sequence[EngineAt | Engine], folder: str) -> dict[Engine, str]:
        """By engine, the folder as that one sees it."""
        return {
            place if isinstance(place, Engine) else self._client(place): folder if isinstance(place, Engine) else place.path(folder)
            for place in places
        }

    def _client(self, place: EngineAt) -> Engine:
        if place not in self._clients:
            kinds = registered()
            if place.kind not in kinds:
                raise ConfigError(f"engine {place.url}: {place.kind!r} is not known; there are {', '.join(kinds)}")
            self._clients[place] = kinds[place.kind](place.url, api_key=place.api_key)
        return self._clients[place]

    async def _persist(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Again while it fails for want of an answer, for `patience_s`."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                return await attempt()
            except _Unmoved:
                raise
            except SyncFailed:
                if time.monotonic() + RETRY_S > deadline:
                    raise
                await asyncio.sleep(RETRY_S)


class _Unmoved(SyncFailed):
    """That another try would not change."""


async def _all(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All at once, and to the end even where one fails; then the first failure is raised."""
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, CallError):
            raise SyncFailed(str(outcome)) from outcome
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _bare(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


def _checked(folder: Path, adapter: bool) -> Path:
    """The folder's absolute path. Raises `ConfigError` where an engine would find nothing in it."""
    needed = "adapter_config.json" if adapter else "config.json"
    if not folder.is_dir():
        raise ConfigError(f"weight sync: there is no folder {folder}")
    if not (folder / needed).is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(f"weight sync: {folder} holds no {'adapter' if adapter else 'model'} ({needed} and *.safetensors)")
    return folder.resolve()


__all__ = ["Control", "EngineAt", "Exports", "Gateways", "Paused", "SyncReport", "Syncer", "export_model", "untie"]
