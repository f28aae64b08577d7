"""Cancelling tasks and sessions. Durable at once: the sessions end as cancelled here, and their nodes are told until they know."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select, update

from polar.errors import RolloutError
from polar.rollout.database import Transaction
from polar.rollout.ending import cancel, cancel_rest
from polar.rollout.tables import attempts, nodes, sessions, tasks


@dataclass(frozen=True, slots=True)
class Unwanted:
    """An attempt that its node is to be told to stop."""

    session: str
    attempt: int
    url: str
    token: str | None


def cancel_task(tx: Transaction, name: str) -> tuple[str, int]:
    """Returns the task's state and how many sessions were ended. Raises `RolloutError` `not_found`."""
    task = tx.connection.execute(select(tasks).where(tasks.c.name == name, ~tasks.c.superseded)).first()
    if task is None:
        raise RolloutError(f"no task is called {name!r}", code="not_found", status=404)
    if task.state == "running":
        tx.emit("task.cancelled", name)
    ended = cancel_rest(tx, task, "cancelled", "cancelled by a caller") if task.state == "running" else 0
    state: str = tx.connection.execute(select(tasks.c.state).where(tasks.c.id == task.id)).scalar_one()
    return state, ended


def cancel_session(tx: Transaction, session_id: str) -> bool:
    """Whether it was open. Raises `RolloutError` `not_found`."""
    session = tx.connection.execute(select(sessions).where(sessions.c.id == session_id)).first()
    if session is None:
        raise RolloutError(f"no session is called {session_id!r}", code="not_found", status=404)
    if session.state == "done":
        return False
    task = tx.connection.execute(select(tasks).where(tasks.c.id == session.task)).one()
    cancel(tx, task, [session], "cancelled", "cancelled by a caller")
    return True


def unwanted(tx: Transaction) -> list[Unwanted]:
    """Attempts to be stopped, whose nodes can be reached as far as is known."""
    query = (
        select(attempts.c.session, attempts.c.number, nodes.c.url, nodes.c.token)
        .join(nodes, nodes.c.id == attempts.c.node)
        .where(attempts.c.state == "cancelling", nodes.c.state != "lost")
    )
    return [Unwanted(*row) for row in tx.connection.execute(query).all()]


def stopped(tx: Transaction, session: str, attempt: int) -> None:
    """The node has confirmed that it does not run it."""
    query = update(attempts).where(attempts.c.session == session, attempts.c.number == attempt, attempts.c.state == "cancelling")
    tx.connection.execute(query.values(state="ended", end="cancelled", ended=tx.now))
    tx.wake.add("schedule")
