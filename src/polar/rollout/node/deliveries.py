"""Delivers what the outbox holds until it is acknowledged: at least once, with back-off, whatever is down meanwhile.

A receiver answers 200 when it has the result on its own disk, 409 or 410 when it does not want it (any more): then it is forgotten here.
Anything else, silence too, is tried again: a callback of its own until `give_up_seconds` are over, the service for ever, since a session
that waits for its result there would never end. But a result that the service itself calls wrong, `REFUSALS` times, is set aside on disk:
the session hears that its attempt failed, and why. Without a service and without a callback a result waits to be fetched or deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from polar.rollout.config import Retry
from polar.rollout.models import SessionResult
from polar.rollout.node.spool import Owed, Spool

log = logging.getLogger("polar.node")

ANSWER_S = 30.0
AT_ONCE = 8
_DONE, _UNWANTED = range(200, 300), (409, 410)
_WRONG = (400, 413, 422)
"""What the service says of a result that it will not take however often it comes."""
REFUSALS = 5


@dataclass(slots=True)
class _Due:
    owed: Owed
    at: float
    """Monotonic."""
    tries: int = 0
    refusals: int = 0
    replaced: bool = False
    """Whether the result itself was refused, and its refusal is what is delivered."""
    busy: bool = False
    given_up: bool = False


class Deliveries:
    """The outbox in motion. `forgotten` is told of each result that has left it, with whether its receiver took it."""

    def __init__(
        self,
        spool: Spool,
        retry: Retry,
        *,
        service_url: str | None = None,
        service_token: str | None = None,
        forgotten: Callable[[str, bool], None] = lambda attempt_id, taken: None,
    ) -> None:
        self._spool = spool
        self._retry = retry
        self._service = None if service_url is None else service_url.rstrip("/")
        self._token = service_token
        self._forgotten = forgotten
        self._due: dict[str, _Due] = {}
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        """Set while nothing is owed."""
        self._loop: asyncio.Task[None] | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._http: aiohttp.ClientSession | None = None

    @property
    def waiting(self) -> list[str]:
        """Attempts whose results are still here."""
        return list(self._due)

    def get(self, attempt_id: str) -> Owed | None:
        due = self._due.get(attempt_id)
        return None if due is None else due.owed

    async def start(self) -> None:
        """Takes up what an earlier process left."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S))
        for owed in await asyncio.to_thread(self._spool.owed):
            self.add(owed)
        self._loop = asyncio.create_task(self._run(), name="deliveries")

    async def aclose(self, grace_s: float = 0.0) -> None:
        """Stops, after giving what can be delivered `grace_s` to go. The rest stays on disk for the next start."""
        if any(self._target(due.owed) and not due.given_up for due in self._due.values()):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), grace_s)
        tasks = [task for task in (self._loop, *self._sending) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    def add(self, owed: Owed) -> None:
        """A new result, to be delivered at once."""
        self._due[owed.attempt_id] = _Due(owed, time.monotonic())
        self._empty.clear()
        self._wake.set()

    async def forget(self, attempt_id: str, *, taken: bool = False) -> bool:
        """Removes a result that nobody waits for any more. False if there was none."""
        if attempt_id not in self._due:
            return False
        await asyncio.to_thread(self._spool.forget, attempt_id)
        if self._due.pop(attempt_id, None) is None:
            return False
        if not self._due:
            self._empty.set()
        self._forgotten(attempt_id, taken)
        return True

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            now = time.monotonic()
            idle = [due for due in self._due.values() if not due.busy and not due.given_up and self._target(due.owed) is not None]
            idle.sort(key=lambda due: due.at)
            for due in idle:
                if due.at > now or len(self._sending) >= AT_ONCE:
                    break
                due.busy = True
                task = asyncio.create_task(self._send(due))
                self._sending.add(task)
                task.add_done_callback(self._sent)
            later = [due.at - now for due in idle if not due.busy and due.at > now]
            try:
                await asyncio.wait_for(self._wake.wait(), min(later, default=None))
            except TimeoutError:
                pass

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self._wake.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a delivery failed inside the node", exc_info=error)

    def _target(self, owed: Owed) -> str | None:
        if owed.callback_url is not None:
            return owed.callback_url
        return None if self._service is None else f"{self._service}/callbacks/session_result"

    async def _send(self, due: _Due) -> None:
        try:
            await self._try(due)
        except Exception:  # the node's own disk fails: not at once again
            self._later(due)
            raise
        finally:
            due.busy = False

    def _later(self, due: _Due) -> None:
        due.tries += 1
        wait_s = min(self._retry.longest_seconds, self._retry.first_seconds * 2 ** min(due.tries - 1, 30))
        due.at = time.monotonic() + wait_s * random.uniform(0.5, 1.0)

    async def _try(self, due: _Due) -> None:
        attempt_id = due.owed.attempt_id
        status, said = await self._post(due.owed)
        if status in _DONE or status in _UNWANTED:
            await self.forget(attempt_id, taken=status in _DONE)
            return
        due.refusals = due.refusals + 1 if status in _WRONG and due.owed.callback_url is None else 0
        if due.refusals >= REFUSALS:
            await self._refused(due, said)
            return
        self._later(due)
        if due.owed.callback_url is not None and time.time() - due.owed.since > self._retry.give_up_seconds:
            due.given_up = True
            log.error("a result is kept undelivered", extra={"attempt": attempt_id, "why": said, "tries": due.tries})
        elif due.tries in (1, 10):
            log.warning("a result could not be delivered yet", extra={"attempt": attempt_id, "why": said})

    async def _refused(self, due: _Due, said: str) -> None:
        attempt_id = due.owed.attempt_id
        if due.replaced:  # the service does not even take that: it will miss the attempt in the node's heartbeats
            log.error("the service takes no word of an attempt", extra={"attempt": attempt_id, "why": said})
            await self.forget(attempt_id)
            return
        instead = SessionResult(
            session_id=due.owed.session_id,
            task_id=due.owed.task_id,
            attempt=int(attempt_id.rpartition(".")[2]),
            status="ERROR",
            outcome="infrastructure",
            error_code="result_refused",
            error=f"the service refused the attempt's result {due.refusals} times: {said}",
            delivery_id=attempt_id,
        )
        aside = await asyncio.to_thread(self._spool.refuse, attempt_id, instead)
        log.error("a result that the service refuses is set aside", extra={"attempt": attempt_id, "why": said, "path": str(aside)})
        due.replaced, due.refusals, due.tries, due.at = True, 0, 0, time.monotonic()

    async def _post(self, owed: Owed) -> tuple[int, str]:
        """The receiver's status, 0 where it could not be reached, and what it said."""
        assert self._http is not None
        url = self._target(owed)
        assert url is not None
        headers = {"content-type": "application/json", "x-polar-delivery": owed.attempt_id}
        if self._token is not None and self._service is not None and url.startswith(self._service + "/"):
            headers["authorization"] = f"Bearer {self._token}"
        try:
            body = await asyncio.to_thread(self._spool.body, owed.attempt_id)
        except FileNotFoundError:
            return 410, "its file is gone"
        try:
            async with self._http.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                return answer.status, (await answer.text(errors="replace"))[:300]
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return 0, f"{url}: {error or type(error).__name__}"
