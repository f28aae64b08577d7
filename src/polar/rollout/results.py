"""A node's words about its attempts: results and changes of state. Knows no HTTP beyond the status that tells a node what to do.

200: the result (or its repetition) is durable here, the node may forget it. 410: nobody wants it any more. A session takes one result:
the first that is not a failure of the infrastructure, from any attempt, unless a newer attempt has reported already.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict
from sqlalchemy import select, update

from polar.rollout.database import Transaction, compressed
from polar.rollout.ending import ACTIVE, Ending, attempt_failed, dumped, finish
from polar.rollout.models import FINAL, Outcome, SessionResult, SessionStatus
from polar.rollout.tables import attempts, sessions, tasks

_ORDER: tuple[SessionStatus, ...] = ("REGISTERED", "INITIALIZING", "READY", "RUNNING", "POST_RUN", "BUILDING", "EVALUATING")
_OUTCOMES: dict[str, Outcome] = {"COMPLETED": "graded", "TIMEOUT": "policy", "ERROR": "infrastructure"}


class StateReport(BaseModel):
    """`POST /callbacks/session_state`: where an attempt is. Best effort; some may be lost or come late."""

    model_config = ConfigDict(extra="ignore")

    session_id: str
    attempt: int = 0
    status: SessionStatus | None = None
    time: float | None = None
    warning: str | None = None
    turns: int | None = None


@dataclass(frozen=True, slots=True)
class Delivered:
    """A result, checked and packed outside of any transaction."""

    result: SessionResult
    body: bytes

    @classmethod
    def of(cls, result: SessionResult) -> Delivered:
        """Completes what a node may leave out. Raises `ValueError` for a status that is not final."""
        if result.status not in FINAL:
            raise ValueError(f"status: {result.status} is not how a session ends; that are {', '.join(sorted(FINAL))}")
        outcome = result.outcome or _OUTCOMES[result.status]
        reward = result.reward if outcome in ("graded", "policy") else None  # an infrastructure failure is never a zero
        complete = result.model_copy(update={"outcome": outcome, "reward": reward, "delivery_id": f"{result.session_id}.{result.attempt}"})
        return cls(complete, compressed(dumped(complete)))


@dataclass(frozen=True, slots=True)
class Answer:
    """To the node: an HTTP status and a word."""

    status: int
    word: str


def accept(tx: Transaction, delivered: Delivered) -> Answer:
    """Takes the result, if it is wanted."""
    result = delivered.result
    session = tx.connection.execute(select(sessions).where(sessions.c.id == result.session_id)).first()
    if session is None:
        return Answer(410, "unknown")
    here = (attempts.c.session == session.id, attempts.c.number == result.attempt)
    attempt = tx.connection.execute(select(attempts).where(*here)).first()
    if attempt is None:
        return Answer(410, "unknown")
    if attempt.end in ("result", "failed"):
        return Answer(200, "duplicate")
    if session.state == "done":
        if attempt.state != "ended":
            tx.connection.execute(update(attempts).where(*here).values(state="ended", end="cancelled", ended=tx.now, turns=result.turns))
            tx.wake.add("schedule")
        return Answer(410, "not wanted")
    task = tx.connection.execute(select(tasks).where(tasks.c.id == session.task)).one()
    current = attempt.state in ACTIVE
    if result.outcome in ("infrastructure", "cancelled"):  # cancelled, and not by this service: the node ended
        if not current:
            return Answer(410, "lost")
        attempt_failed(tx, task, session, attempt, "failed", _failure(delivered))
        return Answer(200, "retried")
    newer = select(attempts.c.number).where(
        attempts.c.session == session.id, attempts.c.number > attempt.number, attempts.c.end.in_(("failed", "result"))
    )
    if not current and tx.connection.execute(newer.limit(1)).first() is not None:
        return Answer(410, "superseded")
    ended = {"state": "ended", "end": "result", "ended": tx.now, "turns": result.turns, "code": result.error_code}
    tx.connection.execute(update(attempts).where(*here).values(**ended, status=result.status))
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
    """Notes where attempts are. What comes out of order does not go backwards."""
    for report in reports:
        row = tx.connection.execute(
            select(attempts.c.status, attempts.c.state, attempts.c.turns, tasks.c.name)
            .join(sessions, sessions.c.id == attempts.c.session)
            .join(tasks, tasks.c.id == sessions.c.task)
            .where(attempts.c.session == report.session_id, attempts.c.number == report.attempt)
        ).first()
        if row is None or row.state not in ACTIVE:
            continue
        here = (attempts.c.session == report.session_id, attempts.c.number == report.attempt)
        if report.warning:
            tx.emit("session.warning", row.name, report.session_id, attempt=report.attempt, warning=report.warning)
        if report.turns is not None and report.turns > (row.turns or 0):
            tx.connection.execute(update(attempts).where(*here).values(turns=report.turns))
        if report.status is None or _position(report.status) <= _position(row.status):
            continue
        tx.connection.execute(update(attempts).where(*here).values(status=report.status))
        if report.status not in FINAL:  # how a session ends, its result says
            tx.connection.execute(update(sessions).where(sessions.c.id == report.session_id).values(status=report.status))
        tx.emit(
            "session.state_changed", row.name, report.session_id, attempt=report.attempt, status=report.status, at=report.time or tx.now
        )


def _position(status: str) -> int:
    return _ORDER.index(status) if status in _ORDER else len(_ORDER)
