"""What must hold after any fault: sessions ended as planned, nothing acknowledged is lost, nothing counts twice, nothing is left."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soak_plan import CODES, Ended, Task
from soak_world import Node, World

from polar.records import Completion
from polar.rollout.client import AsyncClient
from polar.rollout.models import Event, SessionResult
from polar.runtime.base import Left
from polar.runtime.reaper import listing
from polar.store import open_store
from polar.testing.engine import text_of
from polar.trajectory import Trajectory

QUIET_S = 30.0
"""How long nodes may take, after the last session has ended, to end and remove what attempts that nobody wants any more still do."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What the API, the callbacks and the agents say of a run."""

    results: dict[str, SessionResult]
    """By task and sample."""
    tasks: dict[str, str]
    """Of each task: how it ended."""
    events: list[Event]
    heard: list[Event]
    """By one listener, while the service was killed, cut off and started again."""
    witnessed: list[tuple[str, str]]
    """Hash of the key, nonce: answers that agents received whole."""

    @classmethod
    async def of(cls, world: World, client: AsyncClient, heard: list[Event]) -> Seen:
        results, tasks = {}, {}
        for task in world.plan.tasks:
            status = await client.task(task.name)
            tasks[task.name] = status.status
            results.update({f"{task.name}/{one.sample}": one for one in status.results})
        last = max((event.seq for event in heard), default=0)
        events: list[Event] = []
        async for event in client.events(after=0):
            events.append(event)
            if event.seq >= last:
                break
        witnessed = []
        for file in sorted(world.witness.iterdir()):
            for line in file.read_text().splitlines():
                key, nonce = line.split()
                witnessed.append((key, nonce))
        return cls(results, tasks, events, list(heard), witnessed)

    @property
    def failures(self) -> list[Event]:
        return [event for event in self.events if event.type == "session.attempt_failed"]


async def nothing_runs_on(world: World) -> None:
    """While service and nodes still live, all of them up again: no sandbox of a session that has ended is there, nothing is undelivered."""
    deadline = time.monotonic() + QUIET_S
    while True:
        left = [str(one) for node in world.nodes for one in await listing(node.sandboxes) if _of_a_sandbox(one)]
        left += [str(path) for node in world.nodes for path in (node.disk.folder / "work" / "spool").glob("*/*")]
        left += [f"node {node.name} is not up" for node in world.nodes if not node.process.ready]
        left += _undelivered(world)
        if not left:
            return
        if time.monotonic() > deadline:
            raise AssertionError("after every session has ended, there is still:\n" + "\n".join(left))
        await asyncio.sleep(0.3)


def _of_a_sandbox(left: Left) -> bool:
    """Not what a node that lives has for itself: its lock, its Podman service and that one's files."""
    if left.kind == "folder":
        return bool(left.sandbox) and Path(left.name).is_dir()
    return bool(left.sandbox) or left.kind == "container"


def _undelivered(world: World) -> list[str]:
    taken = {delivery for delivery, _ in world.receiver.taken}
    wanted = world.plan.sessions + len(world.plan.tasks)
    return [] if len(taken) >= wanted and world.receiver.mood == "up" else [f"{wanted - len(taken)} callbacks"]


async def check(world: World, seen: Seen) -> dict[str, Ended]:
    """After everything has been stopped. Gives the table of outcomes, which is the planned one."""
    table = outcomes(seen)
    _as_planned(world, seen, table)
    _every_failure_has_its_reason(world, seen)
    _events_are_whole(seen)
    _callbacks_tell_the_same(world, seen)
    stores = {node.name: await _stored(node) for node in world.nodes}
    _nothing_acknowledged_is_lost(seen, stores)
    _nothing_counts_twice(world, seen, stores)
    await _nothing_is_left(world)
    return table


def outcomes(seen: Seen) -> dict[str, Ended]:
    table = {}
    for name, one in sorted(seen.results.items(), key=lambda item: [int(part) for part in item[0].removeprefix("soak-").split("/")]):
        infrastructure = one.outcome == "infrastructure"
        reward = None if one.reward is None else round(one.reward, 4)
        table[name] = Ended(str(one.outcome), None if infrastructure else one.error_code, reward, 0 if infrastructure else one.turns)
    return table


def _as_planned(world: World, seen: Seen, table: dict[str, Ended]) -> None:
    wanted = world.plan.table()
    agents = {task.name: task.agent.kind for task in world.plan.tasks}
    wrong = [
        f"{name} ({agents[name.split('/')[0]]}): {table.get(name)}, planned {wanted.get(name)}: {_brief(seen.results.get(name))}"
        for name in sorted({*wanted, *table})
        if table.get(name) != wanted.get(name)
    ]
    assert not wrong, "not as planned:\n" + "\n".join(wrong)
    for task in world.plan.tasks:
        good = any(wanted[f"{task.name}/{sample}"].outcome in ("graded", "policy") for sample in range(task.samples))
        assert seen.tasks[task.name] == ("completed" if good else "failed"), task


def _brief(result: SessionResult | None) -> dict[str, Any] | None:
    return result and result.model_dump(
        include={"session_id", "attempt", "node_id", "error_code", "error", "exit_code", "turns", "warnings"}
    )


def _every_failure_has_its_reason(world: World, seen: Seen) -> None:
    """An attempt that failed, failed by its agent, or by a fault that was struck."""
    struck = frozenset[str]().union(*(CODES[fault.kind] for _, fault, _ in world.struck))
    tasks = {task.name: task for task in world.plan.tasks}
    for event in seen.failures:
        task: Task = tasks[str(event.task_id)]
        allowed = struck | (frozenset({"harness_no_call"}) if task.agent.doomed else frozenset())
        assert event.data["error_code"] in allowed, (event.data, sorted(allowed))
    once = {fault for fault in world.plan.faults if not fault.always}
    missed = once - {fault for _, fault, _ in world.struck}
    assert not missed, f"faults that never struck: {missed}"


def _events_are_whole(seen: Seen) -> None:
    numbers = [event.seq for event in seen.events]
    assert numbers == list(range(1, len(numbers) + 1))
    assert [event.seq for event in seen.heard] == numbers[: len(seen.heard)]
    assert seen.heard == seen.events[: len(seen.heard)]
    ended = Counter(event.session_id for event in seen.events if event.type == "session.finished")
    assert ended == Counter(one.session_id for one in seen.results.values())
    finished = Counter(event.task_id for event in seen.events if event.type == "task.finished")
    assert finished == Counter(list(seen.tasks))


def _callbacks_tell_the_same(world: World, seen: Seen) -> None:
    """At least once, and whatever comes again says the same under the same id."""
    bodies: dict[str, Any] = {}
    for delivery, body in world.receiver.taken:
        assert body["delivery_id"] == delivery
        first = bodies.setdefault(delivery, body)
        differs = {key: (first.get(key), body.get(key)) for key in {*first, *body} if first.get(key) != body.get(key)}
        if not first.get("result_paths"):  # the disk was full: files are a copy, and come later
            differs.pop("result_paths", None)
        assert not differs, f"{delivery} came with two bodies: {str(differs)[:2000]}"
    sessions = [body for body in bodies.values() if "session_id" in body]
    assert Counter(body["session_id"] for body in sessions) == Counter(one.session_id for one in seen.results.values())
    by_session = {one.session_id: one for one in seen.results.values()}
    for body in sessions:
        assert SessionResult.model_validate(body) == by_session[body["session_id"]]
    assert Counter(body["task_id"] for body in bodies.values() if "results" in body) == Counter(list(seen.tasks))


# --- the stores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stored:
    """One capture session, whole."""

    attempt: str
    closed: bool
    completions: list[Completion]

    @property
    def sampled(self) -> int:
        return sum(0 if one.sampled_ids is None else len(one.sampled_ids) for one in self.completions)


async def _stored(node: Node) -> dict[str, Stored]:
    """By the hash of its key."""
    store = open_store(str(node.store))
    try:
        found, before = {}, None
        while page := await store.sessions(limit=100, before=before):
            for session in page:
                completions = [one async for one in store.completions(session.id)]
                found[session.key_hash.hex()] = Stored(session.id, session.closed is not None, completions)
            before = page[-1].created
        return found
    finally:
        await store.aclose()


def _nothing_acknowledged_is_lost(seen: Seen, stores: dict[str, dict[str, Stored]]) -> None:
    for key, nonce in seen.witnessed:
        holders = [stored[key] for stored in stores.values() if key in stored]
        assert len(holders) == 1, f"the session in which {nonce} was received is in {len(holders)} stores"
        kept = [one for one in holders[0].completions if nonce in one.answer.text]
        assert len(kept) == 1, f"{nonce}, acknowledged in {holders[0].attempt}, is kept {len(kept)} times"
        assert kept[0].status == "complete"
    assert max(Counter(nonce for _, nonce in seen.witnessed).values(), default=1) == 1


def _nothing_counts_twice(world: World, seen: Seen, stores: dict[str, dict[str, Stored]]) -> None:
    """The accepted attempt's rows hold each of its completions once, and nothing of any other attempt."""
    by_attempt = {(name, one.attempt): one for name, stored in stores.items() for one in stored.values()}
    ran = Counter(one.attempt for stored in stores.values() for one in stored.values())
    assert max(ran.values()) == 1, f"attempts that ran on two nodes under one name: {[name for name, count in ran.items() if count > 1]}"
    witnessed: dict[str, set[str]] = {}
    for key, nonce in seen.witnessed:
        witnessed.setdefault(next(stored[key].attempt for stored in stores.values() if key in stored), set()).add(nonce)
    tokenizer, _ = text_of(world.tokenizer_dir)
    for name, result in seen.results.items():
        attempt = f"{result.session_id}.{result.attempt}"
        kept = by_attempt.get((str(result.node_id), attempt))
        if result.trajectory is None:
            assert result.outcome == "infrastructure", name
            continue
        assert kept is not None, name
        assert kept.closed, name
        trajectory = Trajectory.from_json(result.trajectory)
        assert trajectory.in_rows + trajectory.ledger.tokens == trajectory.sampled == kept.sampled, name
        complete = [one for one in kept.completions if one.status == "complete"]
        assert result.turns == len(complete), name
        trained = [tokenizer.decode(trace.ids[trace.mask].tolist(), skip_special=False) for trace in trajectory.traces]
        texts = "".join(trained)
        for one in complete:
            nonce = next(word for word in one.answer.text.split() if word.startswith("nonce-"))
            assert texts.count(nonce) == 1, (name, nonce, texts.count(nonce))
        assert texts.count("nonce-") == len(complete), name
        assert witnessed.get(attempt, set()) <= {word for one in complete for word in one.answer.text.split()}, name
    for stored in stores.values():
        for one in stored.values():
            if not one.closed:
                session = one.attempt.rpartition(".")[0]
                told = "\n".join(f"{event.time - seen.events[0].time:6.1f} {event}" for event in seen.events if event.session_id == session)
                raise AssertionError(f"the session of {one.attempt} is still open at its gateway:\n{told}")


# --- what is left ---------------------------------------------------------------------------------------------------------


async def _nothing_is_left(world: World) -> None:
    left: list[str] = []
    for node in world.nodes:
        left += [str(one) for one in await listing(node.sandboxes)]
        left += [str(path) for path in node.sandboxes.glob("*")] if node.sandboxes.exists() else []
    left += _processes(world)
    assert not left, "left behind:\n" + "\n".join(left)


def _processes(world: World) -> list[str]:
    """Those that carry the mark of one of our sandboxes, have our folders in their environment, or work in them. Podman's
    service is all users' together: it belongs to no node, and ends by itself when it has had nothing to do for a minute."""
    marks: Sequence[bytes] = [node.mark.encode() for node in world.nodes] + [str(world.folder).encode()]
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
            said = command + Path("/proc", name, "environ").read_bytes() + os.fsencode(os.readlink(f"/proc/{name}/cwd"))
        except OSError:
            continue
        if any(mark in said for mark in marks) and b"podman\0system\0service" not in command and b"polar-podman" not in command:
            found.append(f"process {name}: {command!r}")
    return found
