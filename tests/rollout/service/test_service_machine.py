"""The state machine under random nodes, clocks, restarts and callers: whatever happens, sessions end once and nothing is lost.

Drives the changes themselves on a real database, one transaction each, as the service does.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sqlalchemy import Connection, event, select

from polar.rollout import leases, schedule
from polar.rollout.cancel import cancel_session, cancel_task, stopped
from polar.rollout.database import Transaction, open_rollout_schema, unpacked
from polar.rollout.models import Heartbeat, NodeRegistration, SessionResult, TaskRequest
from polar.rollout.results import Delivered, StateReport, accept, moved
from polar.rollout.schedule import Dispatch
from polar.rollout.submit import Submission, submit
from polar.rollout.tables import attempts, deliveries, events, results, sessions, tasks
from polar.store.connect import open_engines

T = TypeVar("T")
NODES = ("a", "b", "c")
LEASE_S = 15.0


class RolloutMachine(RuleBasedStateMachine):
    """`held` is what each simulated node has: dispatches that reached it and whose result is not yet acknowledged."""

    @initialize()
    def begin(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="polar-machine-"))
        self.now = 1_000_000.0
        self.names = 0
        self.held: dict[str, dict[str, Dispatch]] = {node: {} for node in NODES}
        self.instances = dict.fromkeys(NODES, 0)
        self.accepted: dict[str, str] = {}
        """Session to the attempt whose result got a 200 as the session's own."""
        self.final: dict[str, bytes] = {}
        self.open_database()
        for node in NODES:
            self.register(node)

    def teardown(self) -> None:
        self.engine.dispose()
        self.readers.dispose()
        shutil.rmtree(self.folder, ignore_errors=True)

    def open_database(self) -> None:
        self.engine, self.readers = open_engines(self.folder / "r.db", busy_timeout_s=1, readers=1, schema=open_rollout_schema)
        event.listen(self.engine, "connect", _unsynced)
        self.engine.dispose()

    def write(self, change: Callable[[Transaction], T]) -> T:
        with self.engine.begin() as connection:
            transaction = Transaction(connection, self.now)
            outcome = change(transaction)
            transaction.close()
            return outcome

    def read(self, query: Callable[[Connection], T]) -> T:
        with self.readers.connect() as connection:
            return query(connection)

    def any_held(self, data: Any, node: str) -> tuple[str, Dispatch]:
        """One of a node's attempts: by its place, since ids are random and a failing example has to be found again."""
        held = list(self.held[node].items())
        return held[data.draw(st.integers(0, 1000)) % len(held)]

    def register(self, node: str) -> None:
        registration = NodeRegistration(
            node_id=node,
            gateway_url=f"http://{node}",
            max_init_workers=1,
            max_run_workers=1,
            max_postrun_workers=1,
            heartbeat_interval_seconds=5,
            instance=f"{node}{self.instances[node]}",
        )
        self.write(lambda tx: leases.register(tx, registration))

    # --- what callers do ---

    @rule(
        samples=st.integers(1, 6),
        attempts_=st.integers(1, 3),
        priority=st.integers(-1, 1),
        early=st.none() | st.integers(1, 3),
        grace=st.sampled_from([0.0, 20.0]),
        callback=st.booleans(),
    )
    def submit_task(self, samples: int, attempts_: int, priority: int, early: int | None, grace: float, callback: bool) -> None:
        self.names += 1
        request = TaskRequest(
            task_id=f"t{self.names}",
            instruction="do it",
            num_samples=samples,
            agent={"harness": "pi"},
            max_attempts=attempts_,
            priority=priority,
            early_stop=None if early is None else {"min_usable": early, "grace_seconds": grace},
            callback_url="http://callback" if callback else None,
            session_callbacks=callback,
        )
        self.write(lambda tx: submit(tx, Submission.of(request, request.model_dump_json().encode()), 10_000))

    @rule(number=st.integers(1, 10))
    def cancel_a_task(self, number: int) -> None:
        if number <= self.names:
            self.write(lambda tx: cancel_task(tx, f"t{number}"))

    @rule(data=st.data())
    def cancel_a_session(self, data: Any) -> None:
        ids = self.read(lambda one: list(one.execute(select(sessions.c.id).order_by(sessions.c.place)).scalars()))
        if ids:
            chosen = ids[data.draw(st.integers(0, 1000)) % len(ids)]
            self.write(lambda tx: cancel_session(tx, chosen))

    # --- what the service does ---

    @rule(fates=st.lists(st.sampled_from(["accepted", "accepted", "accepted", "full", "refused", "crash", "crash_after"]), min_size=1))
    def dispatch(self, fates: list[str]) -> None:
        """Each dispatch reaches its node, is turned away, or the service crashes before or after the call."""
        for number, one in enumerate(self.write(lambda tx: schedule.assign(tx, LEASE_S))):
            self.bring(one, fates[number % len(fates)])

    def bring(self, one: Dispatch, fate: str) -> None:
        name = f"{one.session}.{one.attempt}"
        if fate == "full":
            self.write(lambda tx: schedule.returned(tx, one.session, one.attempt, one.node, 1.0))
        elif fate == "refused":
            self.write(lambda tx: schedule.refused(tx, one, "no"))
        elif fate != "crash":
            self.held[one.node][name] = one
            if fate == "accepted":
                self.write(lambda tx: schedule.accepted(tx, one.session, one.attempt))

    @rule()
    def restart(self) -> None:
        """Kill -9 and start: what is dispatching is sent again, which nodes take once."""
        self.engine.dispose()
        self.readers.dispose()
        self.open_database()
        self.write(lambda tx: leases.resume(tx, LEASE_S, 120.0))
        for one in self.write(schedule.dispatching):
            self.bring(one, "accepted")

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 16.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.read(lambda one: leases.due(one, LEASE_S, self.now)):
            self.write(lambda tx: leases.expire(tx, LEASE_S))

    # --- what nodes do ---

    @rule(node=st.sampled_from(NODES), tells=st.booleans())
    def heartbeat(self, node: str, tells: bool) -> None:
        beat = Heartbeat(instance=f"{node}{self.instances[node]}", attempts=list(self.held[node]) if tells else None)
        answer = self.write(lambda tx: leases.heartbeat(tx, node, beat, LEASE_S, 120.0))
        assert answer is not None
        for name in answer["cancel"] + answer["forget"]:
            self.held[node].pop(name, None)

    @rule(node=st.sampled_from(NODES), keeps=st.booleans())
    def node_restarts(self, node: str, keeps: bool) -> None:
        """With its outbox, or with nothing."""
        self.instances[node] += 1
        if not keeps:
            self.held[node].clear()
        self.register(node)

    @rule(data=st.data(), node=st.sampled_from(NODES), outcome=st.sampled_from(["graded", "policy", "infrastructure", "cancelled"]))
    def report(self, data: Any, node: str, outcome: str) -> None:
        if not self.held[node]:
            return
        name, one = self.any_held(data, node)
        status = {"graded": "COMPLETED", "policy": "TIMEOUT"}.get(outcome, "ERROR")
        result = SessionResult(
            session_id=one.session,
            task_id="any",
            status=status,
            outcome=outcome,
            reward=data.draw(st.sampled_from([None, 0.0, 1.0])) if outcome in ("graded", "policy") else 0.0,
            attempt=one.attempt,
            node_id=node,
            turns=data.draw(st.integers(0, 25)),
        )
        delivered = Delivered.of(result)
        answer = self.write(lambda tx: accept(tx, delivered))
        assert answer.status in (200, 410)
        if answer.word == "accepted":
            assert one.session not in self.accepted, "two accepted results"
            self.accepted[one.session] = name
        if data.draw(st.booleans()):  # the acknowledgement may be lost: then it comes again
            del self.held[node][name]

    @rule(data=st.data(), node=st.sampled_from(NODES), status=st.sampled_from(["INITIALIZING", "RUNNING", "POST_RUN", "COMPLETED"]))
    def tell_state(self, data: Any, node: str, status: Any) -> None:
        if self.held[node]:
            _, one = self.any_held(data, node)
            self.write(lambda tx: moved(tx, [StateReport(session_id=one.session, attempt=one.attempt, status=status)]))

    @rule(data=st.data(), node=st.sampled_from(NODES))
    def stop_confirmed(self, data: Any, node: str) -> None:
        if self.held[node]:
            _, one = self.any_held(data, node)
            self.write(lambda tx: stopped(tx, one.session, one.attempt))

    # --- what always holds ---

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        if hasattr(self, "engine"):
            with self.readers.connect() as connection:
                known = Known(connection)
            self.sessions_end_once(known)
            attempts_are_accounted_for(known)
            tasks_count_right(known)
            events_have_no_gaps(known)

    def sessions_end_once(self, known: Known) -> None:
        for row in known.sessions:
            assert (row.state == "done") == (row.id in known.results)
            if row.state != "done":
                assert row.id not in self.final, "an end was taken back"
            elif row.id in self.final:
                assert known.results[row.id] == self.final[row.id], "a result changed"
            else:
                self.final[row.id] = known.results[row.id]
                told = orjson.loads(unpacked(known.results[row.id]))
                assert told["outcome"] == row.outcome
                assert told["reward"] == row.reward
                assert row.reward is None or row.outcome in ("graded", "policy")
                if row.outcome in ("graded", "policy"):
                    assert self.accepted[row.id] == f"{row.id}.{told['attempt']}"


class Known:
    """All that the database holds, at one moment."""

    def __init__(self, connection: Connection) -> None:
        self.tasks = connection.execute(select(tasks)).all()
        self.sessions = connection.execute(select(sessions)).all()
        self.attempts = connection.execute(select(attempts)).all()
        self.deliveries = connection.execute(select(deliveries.c.task)).scalars().all()
        self.results = {row.session: row.body for row in connection.execute(select(results))}
        self.events = connection.execute(select(events.c.seq, events.c.type, events.c.session).order_by(events.c.seq)).all()


def attempts_are_accounted_for(known: Known) -> None:
    active: dict[str, list[int]] = {}
    failed: dict[str, int] = {}
    for row in known.attempts:
        assert (row.state == "ended") == (row.end is not None)
        if row.state in ("dispatching", "accepted"):
            active.setdefault(row.session, []).append(row.number)
        if row.end in ("failed", "lost"):
            failed[row.session] = failed.get(row.session, 0) + 1
    most = {task.id: task.max_attempts for task in known.tasks}
    for session in known.sessions:
        assert session.failures == failed.get(session.id, 0)
        assert session.failures <= most[session.task]
        if session.state == "running":
            assert active.get(session.id) == [session.attempt], "a running session has exactly its current attempt"
        else:
            assert session.id not in active
        if session.outcome == "infrastructure":
            assert session.failures == most[session.task]
        if session.state == "waiting":
            assert session.failures < most[session.task]


def tasks_count_right(known: Known) -> None:
    for task in known.tasks:
        own = [row for row in known.sessions if row.task == task.id]
        done = [row for row in own if row.state == "done"]
        assert task.done == len(done)
        assert task.total == len(own)
        assert sorted(row.finish_number for row in done) == list(range(1, len(done) + 1))
        good = sum(row.outcome in ("graded", "policy") for row in done)
        assert task.good == good
        assert (task.state != "running") == (len(done) == len(own))
        if task.state != "running":
            assert task.state == ("completed" if good else "failed")
        expected = (len(done) + (task.state != "running")) if task.callback_url else 0
        assert sum(owed == task.id for owed in known.deliveries) == expected


def events_have_no_gaps(known: Known) -> None:
    assert [row.seq for row in known.events] == list(range(1, len(known.events) + 1))
    ended = [row.session for row in known.events if row.type == "session.finished"]
    assert len(ended) == len(set(ended))


def _unsynced(connection: Any, _: Any) -> None:
    connection.execute("PRAGMA synchronous = OFF")


TestRolloutMachine = RolloutMachine.TestCase
TestRolloutMachine.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


def test_everything_ends_when_nodes_behave(tmp_path: Path) -> None:
    """After any trouble: with one good node, every session ends."""
    machine = RolloutMachine()
    machine.begin()
    try:
        machine.submit_task(6, 3, 0, None, 0.0, False)
        machine.dispatch(["crash", "crash_after", "accepted", "refused", "full"])
        machine.restart()
        machine.node_restarts("a", False)
        for _ in range(60):
            machine.time_passes(1.0)
            for node in NODES:
                machine.heartbeat(node, True)
            machine.dispatch(["accepted"])
            for node in NODES:
                for name, one in list(machine.held[node].items()):
                    result = SessionResult(session_id=one.session, task_id="t", status="COMPLETED", reward=1.0, attempt=one.attempt)
                    machine.write(lambda tx, result=result: accept(tx, Delivered.of(result)))
                    machine.held[node].pop(name, None)
        states = machine.read(lambda one: list(one.execute(select(sessions.c.state)).scalars()))
        assert states == ["done"] * 6
    finally:
        machine.teardown()
