"""The HTTP API: what it takes, what it answers, who may call it."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import orjson
import pytest
from service_parts import ended, http, submit, task, until

from polar.rollout.models import SessionDispatchRequest, SessionResult, TaskStatus
from polar.testing.node import StubNode, graded
from polar.testing.rollout import TOKEN, listening, running_service, stub_rollouts


async def never(request: SessionDispatchRequest) -> SessionResult | None:
    return None


async def test_a_task_becomes_a_group_of_results(tmp_path: Path) -> None:
    node = StubNode(max_run_workers=8)
    async with stub_rollouts(tmp_path, [node]) as (_, url), http(url) as client:
        assert await submit(client, samples=8, metadata={"group_id": 3}) == {"task_id": "t", "status": "running"}
        status = await ended(client)
    assert status["status"] == "completed"
    assert status["counts"] == {"graded": 8, "open": 0}
    assert [one["sample"] for one in status["results"]] == list(range(8))
    assert len({one["delivery_id"] for one in status["results"]}) == 8
    assert all(one["metadata"] == {"group_id": 3} for one in status["results"])
    TaskStatus.model_validate(status)


async def test_results_are_files_in_the_references_layout(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client, samples=2)
        await ended(client)
        found = await until(lambda: sorted((tmp_path / "saved" / "task_t").glob("ses_*.json")))
        status = (await client.get("/rollout/task/t")).json()
    session_ids = {one["session_id"] for one in status["results"]}
    assert {path.stem.removeprefix("ses_") for path in found} <= session_ids
    assert orjson.loads(found[0].read_bytes())["outcome"] == "graded"


async def test_a_trajectory_comes_back_as_it_went_in(tmp_path: Path) -> None:
    trajectory = {"status": "COMPLETED", "traces": [{"response_logprobs": [-0.10000000149011612, -1e-30], "response_ids": [1, 151643]}]}

    async def play(request: SessionDispatchRequest) -> SessionResult:
        return graded(request, trajectory=trajectory)

    async with stub_rollouts(tmp_path, [StubNode(play=play)]) as (_, url), http(url) as client:
        await submit(client)
        assert (await ended(client))["results"][0]["trajectory"] == trajectory


async def test_a_running_task_id_is_a_conflict_and_an_ended_one_is_free(tmp_path: Path) -> None:
    node = StubNode(play=never)
    async with stub_rollouts(tmp_path, [node]) as (_, url), http(url) as client:
        await submit(client)
        again = await client.post("/rollout/task/submit", json=task())
        assert (again.status_code, again.json()["error"]["code"]) == (409, "task_running")
        await client.delete("/rollout/task/t")
        await submit(client, samples=2)
        assert (await client.get("/rollout/task/t")).json()["total_sessions"] == 2
        assert len((await client.get("/tasks")).json()["tasks"]) == 1


async def test_an_empty_idempotency_key_is_none(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (_, url), http(url) as client:
        for name in ("a", "b"):
            answer = await client.post("/rollout/task/submit", json=task(name), headers={"idempotency-key": ""})
            assert (answer.status_code, answer.json().get("task_id")) == (200, name)


async def test_a_truth_value_is_no_reward_and_no_number_is_no_time(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (_, url), http(url) as client:
        answer = await client.post("/rollout/task/submit", json=task(on_policy_failure=True))
        assert (answer.status_code, "on_policy_failure" in answer.text) == (422, True)
        assert (await client.get("/tasks?since=nan")).status_code == 422


async def test_an_idempotency_key_gives_the_same_answer_and_refuses_another_body(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path, [StubNode(play=never)]) as (_, url), http(url) as client:
        key = {"idempotency-key": "k1"}
        first = await client.post("/rollout/task/submit", json=task(), headers=key)
        second = await client.post("/rollout/task/submit", json=task(), headers=key)
        other = await client.post("/rollout/task/submit", json=task("u"), headers=key)
        assert first.json() == second.json() == {"task_id": "t", "status": "running"}
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
        assert len((await client.get("/tasks")).json()["tasks"]) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"instructions": "x"}, "is instruction meant?"),
        ({"agent": {"harness": "pie"}}, "no harness is called"),
        ({"agent": {"harness": "shell"}}, "needs a command in custom_shell"),
        ({"agent": {"harness": "gemini-cli", "dialect": "anthropic"}}, "speaks google"),
        ({"agent": {"harness": "pi", "settings": {"context": "long"}}}, "context"),
        ({"builder": {"strategy": "nope"}}, "no builder is called"),
        ({"evaluator": {"strategy": "nope"}}, "no evaluator is called"),
        ({"callback_url": "ftp://x"}, "callback_url"),
        ({"session_callbacks": True}, "needs a callback_url"),
        ({"early_stop": {"min_usable": 2}}, "early_stop.min_usable"),
        ({"num_samples": 0}, "num_samples"),
        ({"task_id": "../x"}, "task_id"),
    ],
)
async def test_a_wrong_task_is_refused_with_the_reason(tmp_path: Path, change: dict[str, object], said: str) -> None:
    async with running_service(tmp_path) as (_, url), http(url) as client:
        answer = await client.post("/rollout/task/submit", json={**task(), **change})
        assert answer.status_code == 422
        assert said in answer.json()["error"]["message"]
        assert answer.json()["detail"] == answer.json()["error"]["message"]


async def test_too_many_open_sessions_are_refused_for_now(tmp_path: Path) -> None:
    async with running_service(tmp_path, max_open_sessions=5) as (_, url), http(url) as client:
        await submit(client, samples=4)
        answer = await client.post("/rollout/task/submit", json=task("u", 2))
        assert answer.status_code == 429
        assert "retry-after" in answer.headers
        await submit(client, "v", 1)


async def test_everything_but_health_needs_the_token(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (service, url), http(url, token=None) as client:
        assert (await client.get("/health")).status_code == 200
        document = service.app._app  # the routes behind the guard
        for route in document.routes:
            if route.path == "/health":
                continue
            for method in route.methods - {"HEAD"}:
                answer = await client.request(method, route.path.replace("{path:path}", "x"))
                assert answer.status_code == 401, route.path
        wrong = await client.get("/nodes", headers={"authorization": f"Bearer {TOKEN}x"})
        assert wrong.status_code == 401


async def test_the_open_listener_asks_for_no_token_but_for_a_local_program(tmp_path: Path) -> None:
    async with running_service(tmp_path, compat_open=True) as (service, _), listening(service.open_app) as url, http(url, None) as client:
        docker = {"backend": "docker", "network": "gateway"}
        assert (await client.post("/rollout/task/submit", json=task(runtime=docker))).status_code == 200
        assert (await client.get("/nodes", headers={"origin": "http://evil.example"})).status_code == 403
        assert (await client.get("/nodes", headers={"host": "evil.example"})).status_code == 403


@pytest.mark.parametrize("runtime", [{"backend": "local"}, {"backend": "docker", "network": "host"}, None])
async def test_with_the_open_listener_sandboxes_on_the_hosts_network_are_refused(tmp_path: Path, runtime: object) -> None:
    node = StubNode(metrics={"default_runtime": {"backend": "local"}})
    async with stub_rollouts(tmp_path, [node], compat_open=True) as (_, url), http(url) as client:
        answer = await client.post("/rollout/task/submit", json=task(runtime=runtime))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "shares_host")


async def test_lists_page_by_cursor(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (_, url), http(url) as client:
        for number in range(5):
            await submit(client, f"t{number}", 3)
        seen: list[str] = []
        cursor = None
        while True:
            page = (await client.get("/tasks", params={"limit": 2, **({"cursor": cursor} if cursor else {})})).json()
            seen += [row["task_id"] for row in page["tasks"]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == ["t4", "t3", "t2", "t1", "t0"]
        first = (await client.get("/tasks/t0/sessions", params={"limit": 2})).json()
        rest = (await client.get("/tasks/t0/sessions", params={"limit": 2, "cursor": first["next_cursor"]})).json()
        assert [row["sample"] for row in first["sessions"] + rest["sessions"]] == [0, 1, 2]
        assert rest["next_cursor"] is None
        assert (await client.get("/tasks", params={"cursor": "x"})).json()["error"]["code"] == "invalid_cursor"
        assert (await client.get("/tasks", params={"harness": "codex"})).json()["tasks"] == []


async def test_cancelling_ends_sessions_here_and_at_the_node(tmp_path: Path) -> None:
    node = StubNode(play=never, max_run_workers=1)
    async with stub_rollouts(tmp_path, [node]) as (_, url), http(url) as client:
        await submit(client, samples=9)
        await until(lambda: len(node.running) == 4)
        answer = (await client.post("/rollout/task/t/cancel")).json()
        assert answer == {"task_id": "t", "status": "failed", "cancelled_sessions": 9}
        await until(lambda: not node.running)
        status = await ended(client)
        assert status["counts"] == {"cancelled": 9, "open": 0}
        assert {one["status"] for one in status["results"]} == {"ERROR"}
        assert (await client.delete("/rollout/task/t")).json()["cancelled_sessions"] == 0


async def test_one_session_can_be_cancelled(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path, [StubNode(play=never)]) as (_, url), http(url) as client:
        await submit(client, samples=2)
        rows = (await client.get("/tasks/t/sessions")).json()["sessions"]
        assert (await client.delete(f"/rollout/sessions/{rows[1]['session_id']}")).json()["cancelled"] is True
        assert (await client.delete(f"/rollout/sessions/{rows[1]['session_id']}")).json()["cancelled"] is False
        status = (await client.get("/rollout/task/t")).json()
        assert status["counts"] == {"cancelled": 1, "open": 1}


async def test_an_early_stop_ends_the_group_when_it_has_enough(tmp_path: Path) -> None:
    async def play(request: SessionDispatchRequest) -> SessionResult | None:
        return graded(request) if request.sample < 3 else None

    node = StubNode(play=play, max_run_workers=8)
    async with stub_rollouts(tmp_path, [node]) as (_, url), http(url) as client:
        await submit(client, samples=8, early_stop={"min_usable": 3})
        status = await ended(client)
        assert status["status"] == "completed"
        assert status["counts"] == {"graded": 3, "cancelled": 5, "open": 0}
        assert {one["error_code"] for one in status["results"] if one["outcome"] == "cancelled"} == {"early_stop"}


async def test_an_early_stop_may_wait_for_those_about_to_end(tmp_path: Path) -> None:
    async def play(request: SessionDispatchRequest) -> SessionResult | None:
        await asyncio.sleep(0.3 * (request.sample == 1))
        return graded(request) if request.sample < 2 else None

    async with stub_rollouts(tmp_path, [StubNode(play=play, max_run_workers=8)]) as (_, url), http(url) as client:
        await submit(client, samples=3, early_stop={"min_usable": 1, "grace_seconds": 1.0})
        assert (await ended(client))["counts"] == {"graded": 2, "cancelled": 1, "open": 0}


async def test_artefacts_and_logs_come_from_the_node(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client)
        session = (await ended(client))["results"][0]["session_id"]
        base = f"/rollout/sessions/{session}"
        assert (await client.get(base + "/artifacts")).json() == {"files": [{"path": "logs/agent.txt", "size": 5}]}
        assert (await client.get(base + "/artifacts/logs/agent.txt")).content == b"hello"
        assert (await client.get(base + "/artifacts/nope")).status_code == 404
        assert (await client.get(base + "/artifacts/logs/%2e%2e/x")).status_code in (400, 404)
        assert (await client.get(base + "/log")).text == "printed by the harness\n"
        assert (await client.get(base + "/result")).json()["reward"] == 1.0


async def test_results_stream_as_sessions_end(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        if request.sample:
            await gate.wait()
        return graded(request)

    async with stub_rollouts(tmp_path, [StubNode(play=play, max_run_workers=4)]) as (_, url), http(url) as client:
        await submit(client, samples=3)
        async with client.stream("GET", "/rollout/task/t/results") as answer:
            samples = []
            async for line in answer.aiter_lines():
                samples.append(orjson.loads(line)["sample"])
                gate.set()
        assert samples[0] == 0
        assert sorted(samples) == [0, 1, 2]
        async with client.stream("GET", "/rollout/task/t/results?after=2") as answer:
            assert len([line async for line in answer.aiter_lines()]) == 1


async def test_counts_for_people_and_for_prometheus(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client, samples=3)
        await ended(client)
        told = (await client.get("/rollout/status")).json()
        assert told["outcomes"] == {"graded": 3}
        assert told["retries"]["by_turns"] == {"2-4": {"attempts": 3, "failed": 0}}
        text = (await client.get("/metrics")).text
        assert 'polar_rollout_outcomes{outcome="graded"} 3.0' in text
        assert 'polar_rollout_attempts{turns="2-4"} 3.0' in text


async def test_the_api_describes_itself(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (service, url), http(url) as client:
        document = (await client.get("/openapi.json")).json()
        page = (await client.get("/docs")).text
    routes = {(route.path.replace(":path", ""), method) for route in service.app._app.routes for method in route.methods - {"HEAD"}}
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert routes - {("/openapi.json", "GET"), ("/docs", "GET")} == described
    names = set(document["components"]["schemas"])
    text = orjson.dumps(document).decode()
    assert {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]} <= names
    assert "<script" not in page
    assert all(path in page for path in document["paths"])


async def test_a_store_in_trouble_is_an_overload_not_a_loss(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path, [StubNode(play=never)]) as (_, url), http(url) as client:
        await submit(client)
        blocker = sqlite3.connect(tmp_path / "rollout.db", isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")
        answer = await client.post("/rollout/task/submit", json=task("u"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store")
        assert (await client.get("/health")).status_code == 503
        blocker.execute("ROLLBACK")
        blocker.close()

        async def healthy() -> bool:
            return (await client.get("/health")).status_code == 200

        await until(healthy)
        await submit(client, "v")
