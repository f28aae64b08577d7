"""Sandboxes of a node: made, prepared and removed, for agents and for evaluators. Knows no attempt and no gateway but its address."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

from pydantic import ValidationError

from polar.chat import JsonObject
from polar.errors import ConfigError, EvaluatorError, SandboxError
from polar.rollout.node.stages import Slots
from polar.runtime import Owner, Place, Runtime, RuntimeSpec, backend_of, create
from polar.runtime.base import allowed
from polar.runtime.pool import PREPARE_LOG, Pool
from polar.runtime.prepare import prepare

log = logging.getLogger("polar.node")

STOP_S = 300.0
"""How long a sandbox may take to stop: no attempt waits for one that never does."""


class Sandboxes:
    """Makes them. `gateway` is the model API as this machine reaches it; `allow` names the backends of this node (empty: all). With a
    `pool` they come from there where that saves something: those that stand ready (`warm` > 0), or a snapshot of a prepared one."""

    def __init__(
        self,
        owner: Owner,
        *,
        gateway: tuple[str, int] | None,
        allow: Collection[str] = (),
        pool: Pool | None = None,
        warm: int = 0,
        hidden: tuple[Path, ...] = (),
    ) -> None:
        self.owner = owner
        self.gateway = gateway
        self._hidden = hidden
        self._allow = frozenset(allow)
        self._pool = pool
        self._warm = warm
        self._live: dict[str, Runtime] = {}
        self._removing: set[asyncio.Task[str | None]] = set()
        self._stopping: dict[str, asyncio.Task[None]] = {}
        self._stuck: dict[str, Runtime] = {}

    @property
    def live(self) -> int:
        """How many there are, those that stand ready in the pool not counted."""
        return len(self._live)

    @property
    def stuck(self) -> int:
        """How many could not be removed so far."""
        return len(self._stuck)

    def check(self, spec: RuntimeSpec) -> None:
        """Raises `ConfigError` for a sandbox that this node does not make."""
        if spec.import_path is None and not allowed(spec.backend, self._allow):
            raise ConfigError(f"runtime.backend: this node runs {', '.join(sorted(self._allow))}, not {spec.backend!r}")
        backend_of(spec)

    async def make(self, spec: RuntimeSpec, name: str, *, task_folder: Path | None, log_file: Path | None = None) -> Runtime:
        """A started and prepared sandbox, to be given to `remove`. Raises `SandboxError` or `ConfigError` and leaves nothing behind."""
        self.check(spec)
        if self._pool is not None and (self._warm or (spec.prepare and backend_of(spec).snapshot is not Runtime.snapshot)):
            runtime = await self._pool.take(spec, lambda: self._place(name, task_folder), task_folder=task_folder)
            self._live[runtime.place.id] = runtime
            try:
                if log_file is not None:
                    await asyncio.to_thread(_copied, runtime.place.folder / PREPARE_LOG, log_file)
            except BaseException:
                await self.remove(runtime)
                raise
            return runtime
        place = self._place(name, task_folder)
        try:
            runtime = create(spec, place)
        except BaseException:
            self.owner.remove(place.id)
            raise
        self._live[place.id] = runtime
        try:
            await runtime.start()
            await prepare(runtime, spec.prepare, task_folder=task_folder, log=log_file)
        except BaseException:
            await self.remove(runtime)
            raise
        return runtime

    def _place(self, name: str, task_folder: Path | None) -> Place:
        sandbox_id = id_of(name)
        hidden = self._hidden if task_folder is None else (*self._hidden, task_folder.absolute())
        return Place(sandbox_id, self.owner.id, self.owner.sandbox(sandbox_id), self.gateway, task_folder, hidden)

    async def remove(self, runtime: Runtime) -> str | None:
        """Stops it and removes its folder, even if the caller is cancelled meanwhile. Returns what could not be removed: that is tried
        again from time to time (`tidy`), and by the reaper of the next start, which finds it by its label."""
        task = asyncio.create_task(self._remove(runtime))
        self._removing.add(task)
        task.add_done_callback(self._removing.discard)
        return await asyncio.shield(task)

    async def _remove(self, runtime: Runtime) -> str | None:
        problem = await self._stopped(runtime)
        try:
            await asyncio.to_thread(self.owner.remove, runtime.place.id)
        except OSError as error:
            problem = problem or str(error)
        self._live.pop(runtime.place.id, None)
        self._stuck.pop(runtime.place.id, None)
        if problem is not None:
            self._stuck[runtime.place.id] = runtime
            log.warning("a sandbox could not be removed completely", extra={"sandbox": runtime.place.id, "why": problem})
        return problem

    async def _stopped(self, runtime: Runtime) -> str | None:
        """Stops it, or goes on waiting for the stop that is under way, for `STOP_S`. It is not cancelled then: what talks to a daemon
        does that to the end. Returns why it has not stopped: a backend may be anybody's, and its fault must not keep the folder, or the
        attempt's result."""
        name = runtime.place.id
        stop = self._stopping.get(name)
        if stop is None:
            stop = self._stopping[name] = asyncio.create_task(runtime.stop())
        await asyncio.wait({stop}, timeout=STOP_S)
        if not stop.done():
            return f"it has not stopped in {STOP_S:g} s"
        self._stopping.pop(name, None)  # two may wait for it
        if stop.cancelled():
            return "its stop was cancelled"
        error = stop.exception()
        return None if error is None else str(error) or type(error).__name__

    async def tidy(self) -> None:
        """Tries once more to remove what could not be removed, and ends what has stood ready for too long."""
        await asyncio.gather(*(self.remove(runtime) for runtime in list(self._stuck.values())))
        if self._pool is not None:
            await self._pool.tidy()

    async def aclose(self) -> None:
        """Removes whatever is still there."""
        await asyncio.gather(*self._removing)
        await self.tidy()
        await asyncio.gather(*(self.remove(runtime) for runtime in list(self._live.values())))
        if self._pool is not None:
            try:
                await self._pool.aclose()
            except SandboxError as error:
                log.warning("sandboxes that stood ready could not all be removed", extra={"why": str(error)})


def _copied(source: Path, target: Path) -> None:
    if source.is_file():
        shutil.copyfile(source, target)


def id_of(name: str) -> str:
    """A sandbox id that tells people whose it is, and is never given twice."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return "-".join(part for part in (slug, hashlib.sha256(name.encode()).hexdigest()[:6], secrets.token_hex(3)) if part)


def for_evaluator(spec: RuntimeSpec) -> RuntimeSpec:
    """The sandbox in which a session of `spec` is judged: its own preparation, and no network where the agent had the gateway only.
    Where an agent had the internet, its tests have it too: they install what they need."""
    update: JsonObject = {"prepare": spec.prepare if spec.eval_prepare is None else spec.eval_prepare}
    if spec.effective_network == "gateway" and not backend_of(spec).shares_host_network:
        update["network"] = "none"
    return spec.model_copy(update=update)


class FreshSandboxes:
    """One attempt's sandboxes for its evaluator. The first is made while the agent runs (`warm_up`), if `places` has one free. Each may
    take `init_s` to make, which is no time of the evaluation's."""

    def __init__(
        self,
        sandboxes: Sandboxes,
        spec: RuntimeSpec,
        name: str,
        places: Slots,
        *,
        task_folder: Path | None,
        folder: Path,
        init_s: float = 300.0,
    ) -> None:
        self._sandboxes = sandboxes
        self._spec = for_evaluator(spec)
        self._name = name
        self._places = places
        self._task_folder = task_folder
        self._folder = folder
        self._init_s = init_s
        self._made = 0
        self._warm: asyncio.Task[Runtime] | None = None
        self._holds_place = False
        self.waited_s = 0.0
        """What evaluators have waited for their sandboxes."""
        self.more_time: Callable[[float], None] = lambda seconds: None
        """Told by how much the end of the evaluation moves: `init_s` when a wait begins, and back by what was not needed of it."""

    def warm_up(self) -> None:
        if self._warm is None and self._places.try_take():
            self._holds_place = True
            self._warm = asyncio.create_task(self._make(self._spec))

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Runtime]:
        """`Evidence.fresh`: the one that is ready, else a new one. Raises `SandboxError`."""
        async with self._lent(self._spec) as runtime:
            yield runtime

    @asynccontextmanager
    async def other(self, fields: JsonObject) -> AsyncIterator[Runtime]:
        """`Evidence.other`. Raises `SandboxError`, and `EvaluatorError` for fields that make no sandbox."""
        try:
            spec = RuntimeSpec.model_validate({**self._spec.model_dump(), **fields})
        except ValidationError as error:
            raise EvaluatorError(f"the evaluator's sandbox: {error}") from error
        async with self._lent(spec) as runtime:
            yield runtime

    async def aclose(self) -> None:
        """Discards the warm one if nobody took it."""
        warm, self._warm = self._warm, None
        if warm is not None:
            warm.cancel()
            [made] = await asyncio.gather(warm, return_exceptions=True)
            if isinstance(made, Runtime):
                await self._sandboxes.remove(made)
        self._release_place()

    @asynccontextmanager
    async def _lent(self, spec: RuntimeSpec) -> AsyncIterator[Runtime]:
        began = time.monotonic()
        self.more_time(self._init_s)
        try:
            async with asyncio.timeout(self._init_s) as budget:
                runtime = await self._taken(spec)
        except TimeoutError as error:
            if not budget.expired():
                raise
            raise SandboxError(f"the evaluator's sandbox was not ready after {self._init_s:g} s (init budget)") from error
        finally:
            waited_s = time.monotonic() - began
            self.waited_s += waited_s
            self.more_time(waited_s - self._init_s)
        try:
            yield runtime
        finally:
            await self._sandboxes.remove(runtime)

    async def _taken(self, spec: RuntimeSpec) -> Runtime:
        if spec is not self._spec or self._warm is None:
            return await self._make(spec)
        warm, self._warm = self._warm, None  # two who ask at once must not get the same one
        try:
            made = await asyncio.shield(warm)
        except (SandboxError, OSError) as error:  # what failed beside a busy agent may work now
            log.info("a warm sandbox could not be made; another is tried", extra={"attempt": self._name, "why": str(error)})
            self._release_place()
            return await self._make(spec)
        except BaseException:
            self._warm = warm  # for `aclose` to discard
            raise
        self._release_place()
        return made

    async def _make(self, spec: RuntimeSpec) -> Runtime:
        self._made += 1
        log_file = self._folder / f"prepare-evaluator-{self._made}.log"
        return await self._sandboxes.make(spec, f"{self._name}-e{self._made}", task_folder=self._task_folder, log_file=log_file)

    def _release_place(self) -> None:
        if self._holds_place:
            self._holds_place = False
            self._places.give_back()
