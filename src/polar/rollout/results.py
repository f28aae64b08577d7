"""A node's words about its attempts: results and changes of state. Knows no HTTP beyond the status that tells a node what to do.

200: the result (or its repetition) is durable here, the node may forget it. 410: nobody wants it any more. A session takes one result:
the first that is not a failure of the infrastructure, from any attempt, unless a newer attempt has reported already.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from sqlalchemy import bindparam, select, update

from polar.rollout.database import Transaction, compressed
from polar.rollout.ending import ACTIVE, Ending, attempt_failed, dumped, finish
from polar.rollout.models import FINAL, Count, SessionResult, SessionStatus
from polar.rollout.tables import attempts, sessions, tasks

_ORDER: tuple[SessionStatus, ...] = ("REGISTERED", "INITIALIZING", "READY", "RUNNING", "POST_RUN", "BUILDING", "EVALUATING")


class StateReport(BaseModel):
    """`POST /callbacks/session_state`: where an attempt is. Best effort; some may be lost or come late."""

    model_config = ConfigDict(extra="ignore")

    session_id: str
    attempt: Count = 0
    status: SessionStatus | None = None
    time: float | None = None
    warning: str | None = None
    turns: Count | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """A result, checked and packed outside of any transaction."""

    result: SessionResult
    body: bytes

    @classmethod
    def of(cls, result: SessionResult) -> Delivered:
        """Completes what a node may leave out. Raises `ValueError` for a status that is not final."""
        complete = result.completed().model_copy(update={"delivery_id": f"{result.session_id}.{result.attempt}"})
        return cls(complete, compressed(dumped(complete)))


@dataclass(frozen=True, slots=True)
class Answer:
    """To the node: an HTTP status and a word."""

    status: int
    word: str


_SESSION = select(sessions).where(sessions.c.id == bindparam("b_session"))
_ATTEMPT = select(attempts).where(attempts.c.session == bindparam("b_session"), attempts.c.number == bindparam("b_number"))
_TASK = select(tasks).where(tasks.c.id == bindparam("b_task"))
_NEWER = (
    select(attempts.c.number)
    .where(
        attempts.c.session == bindparam("b_session"), attempts.c.number > bindparam("b_number"), attempts.c.end.in_(("failed", "result"))
    )
    .limit(1)
)
_ENDED = (
    update(attempts)
    .where(attempts.c.session == bindparam("b_session"), attempts.c.number == bindparam("b_number"))
    .values(
        state="ended",
        end=bindparam("b_end"),
        ended=bindparam("b_ended"),
        turns=bindparam("b_turns"),
        code=bindparam("b_code"),
        status=bindparam("b_status"),
    )
)


def accept(tx: Transaction, delivered: Delivered) -> Answer:
    """Takes the result, if it is wanted."""
    result = delivered.result
    here = {"b_session": result.session_id, "b_number": result.attempt}
    session = tx.connection.execute(_SESSION, {"b_session": result.session_id}).first()
    if session is None:
        return Answer(410, "unknown")
    attempt = tx.connection.execute(_ATTEMPT, here).first()
    if attempt is None:
        return Answer(410, "unknown")
    if attempt.end in ("result", "failed"):
        return Answer(200, "duplicate")
    ended = {**here, "b_ended": tx.now, "b_turns": result.turns}
    if session.state == "done":
        if attempt.state != "ended":
            tx.connection.execute(_ENDED, {**ended, "b_end": "cancelled", "b_code": attempt.code, "b_status": attempt.status})
            tx.wake.add("schedule")
        return Answer(410, "not wanted")
    task = tx.connection.execute(_TASK, {"b_task": session.task}).one()
    current = attempt.state in ACTIVE
    if result.outcome in ("infrastructure", "cancelled"):  # cancelled, and not by this service: the node ended
        if not current:
            return Answer(410, "lost")
        attempt_failed(tx, task, session, attempt, "failed", _failure(delivered))
        return Answer(200, "retried")
    if not current and tx.connection.execute(_NEWER, here).first() is not None:
        return Answer(410, "superseded")
    tx.connection.execute(_ENDED, {**ended, "b_end": "result", "b_code": result.error_code, "b_status": result.status})
    finish(tx, task, [(session, Ending.of(result, delivered.body))])
    tx.wake.add("schedule")
    return Answer(200, "accepted")


def _failure(delivered: Delivered) -> Ending:
    result = delivered.result
    if result.outcome == "infrastructure":
        return Ending.of(result, delivered.body)
    failed = result.model_copy(
        update={"status": "ERROR", "outcome": "infrastructure", "error_code": "node_stopped", "error": result.error or "the node stopped"}
    )
    return Ending.of(failed, compressed(dumped(failed)))


def moved(tx: Transaction, reports: list[StateReport]) -> None:
    """Notes where attempts are. What comes out of order does not go backwards. A list costs a few statements, however long it is."""
    known = _standing(tx, {(report.session_id, report.attempt) for report in reports})
    changed: dict[tuple[str, int], _Standing] = {}
    for report in reports:
        key = (report.session_id, report.attempt)
        at = known.get(key)
        if at is None:
            continue
        if report.warning:
            tx.emit("session.warning", at.task, report.session_id, attempt=report.attempt, warning=report.warning)
        if report.turns is not None and report.turns > (at.turns or 0):
            at.turns = report.turns
            changed[key] = at
        if report.status is None or _position(report.status) <= _position(at.status):
            continue
        at.status = report.status
        changed[key] = at
        if report.status not in FINAL:  # how a session ends, its result says
            at.shown = report.status
        tx.emit("session.state_changed", at.task, report.session_id, attempt=report.attempt, status=report.status, at=report.time or tx.now)
    if changed:
        rows = [{"b_session": key[0], "b_number": key[1], "b_status": at.status, "b_turns": at.turns} for key, at in changed.items()]
        tx.connection.execute(_MOVED, rows)
    shown = [{"b_session": key[0], "b_status": at.shown} for key, at in changed.items() if at.shown is not None]
    if shown:
        tx.connection.execute(_SHOWN, shown)


@dataclass(slots=True)
class _Standing:
    """Where an attempt is. `shown` is the status that its session gets; `None`: it keeps its own."""

    task: str
    status: str
    turns: int | None
    shown: str | None = None


_MOVED = (
    update(attempts)
    .where(attempts.c.session == bindparam("b_session"), attempts.c.number == bindparam("b_number"))
    .values(status=bindparam("b_status"), turns=bindparam("b_turns"))
)
_SHOWN = update(sessions).where(sessions.c.id == bindparam("b_session")).values(status=bindparam("b_status"))
_STANDING = (
    select(attempts.c.session, attempts.c.number, attempts.c.status, attempts.c.turns, tasks.c.name)
    .join(sessions, sessions.c.id == attempts.c.session)
    .join(tasks, tasks.c.id == sessions.c.task)
    .where(attempts.c.session.in_(bindparam("b_sessions", expanding=True)), attempts.c.state.in_(ACTIVE))
)


def _standing(tx: Transaction, keys: set[tuple[str, int]]) -> dict[tuple[str, int], _Standing]:
    """Those of these attempts that still run."""
    names = sorted({session for session, _ in keys})
    found: dict[tuple[str, int], _Standing] = {}
    for start in range(0, len(names), 500):  # databases limit the parameters of a statement
        for row in tx.connection.execute(_STANDING, {"b_sessions": names[start : start + 500]}).all():
            if (row.session, row.number) in keys:
                found[row.session, row.number] = _Standing(row.name, row.status, row.turns)
    return found


def _position(status: str) -> int:
    return _ORDER.index(status) if status in _ORDER else len(_ORDER)
