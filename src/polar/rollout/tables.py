"""The tables of the rollout service, schema version 0. One layout for SQLite and PostgreSQL; JSON and whatever may hold any text is bytes.

`tasks`        one row a submission. `name` is the caller's task id; an ended task's name may be used again, which supersedes its row.
`sessions`     one row a rollout: `waiting` for an attempt, `running` one, or `done`.
`attempts`     one row a try at a session on a node: `dispatching` (decided, perhaps sent), `accepted` (the node has it), `cancelling`
               (nobody wants it, the node may not know), `ended`. At most one attempt of a session is dispatching or accepted.
`results`      how a session ended, as the JSON that callers get, zstd-compressed.
`events`       what happened, numbered without gaps in the order of commits.
`deliveries`   callbacks that are owed.
`nodes`        the nodes and what their last heartbeat said.
`submissions`  idempotency keys.
`meta`         the schema version, and the row that a sick database is probed with.

A change here needs a new version and a migration in `polar.rollout.database`.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
)

metadata = MetaData()

meta = Table("meta", metadata, Column("name", Text, primary_key=True), Column("value", Text, nullable=False))

tasks = Table(
    "tasks",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False),
    Column("superseded", Boolean, nullable=False),
    Column("state", Text, nullable=False),
    Column("request", LargeBinary, nullable=False),
    Column("harness", Text, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("callback_url", Text),
    Column("session_callbacks", Boolean, nullable=False),
    Column("min_usable", Integer),
    Column("grace_s", Double),
    Column("stop_at", Double),  # when an early stop cancels what is left
    Column("total", Integer, nullable=False),
    Column("done", Integer, nullable=False),
    Column("good", Integer, nullable=False),  # ended graded or failed by policy
    Column("usable", Integer, nullable=False),  # of those, with a reward
    Column("created", Double, nullable=False),
    Column("finished", Double),
    Index("tasks_name", "name"),
    Index("tasks_state", "state"),
    Index("tasks_finished", "finished"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", Text, primary_key=True),
    Column("task", Integer, ForeignKey("tasks.id"), nullable=False),
    Column("sample", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("urgency", Integer, nullable=False),  # minus the priority: all of the queue's order ascends
    Column("rank", Integer, nullable=False),  # the turn in which its task's quantum comes (polar.rollout.schedule)
    Column("place", BigInteger, nullable=False),  # order of submission
    Column("backend", Text),
    Column("not_before", Double, nullable=False),
    Column("attempt", Integer, nullable=False),  # the number of the current attempt; while waiting: of the next one
    Column("failures", Integer, nullable=False),  # attempts that failed by infrastructure
    Column("avoid", Text, nullable=False),  # JSON: nodes that failed it
    Column("node", Text),
    Column("outcome", Text),
    Column("reward", Double),
    Column("error_code", Text),
    Column("error", LargeBinary),
    Column("turns", Integer, nullable=False),
    Column("sampled_tokens", BigInteger, nullable=False),
    Column("finish_number", Integer),  # 1 for the first of its task to end
    Column("created", Double, nullable=False),
    Column("started", Double),
    Column("finished", Double),
    Column("saved", Text),  # the file of its result; empty: files are off
    Index("sessions_task", "task", "sample", unique=True),
    Index("sessions_queue", "state", "urgency", "rank", "place"),
    Index("sessions_unsaved", "state", "saved"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("session", Text, ForeignKey("sessions.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("node", Text, nullable=False),
    Column("instance", Text),
    Column("state", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("end", Text),  # result, failed, lost, cancelled
    Column("code", Text),
    Column("error", LargeBinary),
    Column("turns", Integer),  # null: not known
    Column("lease_until", Double, nullable=False),
    Column("created", Double, nullable=False),
    Column("accepted", Double),
    Column("ended", Double),
    PrimaryKeyConstraint("session", "number"),
    Index("attempts_state", "state", "lease_until"),
    Index("attempts_node", "node", "state"),
)

results = Table(
    "results",
    metadata,
    Column("session", Text, ForeignKey("sessions.id"), primary_key=True),
    Column("body", LargeBinary, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("time", Double, nullable=False),
    Column("type", Text, nullable=False),
    Column("task", Text),
    Column("session", Text),
    Column("data", LargeBinary, nullable=False),
    Index("events_task", "task", "seq"),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("id", Text, primary_key=True),
    Column("task", Integer, ForeignKey("tasks.id"), nullable=False),
    Column("session", Text),  # null: the whole task's
    Column("url", Text, nullable=False),
    Column("state", Text, nullable=False),  # due, done, given_up
    Column("tries", Integer, nullable=False),
    Column("next_try", Double, nullable=False),
    Column("created", Double, nullable=False),
    Column("error", LargeBinary),
    Index("deliveries_state", "state", "next_try"),
    Index("deliveries_task", "task"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("token", Text),
    Column("instance", Text),
    Column("max_init", Integer, nullable=False),
    Column("max_run", Integer, nullable=False),
    Column("max_postrun", Integer, nullable=False),
    Column("interval_s", Double, nullable=False),
    Column("metrics", LargeBinary, nullable=False),
    Column("state", Text, nullable=False),  # up, lost, idle (drained, and nothing is left on it)
    Column("drained", Boolean, nullable=False),  # by the API: gets nothing more
    Column("draining", Boolean, nullable=False),  # by its own word
    Column("registered", Double, nullable=False),
    Column("last_seen", Double, nullable=False),
    Column("blocked_until", Double, nullable=False),  # it said 503, or could not be reached
)

submissions = Table(
    "submissions",
    metadata,
    Column("key", Text, primary_key=True),
    Column("body_hash", LargeBinary, nullable=False),
    Column("task", Integer, ForeignKey("tasks.id"), nullable=False),
    Column("created", Double, nullable=False),
)
