"""A node's books: attempts that run, results that are owed, and a short record of the last ones that have ended. In memory only."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass

from polar.rollout.models import SessionResult, SessionStatus
from polar.rollout.node.attempt import Attempt
from polar.rollout.node.deliveries import Deliveries

REMEMBERED = 10_000
"""Ended attempts whose short record is kept."""


@dataclass(frozen=True, slots=True)
class Ended:
    """What is remembered of an attempt once its result has left the node."""

    session_id: str
    task_id: str
    attempt: int
    status: SessionStatus
    outcome: str | None
    ended: float


class Books:
    """Asked by session, with the number of an attempt or (`None`) for the latest one here."""

    def __init__(self, deliveries: Deliveries) -> None:
        self.attempts: dict[str, Attempt] = {}
        """By attempt id, from their dispatch until their result is in the outbox."""
        self._deliveries = deliveries
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    def knows(self, attempt_id: str) -> bool:
        return attempt_id in self.attempts or attempt_id in self._ended or self._deliveries.get(attempt_id) is not None

    def find(self, session_id: str, attempt: int | None = None) -> Attempt | None:
        """One that is not ended yet."""
        if attempt is not None:
            return self.attempts.get(f"{session_id}.{attempt}")
        mine = [one for one in self.attempts.values() if one.request.session_id == session_id]
        return max(mine, key=lambda one: one.request.attempt, default=None)

    def owed(self, session_id: str, attempt: int | None = None) -> str | None:
        """The id of one whose result is still here."""
        mine = [one for one in self._deliveries.waiting if one.rpartition(".")[0] == session_id]
        numbers = [number for one in mine if attempt in (None, number := int(one.rpartition(".")[2]))]
        return f"{session_id}.{max(numbers)}" if numbers else None

    def ended(self, session_id: str, attempt: int | None = None) -> Ended | None:
        """One that has ended, its result gone or not."""
        if attempt is not None:
            return self._ended.get(f"{session_id}.{attempt}")
        mine = [one for one in self._ended.values() if one.session_id == session_id]
        return max(mine, key=lambda one: one.attempt, default=None)

    def remember(self, result: SessionResult) -> None:
        attempt_id = f"{result.session_id}.{result.attempt}"
        self._ended[attempt_id] = Ended(result.session_id, result.task_id, result.attempt, result.status, result.outcome, time.time())
        while len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
