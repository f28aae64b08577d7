"""Nodes come, say that they live, and go; attempts live on leases that heartbeats renew. Knows no HTTP.

An attempt whose lease has ended is lost: its session is tried again. A node that still has it (it was cut off, not dead) may go on; its
result counts if nothing newer has ended by then, and where no newer attempt has begun, the old one is the session's again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from sqlalchemy import Connection, Row, and_, delete, func, insert, or_, select, tuple_, update

from polar.errors import RolloutError
from polar.rollout.database import Transaction, packed, unpacked
from polar.rollout.ending import ACTIVE, BACKOFF_S, Ending, attempt_failed, cancel_rest
from polar.rollout.models import FINAL, Heartbeat, NodeRegistration
from polar.rollout.schedule import lease_s
from polar.rollout.tables import attempts, deliveries, nodes, sessions, tasks
from polar.trajectory.text import well_formed


def register(tx: Transaction, registration: NodeRegistration, configured_s: float | None = None, *, replaced: bool = False) -> str | None:
    """A node has started, or the service forgot it. A drained one that starts anew is in use again. Returns the instance that this one
    replaces, if it does.

    An instance lives once. One that was `replaced` and is here again is a second process of the same name: while the later one lives it
    is refused (`RolloutError` `node_id_taken`), for each of the two would take the other's sessions for lost, time and again.
    """
    row = tx.connection.execute(select(nodes).where(nodes.c.id == registration.node_id)).first()
    before: str | None = None if row is None or row.instance == registration.instance else row.instance
    if row is not None and replaced and before is not None and row.last_seen + lease_s(row.interval_s, configured_s) >= tx.now:
        message = f"another process is the node {registration.node_id!r} now; give each its own id (gateway.nodes.id)"
        raise RolloutError(message, code="node_id_taken", status=409)
    values: dict[str, Any] = {
        "url": registration.gateway_url.rstrip("/"),
        "token": registration.token,
        "instance": registration.instance,
        "max_init": registration.max_init_workers,
        "max_run": registration.max_run_workers,
        "max_postrun": registration.max_postrun_workers,
        "interval_s": registration.heartbeat_interval_seconds,
        "metrics": packed(well_formed(registration.metrics.model_dump())),
        "state": "up",
        "draining": False,
        "drained": row is not None and row.drained and row.instance == registration.instance and row.instance is not None,
        "registered": tx.now,
        "last_seen": tx.now,
        "blocked_until": 0.0,
    }
    if row is None:
        tx.connection.execute(insert(nodes).values(id=registration.node_id, **values))
    else:
        tx.connection.execute(update(nodes).where(nodes.c.id == registration.node_id).values(**values))
    tx.emit("node.registered", node_id=registration.node_id, url=values["url"], instance=registration.instance)
    tx.wake |= {"schedule", "cancel"}
    return before


def heartbeat(tx: Transaction, node_id: str, beat: Heartbeat, configured_s: float | None, final_s: float) -> dict[str, Any] | None:
    """Renews leases. The answer names attempts to `cancel`, and those of which nobody wants anything: to `forget`, and among `cancel` too,
    since the node may run them. `None`: the node has to register.

    `configured_s` is the lease's length if configured; `final_s` that of an attempt whose result the node has and could not yet deliver.
    """
    node = tx.connection.execute(select(nodes).where(nodes.c.id == node_id)).first()
    if node is None or (beat.instance is not None and node.instance is not None and beat.instance != node.instance):
        return None
    metrics = {**orjson.loads(unpacked(node.metrics)), **beat.metrics.model_dump()}
    ours = tx.connection.execute(select(attempts).where(attempts.c.node == node_id, attempts.c.state != "ended")).all()
    idle = (node.drained or beat.draining) and not ours and not beat.attempts
    values = {"last_seen": tx.now, "state": "idle" if idle else "up", "draining": beat.draining, "metrics": packed(well_formed(metrics))}
    tx.connection.execute(update(nodes).where(nodes.c.id == node_id).values(**values))
    if node.state == "lost":
        tx.emit("node.returned", node_id=node_id)
    if idle and node.state != "idle":
        tx.emit("node.drained", node_id=node_id)
    until = tx.now + lease_s(node.interval_s, configured_s)
    if beat.attempts is None:
        answer = _renew_all(tx, node, ours, until)
    else:
        answer = _renew_listed(tx, node, ours, beat.attempts, until, tx.now + final_s)
    tx.wake.add("schedule")
    return {"status": "ok", "node_id": node_id, "draining": node.drained, **answer}


def _renew_all(tx: Transaction, node: Row[Any], ours: Sequence[Row[Any]], until: float) -> dict[str, Any]:
    """A node of the reference's kind tells no attempts: what it was given since it last registered, it has."""
    for row in ours:
        if row.instance != node.instance:
            _lose(tx, row, "the node was started anew")
    mine = update(attempts).where(attempts.c.node == node.id, attempts.c.state.in_(ACTIVE), attempts.c.instance == node.instance)
    tx.connection.execute(mine.values(lease_until=until))
    return {"cancel": [f"{row.session}.{row.number}" for row in ours if row.state == "cancelling"], "forget": []}


def _renew_listed(
    tx: Transaction, node: Row[Any], ours: Sequence[Row[Any]], listed: list[str], until: float, final_until: float
) -> dict[str, Any]:
    known = {f"{row.session}.{row.number}": row for row in ours}
    names = set(listed)
    lease: list[tuple[str, int]] = []
    final: list[tuple[str, int]] = []
    unwanted: list[str] = []
    for name, row in known.items():
        if name in names:
            if row.state in ACTIVE:
                (final if row.status in FINAL else lease).append((row.session, row.number))
        elif row.instance != node.instance:
            _lose(tx, row, "the node was started anew, and does not have it any more")
        elif row.state == "cancelling" and row.created < tx.now - 2 * node.interval_s:
            tx.connection.execute(_at(row).values(state="ended", end="cancelled", ended=tx.now))
    for name in sorted(names - known.keys()):
        revived = _revive(tx, node, name, until)
        if revived is None:
            unwanted.append(name)
    for keys, lease_until in ((lease, until), (final, max(until, final_until))):
        if keys:
            held = tuple_(attempts.c.session, attempts.c.number).in_(keys)
            tx.connection.execute(
                update(attempts).where(held).values(
                    lease_until=lease_until, instance=node.instance, state="accepted", accepted=func.coalesce(attempts.c.accepted, tx.now)
                )
            )  # fmt: skip
    cancelling = [name for name, row in known.items() if name in names and row.state == "cancelling"]
    return {"cancel": sorted(cancelling + unwanted), "forget": unwanted}


def _revive(tx: Transaction, node: Row[Any], name: str, until: float) -> bool | None:
    """An attempt that this service took for lost. `None`: nobody wants it; False: another one runs, and whichever ends first counts."""
    session_id, _, number = name.rpartition(".")
    if not session_id or not number.isdecimal():
        return None
    session = tx.connection.execute(select(sessions).where(sessions.c.id == session_id)).first()
    if session is None or session.state == "done":
        return None
    row = tx.connection.execute(
        select(attempts).where(attempts.c.session == session_id, attempts.c.number == int(number), attempts.c.node == node.id)
    ).first()
    if row is None or row.end != "lost":
        return None
    if session.state != "waiting" or session.attempt != row.number + 1:
        return False
    values = {"state": "accepted", "end": None, "code": None, "ended": None, "lease_until": until, "instance": node.instance}
    tx.connection.execute(_at(row).values(**values))
    back = {"state": "running", "attempt": row.number, "failures": session.failures - 1, "node": node.id, "status": row.status}
    tx.connection.execute(update(sessions).where(sessions.c.id == session_id).values(**back))
    task = tx.connection.execute(select(tasks.c.name).where(tasks.c.id == session.task)).scalar()
    tx.emit("session.attempt_found", task, session_id, attempt=row.number, node_id=node.id)
    return True


def expire(tx: Transaction, configured_s: float | None) -> None:
    """What time has ended: leases, nodes that are silent, groups whose grace after enough usable sessions is over."""
    late = select(attempts).where(attempts.c.state.in_((*ACTIVE, "cancelling")), attempts.c.lease_until < tx.now)
    for row in tx.connection.execute(late.limit(500)).all():
        _lose(tx, row, "its node has not been heard of")
    for row in tx.connection.execute(select(nodes).where(nodes.c.state != "lost")).all():
        if row.last_seen + lease_s(row.interval_s, configured_s) < tx.now:
            tx.connection.execute(update(nodes).where(nodes.c.id == row.id).values(state="lost"))
            tx.emit("node.lost", node_id=row.id, last_seen=row.last_seen)
    stops = select(tasks).where(tasks.c.state == "running", tasks.c.stop_at <= tx.now)
    for task in tx.connection.execute(stops).all():
        cancel_rest(tx, task, "early_stop", f"the group has its {task.min_usable} usable sessions")


def due(connection: Connection, configured_s: float | None, now: float) -> bool:
    """Whether `expire` has something to do: asked often, by a reader."""
    late = select(attempts.c.session).where(attempts.c.state.in_((*ACTIVE, "cancelling")), attempts.c.lease_until < now).limit(1)
    silent = select(nodes.c.id).where(
        nodes.c.state != "lost",
        nodes.c.last_seen + (3 * nodes.c.interval_s if configured_s is None else configured_s) < now,
    )
    stops = select(tasks.c.id).where(tasks.c.state == "running", tasks.c.stop_at <= now)
    return any(connection.execute(query.limit(1)).first() is not None for query in (late, silent, stops))


def resume(tx: Transaction, configured_s: float | None, final_s: float) -> None:
    """The service was away, so that no heartbeat could come, or the clock was set: leases and nodes get their time anew, and nothing is
    waited for longer than it can be by the clock as it is now. `final_s` as in `heartbeat`."""
    for node in tx.connection.execute(select(nodes)).all():
        until = tx.now + lease_s(node.interval_s, configured_s)
        latest = max(until, tx.now + final_s)
        mine, final = update(attempts).where(attempts.c.node == node.id, attempts.c.state != "ended"), attempts.c.status.in_(FINAL)
        tx.connection.execute(mine.where(or_(attempts.c.lease_until < until, ~final)).values(lease_until=until))
        tx.connection.execute(mine.where(attempts.c.lease_until > latest).values(lease_until=latest))
        if node.state != "lost":
            tx.connection.execute(update(nodes).where(nodes.c.id == node.id).values(last_seen=tx.now, blocked_until=0.0))
    late = tx.now + BACKOFF_S[1]
    tx.connection.execute(update(sessions).where(sessions.c.state == "waiting", sessions.c.not_before > late).values(not_before=late))
    stop = update(tasks).where(tasks.c.state == "running", tasks.c.stop_at > tx.now + tasks.c.grace_s)
    tx.connection.execute(stop.values(stop_at=tx.now + tasks.c.grace_s))
    owed = update(deliveries).where(deliveries.c.state == "due")
    tx.connection.execute(owed.where(deliveries.c.created > tx.now).values(created=tx.now))
    tx.connection.execute(owed.where(deliveries.c.next_try > tx.now).values(next_try=tx.now))
    tx.wake |= {"schedule", "deliver"}


def prolong(tx: Transaction, by_s: float) -> None:
    """The service stood still for so long, so that no heartbeat could be heard: what has not been heard of since gets that time back. No
    more, or a service that stands still again and again would never take a node for lost."""
    leased = update(attempts).where(attempts.c.state != "ended")
    tx.connection.execute(leased.values(lease_until=attempts.c.lease_until + by_s))
    silent = update(nodes).where(nodes.c.state != "lost", nodes.c.last_seen <= tx.now - by_s)
    tx.connection.execute(silent.values(last_seen=nodes.c.last_seen + by_s))


def drain(tx: Transaction, node_id: str) -> bool:
    """It gets nothing more; what it has goes on. A lost one is forgotten. False: there is none of that name."""
    node = tx.connection.execute(select(nodes).where(nodes.c.id == node_id)).first()
    if node is None:
        return False
    busy = tx.connection.execute(select(func.count()).where(attempts.c.node == node_id, attempts.c.state != "ended")).scalar()
    if node.state == "lost" and not busy:
        tx.connection.execute(delete(nodes).where(nodes.c.id == node_id))
    else:
        tx.connection.execute(update(nodes).where(nodes.c.id == node_id).values(drained=True))
    tx.emit("node.draining", node_id=node_id, attempts=busy)
    return True


def _lose(tx: Transaction, row: Row[Any], why: str) -> None:
    """An attempt of which nothing will come, as far as one can know."""
    if row.state == "cancelling":
        tx.connection.execute(_at(row).values(state="ended", end="cancelled", ended=tx.now))
        return
    session = tx.connection.execute(select(sessions).where(sessions.c.id == row.session)).one()
    task = tx.connection.execute(select(tasks).where(tasks.c.id == session.task)).one()
    error = f"the attempt at node {row.node!r} was lost: {why}"
    attempt_failed(
        tx, task, session, row, "lost", Ending("ERROR", "infrastructure", "lease_lost", error, node=row.node, attempt=row.number)
    )


def _at(row: Row[Any]) -> Any:
    return update(attempts).where(and_(attempts.c.session == row.session, attempts.c.number == row.number))
