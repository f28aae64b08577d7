"""A node: runs the attempts that it is sent, beside its own gateway. Usable without any service (results then wait to be fetched).

Its memory is the books: attempts that run, results that are owed, and a short record of the last ones that have ended. What must survive
its process is in the spool. A node that starts cleans up what an earlier one left behind: sandboxes by their labels, open capture
sessions by the intake journal, undelivered results by the outbox.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import orjson

from polar.chat import JsonObject
from polar.errors import ConfigError, PolarError, RolloutError, SandboxError, StoreError
from polar.gateway.config import reachable
from polar.gateway.gateway import Gateway
from polar.rollout.config import NodeConfig, Retry
from polar.rollout.models import (
    FINAL,
    ID_PATTERN,
    Heartbeat,
    NodeMetrics,
    NodeRegistration,
    SessionDispatchRequest,
    SessionResult,
)
from polar.rollout.node.artifacts import Artifacts
from polar.rollout.node.attempt import Attempt, Equipment
from polar.rollout.node.books import Books
from polar.rollout.node.deliveries import Deliveries
from polar.rollout.node.feed import Feed
from polar.rollout.node.grading import BuildThread
from polar.rollout.node.hidden import hidden_places
from polar.rollout.node.link import Link, Orders
from polar.rollout.node.sandboxes import Sandboxes
from polar.rollout.node.spool import Accepted, Owed, Spool
from polar.rollout.node.stages import Stages
from polar.runtime import Owner, registered
from polar.runtime.base import ALIASES, allowed
from polar.runtime.pool import Pool
from polar.runtime.reaper import reap

if TYPE_CHECKING:
    from starlette.routing import Route

log = logging.getLogger("polar.node")

LAST_WORDS_S = 5.0
"""How long a node that ends tries to deliver the results of what it had to give up."""
HOUSEKEEPING_S = 600.0
DISK_RETRY_S = (0.5, 30.0)


class Node:
    """`service_url` of `None`: nobody is told anything but the `callback_url` of each dispatch."""

    def __init__(
        self,
        config: NodeConfig,
        gateway: Gateway,
        owner: Owner,
        service_url: str | None = None,
        service_token: str | None = None,
        heartbeat_s: float = 5.0,
        *,
        retry: Retry | None = None,
    ) -> None:
        if gateway.config.workers > 1:
            raise ConfigError("gateway.workers: a node's gateway is one process; start more nodes instead")
        self.config = config
        self.gateway = gateway
        self.instance = secrets.token_hex(8)
        self.draining = False
        self.feed = Feed()
        self.artifacts = Artifacts(config.artifacts_path)
        self.spool = Spool(config.work_path / "spool")
        self.stages = Stages(config)
        self._owner = owner
        self._service_url = service_url
        host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(gateway.config.host, gateway.config.host)
        pool = Pool(remove=owner.remove, warm=config.warm)
        self.sandboxes = Sandboxes(
            owner,
            gateway=(host, gateway.config.port),
            allow=config.allow,
            pool=pool,
            warm=config.warm,
            hidden=hidden_places(config, gateway.config.store_url),
        )
        self._build_thread = BuildThread()
        self._equipment = Equipment(config, gateway, self.stages, self.sandboxes, self.artifacts, self._build_thread, self._tell)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._accepting: set[str] = set()
        self._unwanted: set[str] = set()
        self._backends: list[str] = []
        self.deliveries = Deliveries(self.spool, retry or Retry(), service_url=service_url, service_token=service_token)
        self.books = Books(self.deliveries)
        self.link: Link | None = None
        if service_url is not None:
            self.link = Link(service_url, service_token, heartbeat_s, self.registration, self.heartbeat, self._obey)
        self._housekeeper: asyncio.Task[None] | None = None

    # --- its life ----------------------------------------------------------------------------------------------

    @property
    def routes(self) -> list[Route]:
        """For the gateway's control app, before its own."""
        from polar.rollout.node.routes import routes

        return routes(self)

    def mount(self) -> None:
        """Puts the node's routes on its gateway's control listener."""
        self.gateway.admin.router.routes[0:0] = self.routes

    async def start(self) -> None:
        """Cleans up what an earlier process of this node left, then takes dispatches."""
        await self._reap()
        for accepted in await asyncio.to_thread(self.spool.unsettled):
            await self._lost(accepted)
        await self._look_around()
        await self.deliveries.start()
        if self.link is not None:
            await self.link.start()
        self._housekeeper = asyncio.create_task(self._keep_house(), name="housekeeping")

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new and gives what runs `grace_s` to end by itself."""
        self.draining = True
        if self.link is not None:
            self.link.beat()
        if self._tasks:
            await asyncio.wait(list(self._tasks.values()), timeout=grace_s)

    async def aclose(self) -> None:
        """Ends what still runs (a failure of the infrastructure: it is run again), tries to deliver that, and closes."""
        self.draining = True
        for attempt in list(self.books.attempts.values()):
            attempt.shut_down()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self.sandboxes.aclose()
        if self._housekeeper is not None:
            self._housekeeper.cancel()
            await asyncio.gather(self._housekeeper, return_exceptions=True)
        await self.deliveries.aclose(LAST_WORDS_S)
        if self.link is not None:
            await self.link.aclose()
        self._build_thread.close()

    # --- dispatches --------------------------------------------------------------------------------------------

    async def dispatch(self, request: SessionDispatchRequest) -> Attempt:
        """Takes an attempt: it is journaled when this returns. Raises `RolloutError` (409 `duplicate_attempt`, 503 `node_full` or
        `node_draining`), `ConfigError` for a runtime that this node has not, `StoreError`."""
        attempt_id = request.attempt_id
        if not re.fullmatch(ID_PATTERN, request.session_id):
            raise ConfigError("session_id: 1 to 128 letters, digits and _.:- that begin with a letter or a digit")
        if attempt_id in self._accepting or self.books.knows(attempt_id):
            raise RolloutError(f"the attempt {attempt_id} is here already", code="duplicate_attempt", status=409)
        if self.draining:
            raise RolloutError("this node is shutting down", code="node_draining", status=503)
        waiting = sum(attempt.status == "REGISTERED" for attempt in self.books.attempts.values()) + len(self._accepting)
        if self.stages.full(waiting):
            raise RolloutError(f"{waiting} sessions wait here already", code="node_full", status=503)
        self.sandboxes.check(self.config.runtime_of(request.runtime))
        self._accepting.add(attempt_id)
        try:
            await asyncio.to_thread(self.spool.accept, Accepted.of(request))
            attempt = self.books.attempts[attempt_id] = Attempt(request, self._equipment)
            self._tasks[attempt_id] = asyncio.create_task(self._work(attempt), name=f"work {attempt_id}")
        finally:
            self._accepting.discard(attempt_id)
        self._tell(attempt, None)
        return attempt

    async def _work(self, attempt: Attempt) -> None:
        try:
            try:
                result = await attempt.run()
            except Exception as error:  # a fault of this program must still end as a result: a session may not hang on it
                log.exception("an attempt broke", extra={"attempt": attempt.id})
                result = _failed(Accepted.of(attempt.request), self.config.id, "internal", f"{type(error).__name__}: {error}")
            attempt.status = result.status
            await self._keep(result, attempt)
            self.books.remember(result)
            self._tell(attempt, None, result)
        finally:
            self._unwanted.discard(attempt.id)
            self.books.attempts.pop(attempt.id, None)
            self._tasks.pop(attempt.id, None)

    async def _keep(self, result: SessionResult, attempt: Attempt) -> None:
        """The session closed, the result (if anybody wants it) on disk and in delivery, its summary among the artefacts. A full disk is
        waited for, with the attempt still in the books: its lease goes on meanwhile. Where the node ends before, the intake record
        stays, so that the next start closes the session, and whoever waits hears that it was lost."""
        wait_s, longest_s = DISK_RETRY_S
        while True:
            try:
                if attempt.capture is not None:
                    await attempt.capture.close()
                if attempt.id in self._unwanted:
                    await asyncio.to_thread(self.spool.settled, attempt.id)
                    return
                owed = await asyncio.to_thread(self._write_down, result, attempt.request.callback_url)
                break
            except (StoreError, OSError) as error:
                log.error("a result cannot be kept yet", extra={"attempt": result.delivery_id, "why": str(error)})
                if self.draining:
                    return
                await asyncio.sleep(wait_s)
                wait_s = min(longest_s, 2 * wait_s)
        self.deliveries.add(owed)

    def _write_down(self, result: SessionResult, callback_url: str | None) -> Owed:
        """The result durable, then the intake record gone: one of the two is there at any time."""
        self._finish_folder(result)
        owed = self.spool.put(result, callback_url, time.time())
        self.spool.settled(owed.attempt_id)
        return owed

    def _finish_folder(self, result: SessionResult) -> None:
        folder = self.artifacts.folder(result.session_id, result.attempt)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if result.answer is not None and not (folder / "answer.txt").exists():
            (folder / "answer.txt").write_text(result.answer, errors="replace")
        summary = result.model_copy(update={"trajectory": None}).model_dump(mode="json")
        (folder / "result.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        self.artifacts.scrub(folder)

    async def _lost(self, accepted: Accepted) -> None:
        """An attempt that an earlier process had when it died. Its key ends; with a service, that sees the loss by itself."""
        record = await self.gateway.store.session(accepted.attempt_id)
        if record is not None and record.closed is None:
            await self.gateway.close_session(record)
        log.warning("an attempt was lost with the process that ran it", extra={"attempt": accepted.attempt_id})
        if (accepted.callback_url is not None or self._service_url is None) and not await asyncio.to_thread(self._is_owed, accepted):
            result = _failed(accepted, self.config.id, "node_lost", "the node died while it ran")
            await asyncio.to_thread(self._finish_folder, result)
            await asyncio.to_thread(self.spool.put, result, accepted.callback_url, time.time())
        await asyncio.to_thread(self.spool.settled, accepted.attempt_id)

    def _is_owed(self, accepted: Accepted) -> bool:
        """Whether it had ended, and only its intake record was left."""
        try:
            self.spool.body(accepted.attempt_id)
        except FileNotFoundError:
            return False
        return True

    # --- what others want to know ------------------------------------------------------------------------------

    @property
    def attempts(self) -> Collection[Attempt]:
        return self.books.attempts.values()

    def cancel(self, attempt: Attempt, why: str = "session cancelled") -> None:
        attempt.cancel(why)

    def registration(self) -> NodeRegistration:
        config = self.config
        return NodeRegistration(
            node_id=config.id,
            gateway_url=config.public_url or f"http://{reachable(config.control_host)}:{self.gateway.config.control_port}",
            max_init_workers=config.max_init_workers,
            max_run_workers=config.max_run_workers,
            max_postrun_workers=config.max_postrun_workers,
            heartbeat_interval_seconds=5.0 if self.link is None else self.link.interval_s,
            token=self.gateway.admin_token,
            instance=self.instance,
            metrics=self.metrics(),
        )

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(metrics=self.metrics(), instance=self.instance, attempts=sorted(self._of_service()), draining=self.draining)

    def metrics(self) -> NodeMetrics:
        config = self.config
        default = config.default_runtime
        ready = config.max_run_workers if config.max_ready is None else config.max_ready
        facts: JsonObject = {
            **self.stages.metrics().model_dump(),
            "backends": self._backends,
            "default_runtime": {"backend": default.backend, "network": default.effective_network},
            "capacity": self.stages.queue_limit + config.max_init_workers + ready + config.max_run_workers + config.max_postrun_workers,
            "sessions": len(self.books.attempts),
            "undelivered": len(self.deliveries.waiting),
            "sandboxes": self.sandboxes.live,
        }
        return NodeMetrics.model_validate(facts)

    def _of_service(self) -> set[str]:
        """Attempts that are the service's, running or owed: those of a dispatch with a callback of its own are somebody else's."""
        found = {one.id for one in self.books.attempts.values() if one.request.callback_url is None and one.id not in self._unwanted}
        for attempt_id in self.deliveries.waiting:
            owed = self.deliveries.get(attempt_id)
            if owed is not None and owed.callback_url is None:
                found.add(attempt_id)
        return found

    # --- inside ------------------------------------------------------------------------------------------------

    async def _obey(self, orders: Orders) -> None:
        ours = self._of_service()
        for attempt_id in ours.intersection(orders.forget):
            if attempt_id in self.books.attempts:
                self._unwanted.add(attempt_id)
                self.books.attempts[attempt_id].cancel("the rollout service does not know it any more")
            await self.deliveries.forget(attempt_id)
        for attempt_id in ours.intersection(orders.cancel):
            if attempt_id in self.books.attempts:
                self.books.attempts[attempt_id].cancel("session cancelled")

    def _tell(self, attempt: Attempt, warning: str | None, result: SessionResult | None = None) -> None:
        request = attempt.request
        event: JsonObject = {
            "session_id": request.session_id,
            "task_id": request.task_id,
            "attempt": request.attempt,
            "status": attempt.status,
            "time": attempt.changed if result is None else time.time(),
            "turns": attempt.turns if result is None else result.turns,
        }
        if warning is not None:
            event["warning"] = warning
        if result is not None:
            event["outcome"] = result.outcome
        self.feed.publish({"type": "session.warning" if warning is not None else "session.state_changed", **event})
        if self.link is not None and request.callback_url is None and event["status"] not in FINAL:
            self.link.say(event)

    async def _reap(self) -> None:
        """Removes what dead owners left. What resists is no reason not to work; it is tried again."""
        try:
            left = await reap(self._owner.root)
        except SandboxError as error:
            log.error("what an earlier process left could not be removed completely", extra={"why": str(error)})
            return
        if left:
            log.warning("what an earlier process left was removed", extra={"count": len(left)})

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_S)
            for chore in (self.sandboxes.tidy, self._reap, self._expire, self._look_around):
                try:
                    await chore()
                except Exception:  # a disk would fill up unseen: whatever it was, the next round tries again
                    log.exception("housekeeping failed inside the node")

    async def _look_around(self) -> None:
        """Which backends this machine can run: a daemon may come after the node, or go."""
        self._backends = [name for name in await _usable() if allowed(name, self.config.allow)]

    async def _expire(self) -> None:
        keep = {attempt.folder for attempt in self.books.attempts.values()}
        days, gigabytes = self.config.artifacts_days, self.config.artifacts_gb
        removed = await asyncio.to_thread(self.artifacts.expire, days=days, gigabytes=gigabytes, keep=keep)
        if removed:
            log.info("old artefacts were removed", extra={"attempts": removed})


def _failed(accepted: Accepted, node_id: str, code: str, why: str) -> SessionResult:
    """The result of an attempt of which nothing else is known."""
    return SessionResult(
        session_id=accepted.session_id,
        task_id=accepted.task_id,
        status="ERROR",
        node_id=node_id,
        error=why,
        outcome="infrastructure",
        attempt=accepted.attempt,
        sample=accepted.sample,
        error_code=code,
        delivery_id=accepted.attempt_id,
    )


async def _usable() -> Sequence[str]:
    """The backends that this machine can run, by all their names."""
    found = []
    for name, backend in registered().items():
        try:
            why = await backend.unavailable()
        except (PolarError, OSError) as error:
            why = str(error)
        if why is None:
            found += [name, *(alias for alias, proper in ALIASES.items() if proper == name)]
    return found
