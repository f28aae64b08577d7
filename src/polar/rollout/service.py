"""The rollout service: its parts, started and ended together, and the loops that keep sessions moving.

The database is the only truth. The loops look at it when something has changed, and now and then in any case; what they hold in memory is
which calls are under way in this process, so that none is made twice at once. A service that is killed at any point is followed by one
that goes on from the same rows (`polar.rollout.leases.resume`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from polar.chat import JsonObject
from polar.errors import RolloutError, StoreError
from polar.folders import state_dir
from polar.rollout import cancel, leases, reading, retention, saving, schedule
from polar.rollout.api import application
from polar.rollout.auth import Guard, check_sandbox
from polar.rollout.callbacks import Callbacks
from polar.rollout.checks import is_http_url
from polar.rollout.config import RolloutConfig
from polar.rollout.database import Database, Transaction, unpacked
from polar.rollout.events import Feed
from polar.rollout.models import Heartbeat, NodeRegistration, TaskRequest
from polar.rollout.remote import Nodes, Rooms, Said
from polar.rollout.schedule import Dispatch
from polar.rollout.submit import Submission, submit

log = logging.getLogger("polar.rollout")

RETENTION_S = 600.0
REPLACED = 100
"""Earlier instances of a node that are remembered."""
CLOCK_S, AWAY_S = 1.0, 2.0
"""By how much the clock is off, and how long this process stands still, before that is taken out of what leases run for."""
TELL_AGAIN_S = 2.0
"""Between two tries to tell a node of a cancellation."""


class Service:
    """`app` needs the token, `open_app` none (for a loopback listener, where `compat_open` is on). Both serve between `start` and
    `aclose`. Raises `ConfigError` for a database that cannot be used."""

    def __init__(self, config: RolloutConfig, token: str, *, clock: Callable[[], float] = time.time) -> None:
        self.config = config
        self.database = Database(config.store or state_dir() / "rollout.db", clock=clock)
        self.database.on_commit = self._on_commit
        self.feed = Feed(self.database)
        self.remote = Nodes()
        self.callbacks = Callbacks(self.database, config.callback_retry, self._ready)
        routes = application(self)
        self.app = Guard(routes, token)
        self.open_app = Guard(routes, None)
        self.save_dir = Path(config.save_dir) if config.save_dir else state_dir() / "rollouts"
        self.closing = False
        self._nodes: dict[str, JsonObject] = {}
        self._replaced: dict[str, deque[str]] = {}
        """By node, the instances that a later one has replaced."""
        self._wakes = {name: asyncio.Event() for name in ("schedule", "cancel", "save")}
        self._loops: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._dispatching: set[tuple[str, int]] = set()
        self._telling: dict[tuple[str, int], float] = {}
        """When their nodes may be told of these again: not while they are being told."""
        self._dispatches, self._cancels = Rooms(), Rooms()
        self._saving = asyncio.Lock()

    async def start(self) -> None:
        """Takes up what an earlier process left."""
        await self.remote.start()
        for name, loop in (
            ("schedule", self._schedule),
            ("leases", self._expire),
            ("cancel", self._tell),
            ("save", self._save),
            ("callbacks", self.callbacks.run),
            ("retention", self._forget),
        ):
            self._loops.append(asyncio.create_task(self._keep(name, loop), name=f"rollout-{name}"))

    async def aclose(self) -> None:
        """Lets calls under way end, then closes the database. Nothing is lost by not calling it."""
        self.closing = True
        self.feed.close()
        for task in self._loops:
            task.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._calls:
            _, late = await asyncio.wait(self._calls, timeout=2.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self.remote.aclose()
        await self.database.close()

    # --- what the API asks for ---

    @property
    def trouble(self) -> str | None:
        return self.database.trouble

    def nodes(self) -> list[JsonObject]:
        """Nodes that this process has heard of: registered or alive since it started."""
        return list(self._nodes.values())

    async def submit(self, request: TaskRequest, raw: bytes, key: str | None = None) -> str:
        """Raises `RolloutError`."""
        if self.config.compat_open:
            check_sandbox(request.runtime, request.evaluator, await self.database.read(reading.shares_host))
        submission = Submission.of(request, raw, key)
        return await self.database.write(lambda tx: submit(tx, submission, self.config.max_open_sessions))

    async def register(self, registration: NodeRegistration) -> JsonObject:
        """Raises `RolloutError`: `node_id_taken` (409), where another process of that name came later and is alive; `invalid_request`."""
        if not is_http_url(registration.gateway_url):
            raise RolloutError("gateway_url must be an http or https URL", code="invalid_request", status=422)
        replaced = self._replaced.setdefault(registration.node_id, deque(maxlen=REPLACED))
        lease, old = self.config.lease_seconds, registration.instance in replaced
        before = await self.database.write(lambda tx: leases.register(tx, registration, lease, replaced=old))
        if before is not None and before not in replaced:
            replaced.append(before)
        return await self._heard(registration.node_id)

    async def heartbeat(self, node_id: str, beat: Heartbeat) -> JsonObject:
        """Raises `RolloutError` `unknown_node` (404): the node is to register."""
        lease, final = self.config.lease_seconds, self.config.callback_grace_seconds
        answer = await self.database.write(lambda tx: leases.heartbeat(tx, node_id, beat, lease, final))
        if answer is None:
            raise RolloutError(f"the node {node_id!r} is to register first", code="unknown_node", status=404)
        if node_id not in self._nodes:
            await self._heard(node_id)
        return answer

    async def _heard(self, node_id: str) -> JsonObject:
        found = await self.database.read(lambda connection: reading.list_nodes(connection, node_id))
        if found:
            self._nodes[node_id] = found[0]
        return found[0] if found else {"node_id": node_id}

    async def unpacked(self, body: bytes) -> bytes:
        """A stored result as JSON text; large ones are decompressed in a thread."""
        return unpacked(body) if len(body) < 1 << 16 else await asyncio.to_thread(unpacked, body)

    # --- loops ---

    def _on_commit(self, wake: set[str]) -> None:
        for name in wake:
            if name == "events":
                self.feed.wake()
            elif name == "deliver":
                self.callbacks.wake.set()
            else:
                self._wakes[name].set()

    async def _keep(self, name: str, loop: Callable[[], Awaitable[None]]) -> None:
        """A loop that fails is told and begun again: a full disk must not end the service."""
        while True:
            try:
                await loop()
            except StoreError as error:
                log.error("the rollout database fails", extra={"loop": name, "why": error.message})
            except Exception:
                log.exception("a loop of the rollout service failed", extra={"loop": name})
            await asyncio.sleep(1.0)

    async def _woken(self, name: str, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wakes[name].wait(), seconds)
        self._wakes[name].clear()

    def _spawn(self, call: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._called)

    def _called(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a call of the rollout service failed", exc_info=error)

    async def _schedule(self) -> None:
        again = await self.database.write(lambda tx: schedule.dispatching(tx, self._check_again))
        self._dispatch([one for one in again if (one.session, one.attempt) not in self._dispatching], asked=True)
        while True:
            self._dispatch(await self.database.write(self._assign))
            await self._woken("schedule", self.config.dispatch_poll_interval_seconds)

    def _assign(self, tx: Transaction) -> list[Dispatch]:
        return schedule.assign(tx, self.config.lease_seconds, self._check_again, isolated=self.config.compat_open)

    def _check_again(self, request: TaskRequest) -> None:
        """Tasks wait over restarts: one may have come before the open listener was there. Raises `RolloutError`."""
        if self.config.compat_open:
            check_sandbox(request.runtime, request.evaluator, None)

    def _dispatch(self, found: list[Dispatch], *, asked: bool = False) -> None:
        for one in found:
            self._dispatching.add((one.session, one.attempt))
            self._spawn(self._bring(one, asked=asked))

    async def _bring(self, dispatch: Dispatch, *, asked: bool) -> None:
        """Brings an attempt to its node, or back into the queue. An unclear answer is asked again until the lease ends it: the node takes
        the same attempt only once. A node that was asked before (`asked`) may have it: that it cannot be reached now, or is another process
        now, does not mean that it has not, and the attempt would live twice under one name."""
        try:
            pause_s = 0.5
            while True:
                async with self._dispatches.one(dispatch.url) as waited:
                    if waited and not await self._is_dispatching(dispatch):
                        return
                    said = await self.remote.dispatch(dispatch)
                if said.word != "unclear" and not (asked and said.word in ("unreachable", "locked_out")):
                    break
                asked = True
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, 5.0)
                if not await self._is_dispatching(dispatch):
                    return
            await self.database.write(lambda tx: self._brought(tx, dispatch, said))
        finally:
            self._dispatching.discard((dispatch.session, dispatch.attempt))

    async def _is_dispatching(self, dispatch: Dispatch) -> bool:
        return await self.database.read(lambda connection: schedule.is_dispatching(connection, dispatch))

    def _brought(self, tx: Transaction, dispatch: Dispatch, said: Said) -> None:
        if said.word == "accepted":
            if not schedule.accepted(tx, dispatch.session, dispatch.attempt):
                tx.wake.add("cancel")
        elif said.word == "refused":
            schedule.refused(tx, dispatch, said.why)
        else:
            schedule.returned(tx, dispatch.session, dispatch.attempt, dispatch.node, said.wait_s)

    async def _expire(self) -> None:
        """What has run out, ends; but not by a clock that was set or a machine that slept, nor while no heartbeat could be heard or kept:
        in a time without this loop there was no service, or its database failed."""
        await self.database.write(self._resume)
        configured = self.config.lease_seconds
        pause_s = 0.5 if configured is None else min(0.5, max(0.02, configured / 5))
        said, passed = self.database.clock(), time.monotonic()
        while True:
            await asyncio.sleep(pause_s)
            if self.trouble is not None:
                return  # to be begun again
            (said_before, passed_before), (said, passed) = (said, passed), (self.database.clock(), time.monotonic())
            away_s = passed - passed_before - pause_s
            moved_s = said - said_before - (passed - passed_before)
            if abs(moved_s) > CLOCK_S:
                log.warning("the clock was set: leases get their time anew", extra={"by_s": round(moved_s, 1)})
                await self.database.write(self._resume)
            elif away_s > AWAY_S:
                log.warning("this process stood still: leases get that time back", extra={"for_s": round(away_s, 1)})
                await self.database.write(partial(leases.prolong, by_s=away_s))
            if await self.database.read(lambda connection: leases.due(connection, configured, self.database.clock())):
                await self.database.write(lambda tx: leases.expire(tx, configured))

    def _resume(self, tx: Transaction) -> None:
        leases.resume(tx, self.config.lease_seconds, self.config.callback_grace_seconds)

    async def _tell(self) -> None:
        """Nodes are told of cancellations until they say that they have heard. Heartbeats tell them, too."""
        while True:
            now = time.monotonic()
            self._telling = {key: at for key, at in self._telling.items() if at > now}
            for one in await self.database.write(cancel.unwanted):
                if (one.session, one.attempt) not in self._telling:
                    self._telling[one.session, one.attempt] = math.inf
                    self._spawn(self._tell_one(one))
            await self._woken("cancel", TELL_AGAIN_S)

    async def _tell_one(self, unwanted: cancel.Unwanted) -> None:
        try:
            async with self._cancels.one(unwanted.url):
                heard = await self.remote.cancel(unwanted)
        finally:
            self._telling[unwanted.session, unwanted.attempt] = time.monotonic() + TELL_AGAIN_S
        if heard and (unwanted.session, unwanted.attempt) not in self._dispatching:  # else the session may reach the node after this
            await self.database.write(lambda tx: cancel.stopped(tx, unwanted.session, unwanted.attempt))

    async def _save(self) -> None:
        while True:
            while await self._save_some():
                pass
            await self._woken("save", 30.0)

    async def _save_some(self, task: int | None = None) -> bool:
        async with self._saving:
            rows = await self.database.read(lambda connection: saving.unsaved(connection, task))
            if not rows:
                return False
            paths = await asyncio.to_thread(saving.write_files, self.save_dir, rows)
            await self.database.write(lambda tx: saving.note_saved(tx, paths))
            return True

    async def _ready(self, task: int) -> None:
        """A task's files are written before its callback goes out, if the disk lets them be."""
        try:
            while await self._save_some(task):
                pass
        except OSError as error:
            log.error("results could not be written as files", extra={"folder": str(self.save_dir), "why": str(error)})

    async def _forget(self) -> None:
        while True:
            before = self.database.clock() - self.config.retention_days * 86_400
            while old := await self.database.read(lambda connection: retention.outdated(connection, before)):  # noqa: B023
                await asyncio.to_thread(saving.remove_files, [path for _, paths in old for path in paths])
                await self.database.write(lambda tx: retention.forget(tx, [task for task, _ in old], before))  # noqa: B023
            await self.database.write(lambda tx: retention.forget(tx, [], before))  # noqa: B023
            await asyncio.sleep(RETENTION_S)
