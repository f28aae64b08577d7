"""The node's HTTP: the reference's JSON, and what it lacks; behind the token, beside the gateway's own routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from node_world import World, dispatch, ended, result_of, until

from polar.rollout.node import Node
from polar.runtime.base import ALIASES

Build = Callable[..., World]


@asynccontextmanager
async def client(node: Node, token: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"authorization": f"Bearer {token or node.gateway.admin_token}"}
    async with aiohttp.ClientSession(node.registration().gateway_url, headers=headers) as http:
        yield http


async def get(http: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with http.get(path) as answer:
        return answer.status, await answer.json(content_type=None)


async def test_a_dispatch_as_the_reference_sends_it(world: Build) -> None:
    async with world().node() as node, client(node) as http:
        body = {
            "session_id": "abc",
            "task_id": "task",
            "instruction": "call",
            "remaining_timeout_seconds": 20,
            "runtime": {"backend": "fake"},
            "agent": {"harness": "shell", "custom_shell": "fake-agent"},
            "builder": {"strategy": "prefix_merging", "config": {}},
            "evaluator": {"strategy": "node_test", "config": {}, "refresh_runtime": False},
            "metadata": {"group_id": "g"},
        }
        async with http.post("/sessions", json=body) as answer:
            assert answer.status == 201
            said = await answer.json()
        assert {said["session_id"], said["task_id"], said["node_id"]} == {"abc", "task", "node-1"}
        assert said["status"] == "REGISTERED"
        async with http.post("/sessions", json=body) as answer:
            assert answer.status == 409
            assert (await answer.json())["error"]["code"] == "duplicate_attempt"
        await until(lambda: node.books.find("abc") is None)
        status, shown = await get(http, "/sessions/abc")
        assert (status, shown["status"], shown["result"]["reward"]) == (200, "COMPLETED", 1.0)
        assert shown["result"]["trajectory"]["traces"]
        async with http.delete("/sessions/abc") as answer:
            assert (await answer.json())["deleted"]
        status, shown = await get(http, "/sessions/abc")
        assert (shown["result"]["reward"], shown["result"]["trajectory"]) == (1.0, None)  # the rows are among the artefacts


async def test_what_is_wrong_with_a_dispatch_is_said(world: Build) -> None:
    async with world(allow=["fake"]).node() as node, client(node) as http:
        good = dispatch().model_dump()
        for change, word in [
            ({"agent": {"harness": "shell", "nonsense": 1}}, "agent.nonsense"),
            ({"attempt": -1}, "attempt"),
            ({"runtime": {"backend": "docker"}}, "this node runs fake"),
            ({"session_id": "../x"}, "session_id"),
        ]:
            async with http.post("/sessions", json={**good, **change}) as answer:
                assert answer.status == 422
                assert word in (await answer.json())["error"]["message"]


async def test_a_full_or_draining_node_says_when_to_come_back(world: Build) -> None:
    async with world(max_queue=0, max_init_workers=1).node() as node, client(node) as http:
        node.draining = True
        async with http.post("/sessions", json=dispatch().model_dump()) as answer:
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_a_plain_session_is_the_gateways(world: Build) -> None:
    async with world().node() as node, client(node) as http:
        async with http.post("/sessions", json={"kind": "eval"}) as answer:
            assert answer.status == 201
            made = await answer.json()
        assert made["key"].startswith("sk-polar-")
        assert (await get(http, f"/sessions/{made['session_id']}"))[1]["status"] == "open"
        assert [one["session_id"] for one in (await get(http, "/sessions?status=open"))[1]["sessions"]] == [made["session_id"]]
        async with http.delete(f"/sessions/{made['session_id']}") as answer:
            assert (await answer.json())["closed"] is True
        assert (await get(http, "/admin/inference/status"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/sessions"),
        ("POST", "/sessions"),
        ("GET", "/sessions/x"),
        ("DELETE", "/sessions/x"),
        ("GET", "/sessions/x/completions"),
        ("GET", "/sessions/x/artifacts"),
        ("GET", "/sessions/x/artifacts/a"),
        ("GET", "/sessions/x/log"),
        ("GET", "/events"),
    ],
)
async def test_everything_but_health_needs_the_token(world: Build, method: str, path: str) -> None:
    async with world().node() as node, client(node, "wrong") as http:
        async with http.request(method, path) as answer:
            assert answer.status == 401
        assert (await get(http, "/health"))[0] == 200


async def test_control_routes_do_not_exist_where_sandboxes_look(world: Build) -> None:
    async with world().node() as node:
        base, token = node.gateway.config.model_url, node.gateway.admin_token
        async with aiohttp.ClientSession(base, headers={"authorization": f"Bearer {token}"}) as http:
            for path in ("/sessions", "/sessions/x", "/events", "/sessions/x/artifacts"):
                async with http.get(path) as answer:
                    assert answer.status in (401, 404)


async def test_health_has_the_references_fields(world: Build) -> None:
    async with world().node() as node, client(node) as http:
        await node.dispatch(dispatch("call\nsleep 60"))
        await until(lambda: node.stages.run.used)
        _, health = await get(http, "/health")
    assert health["status"] == "ok"
    assert health["node_id"] == "node-1"
    assert health["active_status_counts"] == {"RUNNING": 1}
    assert (health["active_sessions"], health["available_init"], health["available_run"], health["available_postrun"]) == (1, 4, 1, 4)
    assert {"paused", "inflight", "base_url", "engine"} <= set(health["inference"])
    assert health["metrics"]["run_inflight"] == 1


async def test_running_sessions_are_listed_and_cancelled(world: Build) -> None:
    async with world(max_run_workers=1).node() as node, client(node) as http:
        for session in ("a", "b"):
            await node.dispatch(dispatch("call\nsleep 60", session, task_id=f"task-{session}"))
        await until(lambda: node.stages.run.used and (node.books.find("b").status == "READY" or node.books.find("a").status == "READY"))
        _, listed = await get(http, "/sessions")
        assert sorted((one["session_id"], one["status"]) for one in listed["sessions"]) == [("a", "RUNNING"), ("b", "READY")]
        assert [one["session_id"] for one in (await get(http, "/sessions?status=RUNNING"))[1]["sessions"]] == ["a"]
        assert [one["session_id"] for one in (await get(http, "/sessions?task_id=task-b"))[1]["sessions"]] == ["b"]
        assert len((await get(http, "/sessions?limit=1"))[1]["sessions"]) == 1
        async with http.delete("/sessions/b", params={"attempt": "1"}) as answer:
            assert answer.status == 404
        async with http.delete("/sessions/b", params={"attempt": "0"}) as answer:
            assert (await answer.json())["deleted"] is True
        await until(lambda: node.books.find("b") is None)
        assert (await get(http, "/sessions/b"))[1]["result"]["outcome"] == "cancelled"


async def test_completions_of_an_attempt(world: Build) -> None:
    async with world().node() as node, client(node) as http:
        await node.dispatch(dispatch("call 2"))
        await until(lambda: node.books.find("ses_1") is None)
        _, found = await get(http, "/sessions/ses_1/completions")
        assert [one["number"] for one in found["completions"]] == [0, 1]
        assert found["completions"][0]["sampled_ids"]
        async with http.get("/sessions/ses_1/completions", headers={"accept": "application/x-ndjson"}) as answer:
            assert len((await answer.read()).splitlines()) == 2
        assert (await get(http, "/sessions/none/completions"))[0] == 404


async def test_artefacts_are_listed_and_fetched(world: Build) -> None:
    async with world().node() as node, client(node) as http:
        request = dispatch("call\nprint hello")
        await node.dispatch(request)
        await ended(node, request)
        _, found = await get(http, "/sessions/ses_1/artifacts")
        names = {one["path"] for one in found["files"]}
        assert {"answer.txt", "harness.stdout", "harness.stderr", "result.json", "trajectory.json.zst"} <= names
        async with http.get("/sessions/ses_1/artifacts/answer.txt") as answer:
            assert await answer.text() == "hello"
        for path in ("nope", "../../polar.db", "%2e%2e/%2e%2e/%2e%2e/polar.db", "evaluator", "..%2f..%2f..%2fpolar.db"):
            async with http.get(f"/sessions/ses_1/artifacts/{path}") as answer:
                assert answer.status in (404, 405), path
        assert (await get(http, "/sessions/ses_1/artifacts?attempt=7"))[1]["files"] == []


async def test_the_log_is_followed_until_the_agent_ends(world: Build) -> None:
    async with world().node() as node, client(node) as http:
        await node.dispatch(dispatch("call\nprint one\nsteal\nsleep 0.4"))
        await until(lambda: node.stages.run.used)
        async with http.get("/sessions/ses_1/log?follow=1") as answer:
            text = await answer.text()
        assert text.splitlines()[0] == "one"
        assert "sk-polar-" not in text.replace("sk-polar-***", "").replace("sk-polar-********", "")
        assert (await get_text(http, "/sessions/ses_1/log")) == text
        async with http.get("/sessions/ses_1/log?stream=secret") as answer:
            assert answer.status == 400


async def get_text(http: aiohttp.ClientSession, path: str) -> str:
    async with http.get(path) as answer:
        return await answer.text()


async def test_events_are_streamed(world: Build) -> None:
    async with world().node() as node, client(node) as http, http.get("/events") as answer:
        await answer.content.readuntil(b"\n\n")
        await node.dispatch(dispatch())
        seen = b""
        async with asyncio.timeout(10):
            while b'"status":"COMPLETED"' not in seen:
                seen += await answer.content.readany()
    assert b"event: session.state_changed" in seen
    assert b'"status":"RUNNING"' in seen


async def test_a_node_runs_its_backends_by_all_their_names(world: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "pretend", "fake")
    async with world(allow=["fake"]).node() as node:
        assert set(node.registration().model_dump()["metrics"]["backends"]) == {"fake", "pretend"}
        assert (await result_of(node, dispatch("call", runtime={"backend": "pretend"}))).outcome == "graded"
