"""How sessions and tasks end: once each, with a result, an event and the callbacks that are owed. Knows no HTTP.

Every way to end (a node's result, attempts used up, a cancellation) comes through `finish`; it is the only writer of `results` and of
the state `done`.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from sqlalchemy import Row, bindparam, insert, select, update

from polar.rollout.database import Transaction, compressed, unpacked
from polar.rollout.models import Outcome, SessionResult, SessionStatus
from polar.rollout.tables import attempts, deliveries, results, sessions, tasks
from polar.trajectory.text import well_formed

ACTIVE = ("dispatching", "accepted")
"""States of an attempt that the session waits for."""

SETTINGS = "config"
"""The error code of an attempt that failed by what its task asks for: an image or a file that is not there, a setting that cannot be."""

BACKOFF_S = (1.0, 30.0)
"""Before a session is tried again: doubles from the first to the second."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a session ended. `body` is the result as callers get it, compressed; `None`: there is none from a node, one is written."""

    status: SessionStatus
    outcome: Outcome
    error_code: str | None = None
    error: str | None = None
    reward: float | None = None
    node: str | None = None
    attempt: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    body: bytes | None = None

    @classmethod
    def of(cls, result: SessionResult, body: bytes) -> Ending:
        return cls(
            status=result.status,
            outcome=result.outcome or "infrastructure",
            error_code=result.error_code,
            error=result.error,
            reward=result.reward,
            node=result.node_id,
            attempt=result.attempt,
            turns=result.turns,
            sampled_tokens=result.sampled_tokens,
            body=body,
        )


def dumped(result: SessionResult) -> bytes:
    """The result as JSON that every reader takes. Its trajectory, which may have megabytes, is not copied on the way."""
    value = {**result.model_dump(exclude={"trajectory"}), "trajectory": result.trajectory}
    try:
        return orjson.dumps(value)
    except TypeError:
        return orjson.dumps(well_formed(value))


_TASK = select(tasks).where(tasks.c.id == bindparam("b_task"))
_DONE = (
    update(sessions)
    .where(sessions.c.id == bindparam("b_id"))
    .values(
        state="done",
        status=bindparam("b_status"),
        outcome=bindparam("b_outcome"),
        reward=bindparam("b_reward"),
        error_code=bindparam("b_code"),
        error=bindparam("b_error"),
        node=bindparam("b_node"),
        turns=bindparam("b_turns"),
        sampled_tokens=bindparam("b_tokens"),
        finish_number=bindparam("b_number"),
        finished=bindparam("b_finished"),
    )
)
_RELEASED = (
    update(attempts)
    .where(attempts.c.session.in_(bindparam("b_sessions", expanding=True)), attempts.c.state.in_(ACTIVE))
    .values(state="cancelling")
)


def finish(tx: Transaction, task: Row[Any], ended: Sequence[tuple[Row[Any], Ending]]) -> None:
    """Ends sessions of one task that are not done. The task ends with the last of them; an early stop may end the others."""
    if not ended:
        return
    before = tx.connection.execute(_TASK, {"b_task": task.id}).one()
    number = before.done
    good = sum(ending.outcome in ("graded", "policy") for _, ending in ended)
    usable = sum(ending.outcome in ("graded", "policy") and ending.reward is not None for _, ending in ended)
    rows, bodies = [], []
    for session, ending in ended:
        number += 1
        body = ending.body if ending.body is not None else compressed(dumped(_written(task, session, ending)))
        bodies.append({"session": session.id, "body": body})
        rows.append(
            {
                "b_id": session.id,
                "b_status": ending.status,
                "b_outcome": ending.outcome,
                "b_reward": ending.reward,
                "b_code": ending.error_code,
                "b_error": None if ending.error is None else ending.error.encode("utf-8", "replace"),
                "b_node": ending.node or session.node,
                "b_turns": ending.turns,
                "b_tokens": ending.sampled_tokens,
                "b_number": number,
            }
        )
        tx.emit(
            "session.finished",
            task.name,
            session.id,
            status=ending.status,
            outcome=ending.outcome,
            reward=ending.reward,
            error_code=ending.error_code,
            turns=ending.turns,
            sampled_tokens=ending.sampled_tokens,
            sample=session.sample,
            attempt=ending.attempt,
            node_id=ending.node or session.node,
        )
    tx.connection.execute(_DONE, [{**row, "b_finished": tx.now} for row in rows])
    tx.connection.execute(insert(results), bodies)
    if task.session_callbacks and task.callback_url:
        tx.connection.execute(insert(deliveries), [owed(tx, task, f"{row.id}.{end.attempt}", row.id) for row, end in ended])
        tx.wake.add("deliver")
    tx.wake.add("save")
    _release(tx, [row["b_id"] for row in rows])
    _count(tx, before, len(rows), good, usable)


def owed(tx: Transaction, task: Row[Any], delivery_id: str, session: str | None = None) -> dict[str, Any]:
    """A delivery. Its id is the same for every try, so that receivers tell a repetition."""
    return {
        "id": delivery_id,
        "task": task.id,
        "session": session,
        "url": task.callback_url,
        "state": "due",
        "tries": 0,
        "next_try": tx.now,
        "created": tx.now,
    }


def cancel_rest(tx: Transaction, task: Row[Any], code: str, why: str) -> int:
    """Ends all sessions of a task that have not ended. Returns how many."""
    query = select(sessions).where(sessions.c.task == task.id, sessions.c.state != "done").order_by(sessions.c.sample)
    return cancel(tx, task, tx.connection.execute(query).all(), code, why)


def cancel(tx: Transaction, task: Row[Any], rows: Sequence[Row[Any]], code: str, why: str) -> int:
    """Ends these sessions, none of them done, as cancelled. What their nodes still do is stopped as soon as they can be told."""
    ended = [(row, Ending("ERROR", "cancelled", code, why, attempt=row.attempt, turns=row.turns)) for row in rows]
    finish(tx, task, ended)
    return len(ended)


def attempt_failed(
    tx: Transaction, task: Row[Any], session: Row[Any], attempt: Row[Any], end: str, failure: Ending, *, hopeless: bool = False
) -> None:
    """The session's current attempt failed by infrastructure: another one, on another node if there is one, or the session's end.

    By its task's settings (`SETTINGS`) it would fail again everywhere, and so would the rest of its group: it ends, and with it those that
    wait. But where a session of the task has done well, it is this node that is set up differently: then others are tried. `hopeless`: no
    other attempt may do better, for another reason.
    """
    error = (failure.error or "").encode("utf-8", "replace")
    tx.connection.execute(
        update(attempts)
        .where(attempts.c.session == session.id, attempts.c.number == attempt.number)
        .values(
            state="ended", end=end, code=failure.error_code, error=error, ended=tx.now, turns=failure.turns if end == "failed" else None
        )
    )
    failures = session.failures + 1
    whole_group = failure.error_code == SETTINGS and not task.good
    final = failures >= task.max_attempts or whole_group or hopeless
    tx.emit(
        "session.attempt_failed",
        task.name,
        session.id,
        attempt=attempt.number,
        node_id=attempt.node,
        error_code=failure.error_code,
        error=failure.error,
        turns=failure.turns if end == "failed" else None,
        retried=not final,
    )
    avoid = sorted({*orjson.loads(session.avoid), attempt.node})
    values: dict[str, Any] = {"failures": failures, "avoid": orjson.dumps(avoid).decode()}
    if not final:
        wait = min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** (failures - 1))
        values |= {"state": "waiting", "status": "REGISTERED", "attempt": session.attempt + 1, "not_before": tx.now + wait}
    tx.connection.execute(update(sessions).where(sessions.c.id == session.id).values(**values))
    if final:
        finish(tx, task, [(session, failure), *(_with_it(tx, task, session, failure) if whole_group else ())])
    tx.wake.add("schedule")


def _with_it(tx: Transaction, task: Row[Any], session: Row[Any], failure: Ending) -> list[tuple[Row[Any], Ending]]:
    """The other sessions of the group that have not begun, with the same end. Those that run find out by themselves."""
    waiting = select(sessions).where(sessions.c.task == task.id, sessions.c.state == "waiting", sessions.c.id != session.id)
    rows = tx.connection.execute(waiting.order_by(sessions.c.sample)).all()
    return [(row, replace(failure, node=None, attempt=row.attempt, turns=0, sampled_tokens=0, body=None)) for row in rows]


def _written(task: Row[Any], session: Row[Any], ending: Ending) -> SessionResult:
    """The result of a session that no node reported."""
    return SessionResult(
        session_id=session.id,
        task_id=task.name,
        status=ending.status,
        outcome=ending.outcome,
        node_id=ending.node or session.node,
        error=ending.error,
        error_code=ending.error_code,
        attempt=ending.attempt,
        sample=session.sample,
        turns=ending.turns,
        metadata=orjson.loads(unpacked(task.request)).get("metadata", {}),
        delivery_id=f"{session.id}.{ending.attempt}",
    )


def _release(tx: Transaction, ids: list[str]) -> None:
    """What still runs for these sessions is wanted no more."""
    for start in range(0, len(ids), 500):  # databases limit the parameters of a statement
        if tx.connection.execute(_RELEASED, {"b_sessions": ids[start : start + 500]}).rowcount:
            tx.wake |= {"cancel", "schedule"}


def _count(tx: Transaction, task: Row[Any], done: int, good: int, usable: int) -> None:
    """`task` as it was before; all changes go through one thread, so its counts are still those of the database."""
    values: dict[str, Any] = {"done": task.done + done, "good": task.good + good, "usable": task.usable + usable}
    stops = False
    if values["done"] >= task.total:
        values |= {"state": "completed" if values["good"] else "failed", "finished": tx.now, "stop_at": None}
        told = {"total": task.total, "good": values["good"], "usable": values["usable"]}
        tx.emit("task.finished", task.name, status=values["state"], **told)
        if task.callback_url:
            tx.connection.execute(insert(deliveries), [owed(tx, task, f"task-{uuid.uuid4().hex}")])
            tx.wake.add("deliver")
    elif task.min_usable is not None and values["usable"] >= task.min_usable and task.stop_at is None:
        values["stop_at"] = tx.now + task.grace_s
        stops = task.grace_s == 0
    tx.connection.execute(update(tasks).where(tasks.c.id == task.id).values(**values))
    if stops:
        cancel_rest(tx, task, "early_stop", f"the group has its {task.min_usable} usable sessions")
