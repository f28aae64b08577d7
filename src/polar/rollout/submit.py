"""A task comes in: checked, made durable with all of its sessions, in the queue. Knows no HTTP.

The queue's order is: priority; then rank; then order of submission. A task's sessions take part in ranks of `QUANTUM`: small groups
pass whole, first come first served, while a task of thousands lets others of its priority in after each quantum. A new task begins at
the rank that the queue has reached, so nobody waits for more than a quantum of each task that was there before.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, func, insert, select, update

from polar.errors import RolloutError
from polar.rollout.database import Transaction, packed
from polar.rollout.models import TaskRequest
from polar.rollout.tables import sessions, submissions, tasks

QUANTUM = 16
"""Sessions that a task gets before others of its priority come."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A checked request, ready to be written. `body_hash` is of the body as it came."""

    request: TaskRequest
    packed: bytes
    body_hash: bytes
    key: str | None = None

    @classmethod
    def of(cls, request: TaskRequest, raw: bytes, key: str | None = None) -> Submission:
        return cls(request, packed(request.model_dump(mode="json")), hashlib.blake2b(raw, digest_size=16).digest(), key)


def submit(tx: Transaction, submission: Submission, max_open: int) -> str:
    """Writes the task, unless this very submission was written before. Returns its name. Raises `RolloutError`: `idempotency_key_reused`
    (409), `task_running` (409), `too_many_sessions` (429)."""
    request = submission.request
    if submission.key is not None:
        earlier = tx.connection.execute(select(submissions).where(submissions.c.key == submission.key)).first()
        if earlier is not None:
            return _again(tx, earlier, submission)
    same = tx.connection.execute(select(tasks.c.id, tasks.c.state).where(tasks.c.name == request.task_id, ~tasks.c.superseded)).first()
    if same is not None and same.state == "running":
        raise RolloutError(f"a task called {request.task_id!r} is running", code="task_running", status=409)
    running = tx.connection.execute(select(func.sum(tasks.c.total - tasks.c.done)).where(tasks.c.state == "running")).scalar() or 0
    if running + request.num_samples > max_open:
        raise RolloutError(
            f"{running} sessions are open, and {request.num_samples} more would pass rollout.max_open_sessions ({max_open}); "
            "submit again once some have ended",
            code="too_many_sessions",
            status=429,
        )
    if same is not None:
        tx.connection.execute(update(tasks).where(tasks.c.id == same.id).values(superseded=True))
    task = _insert_task(tx, submission)
    _insert_sessions(tx, task, request)
    if submission.key is not None:
        row = {"key": submission.key, "body_hash": submission.body_hash, "task": task, "created": tx.now}
        tx.connection.execute(insert(submissions), [row])
    tx.emit("task.submitted", request.task_id, total=request.num_samples, priority=request.priority, harness=harness_of(request))
    tx.wake.add("schedule")
    return request.task_id


def harness_of(request: TaskRequest) -> str:
    return request.agent.harness or request.agent.import_path or "shell"


def _backend(request: TaskRequest) -> str | None:
    """What a node has to have for it; `None`: any node will do, or says no."""
    runtime = request.runtime
    return runtime.backend if runtime is not None and runtime.names_backend and runtime.import_path is None else None


def _again(tx: Transaction, earlier: Row[Any], submission: Submission) -> str:
    if earlier.body_hash != submission.body_hash:
        raise RolloutError(
            f"the Idempotency-Key {submission.key!r} came with another body before", code="idempotency_key_reused", status=409
        )
    name: str = tx.connection.execute(select(tasks.c.name).where(tasks.c.id == earlier.task)).scalar_one()
    return name


def _insert_task(tx: Transaction, submission: Submission) -> int:
    request = submission.request
    early = request.early_stop
    written = tx.connection.execute(
        insert(tasks).values(
            name=request.task_id,
            superseded=False,
            state="running",
            request=submission.packed,
            harness=harness_of(request),
            max_attempts=request.max_attempts,
            callback_url=request.callback_url,
            session_callbacks=request.session_callbacks,
            min_usable=early.min_usable if early else None,
            grace_s=early.grace_seconds if early else None,
            total=request.num_samples,
            done=0,
            good=0,
            usable=0,
            created=tx.now,
        )
    )
    task: int = written.inserted_primary_key[0]  # type: ignore[index]
    return task


def _insert_sessions(tx: Transaction, task: int, request: TaskRequest) -> None:
    queue = (sessions.c.state == "waiting", sessions.c.urgency == -request.priority)
    first = tx.connection.execute(select(sessions.c.rank).where(*queue).order_by(sessions.c.rank).limit(1)).scalar() or 0
    tx.connection.execute(
        insert(sessions),
        [
            {
                "id": uuid.uuid4().hex,
                "task": task,
                "sample": sample,
                "state": "waiting",
                "status": "REGISTERED",
                "urgency": -request.priority,
                "rank": first + sample // QUANTUM,
                "place": task * 4096 + sample,
                "backend": _backend(request),
                "not_before": 0.0,
                "attempt": 0,
                "failures": 0,
                "avoid": "[]",
                "turns": 0,
                "sampled_tokens": 0,
                "created": tx.now,
            }
            for sample in range(request.num_samples)
        ],
    )
