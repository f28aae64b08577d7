"""Forgetting what is old enough. A task goes whole, once it has ended and owes no callback; events go by age, but never the last one,
from which the next number is counted; a node goes that has been lost for as long (where nodes come and go, each has a name of its own)."""

from __future__ import annotations

from sqlalchemy import Connection, delete, exists, func, select

from polar.rollout.database import Transaction
from polar.rollout.tables import attempts, deliveries, events, nodes, results, sessions, submissions, tasks

BATCH = 50


def outdated(connection: Connection, before: float) -> list[tuple[int, list[str]]]:
    """Tasks that ended before that moment, and their files."""
    waiting = exists().where(deliveries.c.task == tasks.c.id, deliveries.c.state == "due")
    old = select(tasks.c.id).where(tasks.c.finished < before, ~waiting).order_by(tasks.c.finished).limit(BATCH)
    found = []
    for task in connection.execute(old).scalars().all():
        saved = select(sessions.c.saved).where(sessions.c.task == task, sessions.c.saved.is_not(None), sessions.c.saved != "")
        found.append((task, [str(path) for path in connection.execute(saved).scalars()]))
    return found


def forget(tx: Transaction, ids: list[int], before: float) -> None:
    """Removes these tasks, and events and lost nodes of before."""
    last = tx.connection.execute(select(func.max(events.c.seq))).scalar()
    if last is not None:
        tx.connection.execute(delete(events).where(events.c.time < before, events.c.seq < last))
    busy = select(attempts.c.node).where(attempts.c.state != "ended")
    tx.connection.execute(delete(nodes).where(nodes.c.state == "lost", nodes.c.last_seen < before, nodes.c.id.not_in(busy)))
    if not ids:
        return
    own = select(sessions.c.id).where(sessions.c.task.in_(ids))
    tx.connection.execute(delete(results).where(results.c.session.in_(own)))
    tx.connection.execute(delete(attempts).where(attempts.c.session.in_(own)))
    for table in (submissions, deliveries, sessions):
        tx.connection.execute(delete(table).where(table.c.task.in_(ids)))
    tx.connection.execute(delete(tasks).where(tasks.c.id.in_(ids)))
