"""Which waiting session goes to which node. Knows no HTTP: an attempt is written as `dispatching` before its node is asked, so a crash
in between loses nothing; the node refuses the second of two equal attempts.

A node's load is what this database has given it, not what its last heartbeat said, which is seconds old. Nodes with free run slots
come first; one that failed the session is avoided while another could take it, for at most `AVOID_S`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson
from pydantic import ValidationError
from sqlalchemy import Connection, Row, bindparam, false, func, insert, or_, select, update

from polar.chat import JsonObject
from polar.errors import RolloutError
from polar.rollout.database import Transaction, unpacked
from polar.rollout.ending import Ending, attempt_failed, finish
from polar.rollout.models import SessionDispatchRequest, TaskRequest
from polar.rollout.tables import attempts, nodes, sessions, tasks

Check = Callable[[TaskRequest], None]
"""Raises `RolloutError` for a task that must not run (any more)."""


def accept_all(request: TaskRequest) -> None:
    """No task is refused."""


AVOID_S = 30.0
BATCH = 256
"""Sessions assigned in one transaction at most."""


@dataclass(slots=True)
class Candidate:
    """A node as the choice sees it."""

    id: str
    url: str
    token: str | None
    instance: str | None
    run_slots: int
    capacity: int
    backends: frozenset[str] | None
    load: int = 0
    lease_s: float = 15.0
    open: bool = True
    """False: it exists and could run such sessions, but takes none now."""
    default_isolated: bool = False
    """Whether its default sandbox has a network of its own, as far as it says."""
    takes_default: bool = True
    """Whether it gets sessions that name no backend."""

    def runs(self, backend: str | None) -> bool:
        if backend is None:
            return self.takes_default
        return self.backends is None or backend in self.backends

    @property
    def free(self) -> int:
        return self.capacity - self.load if self.open else 0

    @property
    def order(self) -> tuple[int, float, str]:
        """Least first: the node with most free run slots, then the one that is least full."""
        return (min(0, self.load - self.run_slots), self.load / max(1, self.capacity), self.id)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An attempt to be brought to its node."""

    session: str
    attempt: int
    node: str
    url: str
    token: str | None
    body: bytes


def lease_s(interval_s: float, configured_s: float | None) -> float:
    """How long an attempt outlives its node's last heartbeat."""
    return configured_s if configured_s is not None else 3 * interval_s


def candidate(row: Row[Any], load: int, now: float, configured_s: float | None) -> Candidate:
    """`capacity`: sessions in init and post-run workers, in run and ready for it, or less if the node says so. More would lie in the node's
    own queue, out of reach of other nodes and of what is more urgent."""
    metrics = orjson.loads(unpacked(row.metrics))
    backends = metrics.get("backends")
    told, most = metrics.get("capacity"), row.max_init + 2 * row.max_run + row.max_postrun
    return Candidate(
        id=row.id,
        url=row.url,
        token=row.token,
        instance=row.instance,
        run_slots=row.max_run,
        capacity=min(most, told) if isinstance(told, int) and told > 0 else most,
        backends=frozenset(map(str, backends)) if isinstance(backends, list) and backends else None,
        load=load,
        lease_s=lease_s(row.interval_s, configured_s),
        open=row.blocked_until <= now and metrics.get("postrun_queue_depth", 0) < 2 * row.max_postrun,
        default_isolated=why_shared(row.id, metrics) is None,
    )


def why_shared(node_id: str, metrics: JsonObject) -> str | None:
    """Why the sandboxes that this node makes where a task names none could reach a loopback listener, if they could."""
    default = metrics.get("default_runtime")
    if not isinstance(default, dict):
        return f"node {node_id!r} does not say what its default runtime is; name one in the task"
    if default.get("backend", "local") == "local" or default.get("network") == "host":
        return f"the default runtime of node {node_id!r} shares the machine's network; name another in the task"
    return None


def choose(candidates: Sequence[Candidate], backend: str | None, avoid: frozenset[str], waited_s: float) -> Candidate | None:
    """The node for a session, or `None` where it has to wait."""
    able = [one for one in candidates if one.runs(backend)]
    fresh = [one for one in able if one.id not in avoid]
    pool = fresh if fresh and (waited_s < AVOID_S or any(one.free > 0 for one in fresh)) else able
    return min((one for one in pool if one.free > 0), key=lambda one: one.order, default=None)


def candidates(tx: Transaction, configured_s: float | None) -> list[Candidate]:
    """All nodes that are there and not being drained."""
    query = select(nodes).where(nodes.c.state == "up", ~nodes.c.drained, ~nodes.c.draining)
    rows = tx.connection.execute(query).all()
    if not rows:
        return []
    counted = select(attempts.c.node, func.count()).where(attempts.c.state.in_(("dispatching", "accepted", "cancelling")))
    loads = {row[0]: int(row[1]) for row in tx.connection.execute(counted.group_by(attempts.c.node))}
    return [candidate(row, loads.get(row.id, 0), tx.now, configured_s) for row in rows]


def assign(tx: Transaction, configured_s: float | None, check: Check = accept_all, *, isolated: bool = False) -> list[Dispatch]:
    """Gives waiting sessions to nodes, as many as fit (and `BATCH` at most). Tasks that `check` refuses end. With `isolated`, sessions
    that name no backend go to nodes only whose default sandbox does not share the machine's network."""
    found = candidates(tx, configured_s)
    if isolated:
        for one in found:
            one.takes_default = one.default_isolated
    free = [one for one in found if one.free > 0]
    room = sum(one.free for one in free)
    if not room:
        return []
    query = select(sessions).where(sessions.c.state == "waiting", sessions.c.not_before <= tx.now)
    if all(one.backends is not None for one in free):  # sessions that nobody with room can run don't hold up the others
        able = sorted({backend for one in free for backend in one.backends or ()})
        default = sessions.c.backend.is_(None) if any(one.takes_default for one in free) else false()
        query = query.where(or_(default, sessions.c.backend.in_(able)))
    elif not any(one.takes_default for one in free):
        query = query.where(sessions.c.backend.is_not(None))
    query = query.order_by(sessions.c.urgency, sessions.c.rank, sessions.c.place).limit(min(room, BATCH) + 32)
    chosen: list[tuple[Row[Any], Candidate]] = []
    for session in tx.connection.execute(query).all():
        node = choose(found, session.backend, frozenset(orjson.loads(session.avoid)), tx.now - max(session.not_before, session.created))
        if node is not None and len(chosen) < BATCH:
            node.load += 1
            chosen.append((session, node))
    names = _requests(tx, sorted({session.task for session, _ in chosen}), check)
    return _write(tx, [(session, node) for session, node in chosen if session.task in names], names)


def _write(tx: Transaction, chosen: list[tuple[Row[Any], Candidate]], names: dict[int, TaskRequest]) -> list[Dispatch]:
    if not chosen:
        return []
    rows = [
        {
            "session": session.id,
            "number": session.attempt,
            "node": node.id,
            "instance": node.instance,
            "state": "dispatching",
            "status": "REGISTERED",
            "lease_until": tx.now + node.lease_s,
            "created": tx.now,
        }
        for session, node in chosen
    ]
    tx.connection.execute(insert(attempts), rows)
    values = {"state": "running", "node": bindparam("b_node"), "started": func.coalesce(sessions.c.started, tx.now)}
    running = update(sessions).where(sessions.c.id == bindparam("b_id")).values(**values)
    tx.connection.execute(running, [{"b_id": row["session"], "b_node": row["node"]} for row in rows])
    for session, node in chosen:
        request = names[session.task]
        tx.emit("session.assigned", request.task_id, session.id, node_id=node.id, attempt=session.attempt, sample=session.sample)
    if len(chosen) == BATCH:
        tx.wake.add("schedule")  # there may be more
    return [Dispatch(s.id, s.attempt, n.id, n.url, n.token, dispatch_body(names[s.task], s)) for s, n in chosen]


def dispatching(tx: Transaction, check: Check = accept_all) -> list[Dispatch]:
    """Attempts that were decided by a service that is no more: their nodes are asked (again)."""
    query = (
        select(attempts.c.number, sessions, nodes.c.id.label("node_id"), nodes.c.url, nodes.c.token)
        .join(sessions, sessions.c.id == attempts.c.session)
        .join(nodes, nodes.c.id == attempts.c.node)
        .where(attempts.c.state == "dispatching")
    )
    rows = tx.connection.execute(query).all()
    requests = _requests(tx, sorted({row.task for row in rows}), check)
    return [Dispatch(r.id, r.number, r.node_id, r.url, r.token, dispatch_body(requests[r.task], r)) for r in rows if r.task in requests]


def dispatch_body(request: TaskRequest, session: Row[Any]) -> bytes:
    """What the node gets. The agent's time does not run while its session waits for a node."""
    fields = set(SessionDispatchRequest.model_fields) & set(TaskRequest.model_fields) - {"callback_url"}
    return SessionDispatchRequest(
        session_id=session.id,
        remaining_timeout_seconds=request.timeout_seconds,
        attempt=session.attempt,
        sample=session.sample,
        **{name: getattr(request, name) for name in fields},
    ).model_dump_json().encode()  # fmt: skip


def _requests(tx: Transaction, ids: list[int], check: Check) -> dict[int, TaskRequest]:
    """These tasks' requests. One that cannot be read (another version wrote it) or is refused ends its own task, and holds up no other."""
    if not ids:
        return {}
    found: dict[int, TaskRequest] = {}
    for row in tx.connection.execute(select(tasks).where(tasks.c.id.in_(ids))).all():
        try:
            request = TaskRequest.model_validate_json(unpacked(row.request))
            check(request)
            found[row.id] = request
        except ValidationError as error:
            _end(tx, row, "task_unreadable", f"the task as it was kept cannot be read: {error.errors(include_url=False)[:3]}")
        except RolloutError as error:
            _end(tx, row, error.code, error.message)
    return found


def _end(tx: Transaction, task: Row[Any], code: str, why: str) -> None:
    rows = tx.connection.execute(select(sessions).where(sessions.c.task == task.id, sessions.c.state != "done")).all()
    ending = Ending("ERROR", "infrastructure", code, why)
    finish(tx, task, [(row, replace(ending, attempt=row.attempt, turns=row.turns)) for row in rows])


_HERE = (attempts.c.session == bindparam("b_session"), attempts.c.number == bindparam("b_number"))
_STATE = select(attempts.c.state).where(*_HERE)
_TAKEN = update(attempts).where(*_HERE, attempts.c.state == "dispatching").values(state="accepted", accepted=bindparam("b_now"))


def accepted(tx: Transaction, session: str, attempt: int) -> bool:
    """The node has it. False: it is not wanted any more, and the node has to be told."""
    here = {"b_session": session, "b_number": attempt}
    if tx.connection.execute(_TAKEN, {**here, "b_now": tx.now}).rowcount:
        return True
    state = tx.connection.execute(_STATE, here).scalar()
    return state not in ("cancelling", "ended", None)


def is_dispatching(connection: Connection, dispatch: Dispatch) -> bool:
    """Whether the attempt still waits for its node's answer."""
    here = (attempts.c.session == dispatch.session, attempts.c.number == dispatch.attempt)
    state = connection.execute(select(attempts.c.state).where(*here)).scalar()
    return state in ("dispatching", "cancelling")


def returned(tx: Transaction, session: str, attempt: int, node: str, block_s: float) -> None:
    """The node does not have it, and said so (it is full) or cannot have it (nothing answered): back into the queue, at its old place,
    and no failure of the session's. The node gets nothing for `block_s`."""
    tx.connection.execute(update(nodes).where(nodes.c.id == node).values(blocked_until=tx.now + block_s))
    here = (attempts.c.session == session, attempts.c.number == attempt)
    state = tx.connection.execute(select(attempts.c.state).where(*here)).scalar()
    if state == "dispatching":
        tx.connection.execute(attempts.delete().where(*here))
        tx.connection.execute(update(sessions).where(sessions.c.id == session).values(state="waiting", node=None))
    elif state == "cancelling":
        tx.connection.execute(update(attempts).where(*here).values(state="ended", end="cancelled", ended=tx.now))
    tx.wake.add("schedule")


def refused(tx: Transaction, dispatch: Dispatch, why: str) -> None:
    """The node will not run this session at all: an attempt that failed, so that another node gets it, or it ends with the reason. At once
    where every node that there is has refused it."""
    here = (attempts.c.session == dispatch.session, attempts.c.number == dispatch.attempt)
    attempt = tx.connection.execute(select(attempts).where(*here)).first()
    if attempt is None or attempt.state == "ended":
        return
    if attempt.state == "cancelling":
        tx.connection.execute(update(attempts).where(*here).values(state="ended", end="cancelled", ended=tx.now))
        return
    session = tx.connection.execute(select(sessions).where(sessions.c.id == dispatch.session)).one()
    task = tx.connection.execute(select(tasks).where(tasks.c.id == session.task)).one()
    error = f"the node {dispatch.node!r} refused the session: {why}"
    ending = Ending("ERROR", "infrastructure", "dispatch_refused", error, node=dispatch.node, attempt=dispatch.attempt)
    query = select(attempts.c.node).where(attempts.c.session == dispatch.session, attempts.c.code == ending.error_code)
    refusing = {dispatch.node, *tx.connection.execute(query).scalars()}
    others = {one.id for one in candidates(tx, None) if one.runs(session.backend)} - refusing
    attempt_failed(tx, task, session, attempt, "failed", ending, hopeless=not others)
