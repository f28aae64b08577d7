"""A node's line to the rollout service: registration, heartbeats, states. The service may be down at any time, for any time.

Nothing of a running attempt depends on it: what the node has to say that must not be lost, its results, is in the outbox
(`polar.rollout.node.deliveries`). States are told once, in order, and lost where the service does not hear them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from polar.chat import JsonObject
from polar.rollout.models import Heartbeat, NodeRegistration

log = logging.getLogger("polar.node")

ANSWER_S = 15.0
STATES_KEPT = 10_000
STATES_A_POST = 500
GATHER_S = 0.1


@dataclass(frozen=True, slots=True)
class Orders:
    """What the service says to a heartbeat: attempts to end, and attempts of which it wants nothing more."""

    cancel: Sequence[str] = ()
    forget: Sequence[str] = ()


@dataclass(slots=True)
class Link:
    """`registration` and `heartbeat` are asked each time; `obey` is given the service's orders."""

    url: str
    token: str | None
    interval_s: float
    registration: Callable[[], NodeRegistration]
    heartbeat: Callable[[], Heartbeat]
    obey: Callable[[Orders], Awaitable[None]]
    registered: bool = False
    _states: deque[JsonObject] = field(default_factory=lambda: deque(maxlen=STATES_KEPT))
    _told: asyncio.Event = field(default_factory=asyncio.Event)
    _beat: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _http: aiohttp.ClientSession | None = None
    _down: bool = False

    async def start(self) -> None:
        headers = {"authorization": f"Bearer {self.token}"} if self.token else {}
        self._http = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=ANSWER_S))
        self._tasks = [asyncio.create_task(self._keep_alive(), name="heartbeats"), asyncio.create_task(self._tell(), name="states")]

    async def aclose(self) -> None:
        """Says a last time what there is to say, where the service listens."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._http is not None:
            if self.registered and not self._down:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(2.0):
                        await self._send_states()
            await self._http.close()

    def say(self, state: JsonObject) -> None:
        """A change of state, to be told soon."""
        self._states.append(state)
        self._told.set()

    def beat(self) -> None:
        """A heartbeat now, rather than at its time."""
        self._beat.set()

    async def _keep_alive(self) -> None:
        pause_s = min(1.0, self.interval_s)
        while True:
            try:
                if not self.registered:
                    self.registered = await self._register()
                if self.registered:
                    await self._one_heartbeat()
            except Exception:  # a node that falls silent loses all that it has: whatever it was, the next beat is tried
                log.exception("a heartbeat failed inside the node")
            wait_s = self.interval_s if self.registered else pause_s
            pause_s = self.interval_s if self.registered else min(self.interval_s, 2 * pause_s)
            self._beat.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._beat.wait(), wait_s)

    async def _register(self) -> bool:
        status, said = await self._post("/nodes/register", self.registration().model_dump())
        if 200 <= status < 300:
            if self._states:
                self._told.set()
            return True
        if status in (401, 403, 409, 422):
            log.error("the rollout service refuses this node", extra={"status": status, "why": said})
        return False

    async def _one_heartbeat(self) -> None:
        registration = self.registration()
        status, said = await self._post(f"/nodes/{registration.node_id}/heartbeat", self.heartbeat().model_dump())
        if status == 404:  # it has forgotten this node, or is a new one
            self.registered = await self._register()
            if self.registered:
                status, said = await self._post(f"/nodes/{registration.node_id}/heartbeat", self.heartbeat().model_dump())
        if 200 <= status < 300 and isinstance(said, dict):
            orders = Orders(tuple(said.get("cancel") or ()), tuple(said.get("forget") or ()))
            if orders.cancel or orders.forget:
                await self.obey(orders)

    async def _tell(self) -> None:
        while True:
            await self._told.wait()
            await asyncio.sleep(GATHER_S)
            self._told.clear()
            await self._send_states()

    async def _send_states(self) -> None:
        while self._states and self.registered:
            batch = [self._states.popleft() for _ in range(min(STATES_A_POST, len(self._states)))]
            await self._post("/callbacks/session_state", batch)

    async def _post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON; 0 where the service could not be reached."""
        assert self._http is not None
        try:
            async with self._http.post(self.url.rstrip("/") + path, json=body) as answer:
                try:
                    said = await answer.json(content_type=None)
                except ValueError:
                    said = (await answer.text(errors="replace"))[:300]
                self._note(answer.status < 500, f"{path}: {answer.status}")
                return answer.status, said
        except (aiohttp.ClientError, TimeoutError) as error:
            self._note(False, str(error) or type(error).__name__)
            return 0, str(error)

    def _note(self, up: bool, why: str) -> None:
        if not up and not self._down:
            log.warning("the rollout service does not answer; sessions go on", extra={"url": self.url, "why": why})
        elif up and self._down:
            log.warning("the rollout service is back", extra={"url": self.url})
        self._down = not up
