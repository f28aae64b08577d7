"""What callers see of tasks, sessions and nodes: queries only. Results are passed on as the JSON that they are stored as, never parsed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from sqlalchemy import Connection, Row, Select, case, func, select

from polar.chat import JsonObject
from polar.errors import RolloutError
from polar.rollout.database import unpacked
from polar.rollout.schedule import candidate, why_shared
from polar.rollout.tables import attempts, deliveries, nodes, results, sessions, tasks

MAX_PAGE = 1000
HIGHEST = (1 << 31) - 1
"""Of the numbers of rows: what an INTEGER holds."""


def find_task(connection: Connection, name: str) -> Row[Any]:
    """The newest task of that name. Raises `RolloutError` `not_found`."""
    row = connection.execute(select(tasks).where(tasks.c.name == name, ~tasks.c.superseded)).first()
    if row is None:
        raise RolloutError(f"no task is called {name!r}", code="not_found", status=404)
    return row


def find_session(connection: Connection, session_id: str) -> Row[Any]:
    """With the task's name as `task_name`. Raises `RolloutError` `not_found`."""
    query = select(sessions, tasks.c.name.label("task_name")).join(tasks, tasks.c.id == sessions.c.task).where(sessions.c.id == session_id)
    row = connection.execute(query).first()
    if row is None:
        raise RolloutError(f"no session is called {session_id!r}", code="not_found", status=404)
    return row


# --- tasks ------------------------------------------------------------------------------------------------------------


def task_body(connection: Connection, task: Row[Any], *, with_results: bool = True, delivery_id: str | None = None) -> bytes:
    """`TaskStatus` as JSON; with a `delivery_id`, `TaskResult`."""
    paths = select(sessions.c.saved).where(sessions.c.task == task.id, sessions.c.saved != "").order_by(sessions.c.sample)
    head: JsonObject = {"task_id": task.name, "status": task.state}
    if delivery_id is None:
        head |= {"total_sessions": task.total, "completed_sessions": task.done, "error": None}
        head |= {"counts": counts(connection, task), "created": task.created, "finished": task.finished}
        head["waits_for"] = waits(connection, [task.id]).get(task.id) if task.state == "running" else None
    else:
        head["delivery_id"] = delivery_id
    head["result_paths"] = [str(path) for path in connection.execute(paths).scalars()]
    bodies: list[bytes] = []
    if with_results:
        query = (
            select(results.c.body)
            .join(sessions, sessions.c.id == results.c.session)
            .where(sessions.c.task == task.id)
            .order_by(sessions.c.sample)
        )
        bodies = [unpacked(body) for body in connection.execute(query).scalars()]
    return orjson.dumps(head)[:-1] + b',"results":[' + b",".join(bodies) + b"]}"


def waits(connection: Connection, ids: Sequence[int]) -> dict[int, str]:
    """Of these tasks, those with sessions that no node which is there could begin, and why."""
    query = select(sessions.c.task, sessions.c.backend).where(sessions.c.task.in_(ids), sessions.c.state == "waiting").distinct()
    wanted = connection.execute(query).all() if ids else []
    if not wanted:
        return {}
    there = [candidate(row, 0, 0.0, None) for row in connection.execute(select(nodes).where(nodes.c.state == "up", ~nodes.c.drained))]
    names = ", ".join(sorted({name for node in there for name in node.backends or ()}))
    found = {}
    for task, backend in wanted:
        if not there:
            found[task] = "no node is up"
        elif not any(node.runs(backend) for node in there):
            found[task] = f"no node that is up runs the backend {backend!r}; they run: {names}"
    return found


def counts(connection: Connection, task: Row[Any]) -> dict[str, int]:
    """Sessions by outcome, and `open`."""
    query = select(sessions.c.outcome, func.count()).where(sessions.c.task == task.id, sessions.c.state == "done")
    found = {str(outcome): int(count) for outcome, count in connection.execute(query.group_by(sessions.c.outcome))}
    return {**found, "open": task.total - task.done}


def finished_since(connection: Connection, task: int, number: int, limit: int = 32) -> Sequence[Any]:
    """Sessions of a task that ended after its first `number` ones, in that order: `finish_number` and `body`."""
    query = (
        select(sessions.c.finish_number, results.c.body)
        .join(results, results.c.session == sessions.c.id)
        .where(sessions.c.task == task, sessions.c.finish_number > number)
    )
    return connection.execute(query.order_by(sessions.c.finish_number).limit(limit)).all()


def list_tasks(
    connection: Connection, *, status: str | None, harness: str | None, since: float | None, limit: int, cursor: str | None
) -> JsonObject:
    """Newest first."""
    query = select(tasks).where(~tasks.c.superseded)
    if status:
        query = query.where(tasks.c.state == status)
    if harness:
        query = query.where(tasks.c.harness == harness)
    if since is not None:
        query = query.where(tasks.c.created >= since)
    if cursor is not None:
        query = query.where(tasks.c.id < min(cursor_number(cursor), HIGHEST))
    rows = connection.execute(query.order_by(tasks.c.id.desc()).limit(limit + 1)).all()
    waiting = waits(connection, [row.id for row in rows[:limit] if row.state == "running"])
    shown = [{**_task_line(row), "waits_for": waiting.get(row.id)} for row in rows[:limit]]
    return {"tasks": shown, "next_cursor": str(rows[limit - 1].id) if len(rows) > limit else None}


def list_sessions(connection: Connection, task: Row[Any], *, status: str | None, limit: int, cursor: str | None) -> JsonObject:
    """A task's sessions in order of sample."""
    query = select(sessions).where(sessions.c.task == task.id)
    if status:
        query = query.where(sessions.c.status == status)
    if cursor is not None:
        query = query.where(sessions.c.sample > min(cursor_number(cursor), HIGHEST))
    rows = connection.execute(query.order_by(sessions.c.sample).limit(limit + 1)).all()
    shown = [session_line(row, task.name) for row in rows[:limit]]
    return {"task_id": task.name, "sessions": shown, "next_cursor": str(rows[limit - 1].sample) if len(rows) > limit else None}


def _task_line(row: Row[Any]) -> JsonObject:
    return {
        "task_id": row.name,
        "status": row.state,
        "harness": row.harness,
        "total_sessions": row.total,
        "completed_sessions": row.done,
        "usable_sessions": row.usable,
        "created": row.created,
        "finished": row.finished,
    }


def session_line(row: Row[Any], task: str) -> JsonObject:
    """A session without its trajectory."""
    return {
        "session_id": row.id,
        "task_id": task,
        "sample": row.sample,
        "status": row.status,
        "state": row.state,
        "outcome": row.outcome,
        "reward": row.reward,
        "error": None if row.error is None else row.error.decode("utf-8", "replace"),
        "error_code": row.error_code,
        "node_id": row.node,
        "attempt": row.attempt,
        "failures": row.failures,
        "turns": row.turns,
        "sampled_tokens": row.sampled_tokens,
        "created": row.created,
        "started": row.started,
        "finished": row.finished,
        "result_path": row.saved or None,
    }


def session_attempts(connection: Connection, session_id: str) -> list[JsonObject]:
    query = select(attempts).where(attempts.c.session == session_id).order_by(attempts.c.number)
    return [
        {
            "attempt": row.number,
            "node_id": row.node,
            "state": row.state,
            "status": row.status,
            "end": row.end,
            "error_code": row.code,
            "error": None if row.error is None else row.error.decode("utf-8", "replace"),
            "turns": row.turns,
            "created": row.created,
            "accepted": row.accepted,
            "ended": row.ended,
        }
        for row in connection.execute(query)
    ]


def result_body(connection: Connection, session: Row[Any]) -> bytes:
    """Raises `RolloutError` `not_finished`."""
    body = connection.execute(select(results.c.body).where(results.c.session == session.id)).scalar()
    if body is None:
        raise RolloutError(f"the session is {session.status} and has no result yet", code="not_finished", status=409)
    return unpacked(body)


def node_of(connection: Connection, session: Row[Any]) -> Row[Any]:
    """Where the session runs, or ran last. Raises `RolloutError` `no_node`."""
    query = select(nodes).where(nodes.c.id == session.node)
    row = connection.execute(query).first() if session.node else None
    if row is None:
        why = "has not been given to a node yet" if session.node is None else f"was run by the node {session.node!r}, which is gone"
        raise RolloutError(f"the session {why}", code="no_node", status=409)
    return row


# --- the whole --------------------------------------------------------------------------------------------------------

TURN_BUCKETS = ("unknown", "0", "1", "2-4", "5-9", "10-19", "20+")


def overview(connection: Connection) -> JsonObject:
    """Tasks, sessions, nodes, retries and deliveries, counted."""
    by_state = _counted(connection, select(tasks.c.state, func.count()).where(~tasks.c.superseded).group_by(tasks.c.state))
    by_session = _counted(connection, select(sessions.c.state, func.count()).group_by(sessions.c.state))
    open_status = select(sessions.c.status, func.count()).where(sessions.c.state == "running").group_by(sessions.c.status)
    outcomes = select(sessions.c.outcome, func.count()).where(sessions.c.state == "done").group_by(sessions.c.outcome)
    return {
        "tasks": by_state,
        "sessions": by_session,
        "sessions_by_status": _counted(connection, open_status),
        "pending_sessions": by_session.get("waiting", 0),
        "outcomes": _counted(connection, outcomes),
        "retries": retries(connection),
        "deliveries": _counted(connection, select(deliveries.c.state, func.count()).group_by(deliveries.c.state)),
        "nodes": list_nodes(connection),
    }


def retries(connection: Connection) -> JsonObject:
    """Attempts that ended by infrastructure, by the turns that they had reached and by cause, beside all attempts that ended: retrying
    what the policy causes would bias rewards, and shows here first (law 5)."""
    turns = attempts.c.turns
    bucket = case(
        (turns.is_(None), "unknown"),
        (turns == 0, "0"),
        (turns == 1, "1"),
        (turns < 5, "2-4"),
        (turns < 10, "5-9"),
        (turns < 20, "10-19"),
        else_="20+",
    )
    failed = attempts.c.end.in_(("failed", "lost"))
    query = select(bucket, func.count(), func.sum(case((failed, 1), else_=0))).where(attempts.c.state == "ended").group_by(bucket)
    rows = {str(name): {"attempts": int(total), "failed": int(bad or 0)} for name, total, bad in connection.execute(query)}
    codes = select(attempts.c.code, func.count()).where(failed).group_by(attempts.c.code)
    return {"by_turns": {name: rows[name] for name in TURN_BUCKETS if name in rows}, "by_code": _counted(connection, codes)}


def list_nodes(connection: Connection, node_id: str | None = None) -> list[JsonObject]:
    busy = select(attempts.c.node, func.count()).where(attempts.c.state != "ended").group_by(attempts.c.node)
    load = _counted(connection, busy)
    query = select(nodes).order_by(nodes.c.id)
    rows = connection.execute(query if node_id is None else query.where(nodes.c.id == node_id))
    return [_node_line(row, load.get(row.id, 0)) for row in rows]


def _node_line(row: Row[Any], load: int) -> JsonObject:
    """The token stays here."""
    return {
        "node_id": row.id,
        "gateway_url": row.url,
        "max_init_workers": row.max_init,
        "max_run_workers": row.max_run,
        "max_postrun_workers": row.max_postrun,
        "heartbeat_interval_seconds": row.interval_s,
        "metrics": orjson.loads(unpacked(row.metrics)),
        "instance": row.instance,
        "status": "lost" if row.state == "lost" else "draining" if row.drained or row.draining else row.state,
        "healthy": row.state != "lost",
        "draining": row.drained or row.draining,
        "attempts": load,
        "registered": row.registered,
        "last_heartbeat": row.last_seen,
    }


def shares_host(connection: Connection) -> str | None:
    """Why sandboxes of tasks that name no runtime could reach a loopback listener, if they could: what nodes say of their default."""
    for row in connection.execute(select(nodes).where(nodes.c.state == "up")):
        if (why := why_shared(row.id, orjson.loads(unpacked(row.metrics)))) is not None:
            return why
    return None


def _counted(connection: Connection, query: Select[Any]) -> dict[str, int]:
    return {str(row[0]): int(row[1]) for row in connection.execute(query)}


def cursor_number(cursor: str) -> int:
    """The number that a cursor, or a Last-Event-ID, stands for. Raises `RolloutError` `invalid_cursor` (400)."""
    if not cursor.isdecimal() or len(cursor) > 18:  # within 64 bits, as all that this service gives
        raise RolloutError(f"the cursor {cursor[:40]!r} is none that this service gave", code="invalid_cursor", status=400)
    return int(cursor)
