"""Nodes: who gets what, and what happens when they are full, refuse, die, come back or are drained."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from service_parts import ended, http, submit, until

from polar.rollout.database import packed
from polar.rollout.events import page
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.rollout.remote import Said
from polar.rollout.schedule import AVOID_S, Candidate, Dispatch, candidate, choose
from polar.testing.node import StubNode, broken, graded
from polar.testing.rollout import TOKEN, listening, running_service, stub_rollouts


async def never(request: SessionDispatchRequest) -> SessionResult | None:
    return None


async def breaks(request: SessionDispatchRequest) -> SessionResult | None:
    return broken(request)


def node(name: str, load: int, *, slots: int = 2, backends: frozenset[str] | None = None, is_open: bool = True) -> Candidate:
    return Candidate(name, f"http://{name}", None, None, slots, 8, backends, load, open=is_open)


@given(
    loads=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    avoid=st.frozensets(st.sampled_from("abcde")),
    backend=st.sampled_from([None, "local", "docker"]),
    waited=st.floats(0, 100),
)
def test_the_chosen_node_has_room_can_run_it_and_has_most_free_run_slots(
    loads: list[int], avoid: frozenset[str], backend: str | None, waited: float
) -> None:
    able = [frozenset({"docker"}), None, frozenset({"local", "docker"})]
    found = [node("abcde"[number], load, backends=able[number % 3]) for number, load in enumerate(loads)]
    chosen = choose(found, backend, avoid, waited)
    fits = [one for one in found if one.runs(backend)]
    if chosen is None:
        fresh = [one for one in fits if one.id not in avoid]
        assert not any(one.free > 0 for one in fits) or (fresh and waited < AVOID_S)
    else:
        assert chosen.free > 0
        assert chosen in fits
        better = [one for one in fits if one.free > 0 and one.order < chosen.order]
        assert all(one.id in avoid for one in better)


def test_sessions_wait_here_rather_than_in_a_nodes_queue() -> None:
    """There they would be out of reach of other nodes and of what is more urgent."""
    row = SimpleNamespace(
        id="a", url="http://a", token=None, instance=None, max_init=2, max_run=3, max_postrun=2, interval_s=5.0, blocked_until=0.0
    )
    row.metrics = packed({"capacity": 100})
    assert candidate(row, 0, 0.0, None).capacity == 10
    row.metrics = packed({"capacity": 4})
    assert candidate(row, 0, 0.0, None).capacity == 4


def test_a_node_that_failed_the_session_is_avoided_while_another_could_take_it() -> None:
    assert choose([node("a", 0), node("b", 8)], None, frozenset("a"), 1.0) is None
    chosen = choose([node("a", 0), node("b", 8)], None, frozenset("a"), AVOID_S)
    assert chosen is not None
    assert chosen.id == "a"
    alone = choose([node("a", 0)], None, frozenset("a"), 0.0)
    assert alone is not None


async def test_sessions_spread_over_nodes_by_their_run_slots(tmp_path: Path) -> None:
    small, large = StubNode("small", play=never, max_run_workers=2), StubNode("large", play=never, max_run_workers=6)
    async with stub_rollouts(tmp_path, [small, large]) as (_, url), http(url) as client:
        await submit(client, samples=8)
        await until(lambda: len(small.running) + len(large.running) == 8)
        assert (len(small.running), len(large.running)) == (2, 6)


async def test_higher_priorities_go_first_and_large_tasks_let_others_in(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        await gate.wait()
        return graded(request)

    one = StubNode(play=play, max_run_workers=1)
    async with stub_rollouts(tmp_path, [one]) as (_, url), http(url) as client:
        await submit(client, "large", 60)
        await until(lambda: len(one.dispatched) == 4)
        await submit(client, "small", 4)
        await submit(client, "urgent", 3, priority=5)
        gate.set()
        for name in ("large", "small", "urgent"):
            await ended(client, name)
    order = [request.task_id for request in one.dispatched][4:]
    assert order[:3] == ["urgent"] * 3
    assert order.index("small") <= 3 + 16  # the rest of the first quantum, no more
    assert order[-1] == "large"


async def test_a_full_node_is_waited_for_without_counting_an_attempt(tmp_path: Path) -> None:
    full = StubNode()
    full.refuse = 503
    async with stub_rollouts(tmp_path, [full]) as (_, url), http(url) as client:
        await submit(client, samples=2, max_attempts=1)
        await asyncio.sleep(0.6)
        assert full.dispatched == []

        async def both_wait() -> bool:
            return bool((await client.get("/rollout/status")).json()["pending_sessions"] == 2)

        await until(both_wait)
        full.refuse = None
        status = await ended(client)
        assert status["counts"]["graded"] == 2
        assert {one["attempt"] for one in status["results"]} == {0}


async def test_a_node_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (_, url), http(url) as client:
        await submit(client, max_attempts=1)
        late = StubNode()
        async with listening(late.app) as own:
            await late.join(url, TOKEN, own)
            assert (await ended(client))["status"] == "completed"
            await late.leave()


async def test_an_attempt_that_a_node_may_have_is_never_given_to_another(tmp_path: Path) -> None:
    """Its answer got lost, and then it could not be reached: as far as one knows it runs there."""
    nodes = [StubNode("a", play=never, interval_s=5.0), StubNode("b", play=never, interval_s=5.0)]
    async with stub_rollouts(tmp_path, nodes) as (service, url), http(url) as client:
        dispatch, tries = service.remote.dispatch, 0

        async def losing_answers(one: Dispatch) -> Said:
            nonlocal tries
            tries += 1
            if tries == 1:
                await dispatch(one)
                return Said("unclear")
            return Said("unreachable") if tries == 2 else await dispatch(one)

        service.remote.dispatch = losing_answers  # type: ignore[method-assign]
        await submit(client, samples=1)
        await until(lambda: tries >= 3)
        await asyncio.sleep(0.5)
        names = [one.attempt_id for node in nodes for one in node.dispatched]
        assert len(names) == len(set(names)) == 1


async def test_a_refusal_counts_as_an_attempt_and_ends_with_the_nodes_words(tmp_path: Path) -> None:
    one = StubNode()
    one.refuse = 400
    async with stub_rollouts(tmp_path, [one]) as (_, url), http(url) as client:
        await submit(client, max_attempts=2)
        result = (await ended(client))["results"][0]
        assert (result["outcome"], result["error_code"], result["reward"]) == ("infrastructure", "dispatch_refused", None)
        assert "as told" in result["error"]


async def test_a_session_that_every_node_refuses_is_not_tried_again(tmp_path: Path) -> None:
    nodes = [StubNode("a"), StubNode("b")]
    for one in nodes:
        one.refuse = 422
    async with stub_rollouts(tmp_path, nodes) as (_, url), http(url) as client:
        await submit(client, max_attempts=20)
        result = (await ended(client))["results"][0]
    assert (result["error_code"], result["attempt"]) == ("dispatch_refused", 1)


async def test_a_tasks_wrong_settings_end_its_group_at_once(tmp_path: Path) -> None:
    async def play(request: SessionDispatchRequest) -> SessionResult:
        return broken(request, "config", error="there is no image x")

    nodes = [StubNode(name, play=play, max_run_workers=1, metrics={"capacity": 1}) for name in ("a", "b")]
    async with stub_rollouts(tmp_path, nodes) as (_, url), http(url) as client:
        await submit(client, samples=8, max_attempts=5)
        status = await ended(client)
    assert status["counts"] == {"infrastructure": 8, "open": 0}
    assert {(one["error_code"], one["error"], one["reward"]) for one in status["results"]} == {("config", "there is no image x", None)}
    assert {one["attempt"] for one in status["results"]} == {0}
    assert sum(len(node.dispatched) for node in nodes) < 8


async def test_settings_that_are_right_elsewhere_are_tried_there(tmp_path: Path) -> None:
    first = asyncio.Event()

    async def works(request: SessionDispatchRequest) -> SessionResult:
        return graded(request)

    async def lacks(request: SessionDispatchRequest) -> SessionResult:
        await first.wait()
        return broken(request, "config", error="there is no image x")

    here, there = StubNode("a", play=works, max_run_workers=1), StubNode("b", play=lacks, max_run_workers=1)
    async with stub_rollouts(tmp_path, [here, there]) as (_, url), http(url) as client:
        await submit(client, samples=2)

        async def one_is_done() -> bool:
            return bool((await client.get("/rollout/task/t")).json()["completed_sessions"])

        await until(one_is_done)
        first.set()
        assert (await ended(client))["counts"] == {"graded": 2, "open": 0}


async def test_failures_of_the_infrastructure_go_to_another_node(tmp_path: Path) -> None:
    bad, good = StubNode("a-bad", play=breaks, max_run_workers=4), StubNode("b-good", max_run_workers=1)
    async with stub_rollouts(tmp_path, [bad, good]) as (_, url), http(url) as client:
        await submit(client, samples=6)
        status = await ended(client)
        assert status["counts"] == {"graded": 6, "open": 0}
        assert {one["node_id"] for one in status["results"]} == {"b-good"}
        retries = (await client.get("/rollout/status")).json()["retries"]
        assert retries["by_code"]["sandbox"] == len(bad.dispatched) >= 1
        assert retries["by_turns"]["0"]["failed"] == len(bad.dispatched)


async def test_attempts_used_up_are_an_end_without_a_reward(tmp_path: Path) -> None:
    async def play(request: SessionDispatchRequest) -> SessionResult:
        return broken(request, reward=0.0, turns=4)

    async with stub_rollouts(tmp_path, [StubNode(play=play)]) as (_, url), http(url) as client:
        await submit(client, max_attempts=2)
        status = await ended(client)
        assert status["status"] == "failed"
        result = status["results"][0]
        assert (result["status"], result["outcome"], result["reward"], result["attempt"]) == ("ERROR", "infrastructure", None, 1)
        session = (await client.get(f"/rollout/sessions/{result['session_id']}")).json()
        assert [one["end"] for one in session["attempts"]] == ["failed", "failed"]
        assert (await client.get("/rollout/status")).json()["retries"]["by_turns"]["2-4"]["failed"] == 2


async def test_a_policys_failure_is_not_retried(tmp_path: Path) -> None:
    async def play(request: SessionDispatchRequest) -> SessionResult:
        return graded(request, reward=0.0, status="TIMEOUT", outcome="policy", error_code="agent_timeout")

    one = StubNode(play=play)
    async with stub_rollouts(tmp_path, [one]) as (_, url), http(url) as client:
        await submit(client, samples=2)
        status = await ended(client)
        assert status["counts"] == {"policy": 2, "open": 0}
        assert len(one.dispatched) == 2


async def test_only_nodes_that_run_the_backend_get_the_session(tmp_path: Path) -> None:
    local = StubNode("a", metrics={"backends": ["local"]}, max_run_workers=8)
    docker = StubNode("b", metrics={"backends": ["docker"]})
    async with stub_rollouts(tmp_path, [local, docker]) as (_, url), http(url) as client:
        await submit(client, "waits", 2, runtime={"backend": "apptainer"})
        await submit(client, "d", 3, runtime={"backend": "docker"})
        assert {one["node_id"] for one in (await ended(client, "d"))["results"]} == {"b"}
        assert (await client.get("/rollout/task/waits")).json()["counts"] == {"open": 2}


async def test_a_dead_nodes_sessions_run_again_elsewhere(tmp_path: Path) -> None:
    dead, alive = StubNode("a-dead", play=never, max_run_workers=4), StubNode("b-alive")
    async with stub_rollouts(tmp_path, [dead], lease_seconds=0.6) as (_, url), http(url) as client:
        await submit(client, samples=3)
        await until(lambda: len(dead.running) == 3)
        await dead.leave()
        async with listening(alive.app) as own:
            await alive.join(url, TOKEN, own)
            status = await ended(client)
            await alive.leave()
        assert status["counts"] == {"graded": 3, "open": 0}
        assert {(one["node_id"], one["attempt"]) for one in status["results"]} == {("b-alive", 1)}
        nodes = {one["node_id"]: one["status"] for one in (await client.get("/nodes")).json()["nodes"]}
        assert nodes["a-dead"] == "lost"
        lost = (await client.get("/rollout/status")).json()["retries"]
        assert lost["by_code"] == {"lease_lost": 3}
        assert lost["by_turns"]["unknown"]["failed"] == 3


async def test_a_restarted_node_loses_what_it_does_not_list_at_once(tmp_path: Path) -> None:
    one = StubNode(play=never, max_run_workers=4)
    async with stub_rollouts(tmp_path, [one], lease_seconds=600) as (_, url), http(url) as client:
        await submit(client, samples=2)
        await until(lambda: len(one.running) == 2)
        kept, gone = list(one.running)
        one.running.pop(gone).cancel()
        one.instance = "new"

        async def quick(request: SessionDispatchRequest) -> SessionResult:
            return graded(request)

        one.play = quick
        await one.register()
        await until(lambda: len(one.dispatched) == 3)
        assert one.dispatched[2].attempt == 1
        assert one.dispatched[2].session_id == gone.split(".")[0]
        request = next(found for found in one.dispatched if found.attempt_id == kept)
        assert await one.deliver(graded(request)) == 200
        assert (await ended(client))["counts"] == {"graded": 2, "open": 0}


async def test_a_late_result_of_a_lost_attempt_counts_once(tmp_path: Path) -> None:
    cut_off = StubNode("a", play=never)
    async with stub_rollouts(tmp_path, [cut_off], lease_seconds=0.5) as (_, url), http(url) as client:
        await submit(client)
        await until(lambda: cut_off.dispatched)
        cut_off.silent = True
        first = cut_off.dispatched[0]

        async def lost() -> bool:
            session = (await client.get(f"/rollout/sessions/{first.session_id}")).json()
            return bool(session["attempts"][0]["end"] == "lost")

        await until(lost)
        assert await cut_off.deliver(graded(first, reward=0.5)) == 200
        assert await cut_off.deliver(graded(first, reward=0.5)) == 200  # the acknowledgement was lost
        status = await ended(client)
        assert [one["reward"] for one in status["results"]] == [0.5]
        assert await cut_off.deliver(graded(first, attempt=1, reward=1.0)) == 410


async def test_a_node_that_was_cut_off_goes_on_with_its_attempt(tmp_path: Path) -> None:
    one = StubNode("a", play=never)
    async with stub_rollouts(tmp_path, [one], lease_seconds=0.5) as (_, url), http(url) as client:
        await submit(client)
        await until(lambda: one.dispatched)
        one.silent, one.refuse = True, 503

        async def waits() -> bool:
            return bool((await client.get("/rollout/status")).json()["pending_sessions"] == 1)

        await until(waits)
        one.silent = False
        await until(lambda: one.dispatched)
        request = one.dispatched[0]

        async def back() -> bool:
            session = (await client.get(f"/rollout/sessions/{request.session_id}")).json()
            return bool(session["state"] == "running" and session["attempt"] == 0 and session["failures"] == 0)

        await until(back)
        assert await one.deliver(graded(request)) == 200
        assert (await ended(client))["results"][0]["attempt"] == 0


async def test_a_drained_node_ends_its_work_and_gets_no_more(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        await gate.wait()
        return graded(request)

    one = StubNode(play=play)
    async with stub_rollouts(tmp_path, [one]) as (service, url), http(url) as client:
        await submit(client, samples=1)
        await until(lambda: one.running)
        assert (await client.delete("/nodes/stub")).json() == {"node_id": "stub", "draining": True}
        await submit(client, "later", 1)
        gate.set()
        assert (await ended(client))["status"] == "completed"
        await asyncio.sleep(0.3)
        assert len(one.dispatched) == 1
        assert (await client.get("/nodes/stub")).json()["status"] == "draining"
        told, _ = await service.database.read(lambda connection: page(connection, 0))
        assert [event["type"] for event in told].count("node.drained") == 1
        assert (await client.delete("/nodes/nope")).status_code == 404
        one.instance = "new"
        await one.register()
        assert (await ended(client, "later"))["status"] == "completed"


async def test_a_deaf_node_is_told_by_its_heartbeats(tmp_path: Path) -> None:
    one = StubNode(play=never)
    one.deaf = True
    async with stub_rollouts(tmp_path, [one]) as (_, url), http(url) as client:
        await submit(client)
        await until(lambda: one.running)
        await client.delete("/rollout/task/t")
        await asyncio.sleep(0.3)
        assert one.running
        one.deaf = False
        await until(lambda: not one.running)


async def test_states_and_warnings_are_told_and_never_go_backwards(tmp_path: Path) -> None:
    one = StubNode(play=never)
    async with stub_rollouts(tmp_path, [one]) as (_, url), http(url) as client:
        await submit(client)
        await until(lambda: one.dispatched)
        request = one.dispatched[0]
        for status in ("INITIALIZING", "RUNNING", "READY"):
            await one.report(request, status, warning="no model call for 120 s" if status == "RUNNING" else None)
        session = (await client.get(f"/rollout/sessions/{request.session_id}")).json()
        assert session["status"] == "RUNNING"


async def test_a_node_without_the_attempt_list_keeps_its_leases(tmp_path: Path) -> None:
    """The reference's gateways tell metrics only."""
    one = StubNode(play=never)
    one.list_attempts = False
    async with stub_rollouts(tmp_path, [one], lease_seconds=1.5) as (_, url), http(url) as client:
        await submit(client)
        await until(lambda: one.dispatched)
        await asyncio.sleep(2.5)
        assert len(one.dispatched) == 1


async def test_a_node_that_answers_nothing_holds_up_no_other(tmp_path: Path) -> None:
    """Neither by what is brought to it nor by what is cancelled at it."""
    hung = asyncio.Event()

    async def silent(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["method"] == "DELETE":
            await hung.wait()
        await deaf.app(scope, receive, send)

    deaf, well = StubNode("deaf", play=never, max_run_workers=100, interval_s=5.0), StubNode("well", interval_s=5.0)
    async with running_service(tmp_path) as (service, url), http(url) as client, listening(silent) as first, listening(well.app) as second:
        await deaf.join(url, TOKEN, first)
        await submit(client, "many", 100)
        await until(lambda: len(deaf.running) == 100)
        await client.delete("/rollout/task/many")
        for _ in range(3):  # each round of the service's telling
            service._wakes["cancel"].set()
            await asyncio.sleep(0.1)
        await client.delete("/nodes/deaf")
        await well.join(url, TOKEN, second)
        await submit(client, "next", 4)
        assert (await ended(client, "next"))["counts"]["graded"] == 4
        assert len(service._calls) <= 100
        hung.set()
        await deaf.leave()
        await well.leave()


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_clock_that_is_set_loses_nothing(tmp_path: Path, hours: int) -> None:
    gate = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        await gate.wait()
        return graded(request)

    one = StubNode(play=play, interval_s=2.0)
    async with stub_rollouts(tmp_path, [one]) as (service, url), http(url) as client:
        await submit(client, samples=2, max_attempts=1)
        await until(lambda: len(one.running) == 2)
        service.database.clock = lambda: time.time() + 3600 * hours
        await asyncio.sleep(3.0)
        gate.set()
        status = await ended(client)
    assert status["counts"]["graded"] == 2
    assert {result["attempt"] for result in status["results"]} == {0}


async def test_a_clock_that_is_set_back_keeps_no_dead_node_alive(tmp_path: Path) -> None:
    dead, well = StubNode("dead", play=never, interval_s=0.2), StubNode("well", interval_s=0.2)
    async with stub_rollouts(tmp_path, [dead]) as (service, url), http(url) as client, listening(well.app) as own:
        await submit(client)
        await until(lambda: dead.running)
        await dead.leave()
        service.database.clock = lambda: time.time() - 3600
        await well.join(url, TOKEN, own)
        assert (await ended(client))["results"][0]["attempt"] == 1
        await well.leave()


async def test_a_service_that_stood_still_takes_no_session_for_lost(tmp_path: Path) -> None:
    """Its nodes could not be heard meanwhile."""
    gate = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        await gate.wait()
        return graded(request)

    one = StubNode(play=play, interval_s=1.0)
    async with stub_rollouts(tmp_path, [one]) as (_, url), http(url) as client:
        await submit(client, samples=2, max_attempts=1)
        await until(lambda: len(one.running) == 2)
        time.sleep(5.0)  # noqa: ASYNC251 - the whole process is to stand still
        gate.set()
        status = await ended(client)
        events = (await client.get("/rollout/status")).json()["retries"]["by_code"]
    assert status["counts"]["graded"] == 2
    assert "lease_lost" not in events
