"""What nobody should send, sent: odd numbers, odd JSON, receivers and nodes that misbehave. It is refused, and holds up nobody else."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from service_parts import ended, http, receiving, submit, task, until
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from polar.errors import ConfigError
from polar.rollout.checks import DEEPEST, check_task
from polar.rollout.database import unpacked
from polar.rollout.models import SessionDispatchRequest, SessionResult, TaskRequest
from polar.rollout.results import Delivered
from polar.rollout.submit import Submission
from polar.rollout.tables import tasks
from polar.testing.node import StubNode, graded
from polar.testing.rollout import TOKEN, listening, running_service, stub_rollouts

BIG = "9" * 30


async def never(request: SessionDispatchRequest) -> SessionResult | None:
    return None


def raw(fields: str, name: str = "odd") -> bytes:
    """A task's JSON text with further fields as they are written."""
    return orjson.dumps(task(name))[:-1] + b"," + fields.encode() + b"}"


async def code_of(client: httpx.AsyncClient, method: str, path: str, **more: Any) -> tuple[int, str | None]:
    answer = await client.request(method, path, **more)
    return answer.status_code, answer.json().get("error", {}).get("code")


@pytest.mark.parametrize(
    "fields",
    [
        '"on_policy_failure":NaN',
        '"on_policy_failure":1e999',
        '"runtime":{"cpus":Infinity}',
        '"runtime":{"prepare":[{"type":"exec","command":"x","retry_backoff":Infinity}]}',
        '"sampling":{"temperature":NaN}',
        f'"metadata":{{"a":{BIG}}}',
        f'"runtime":{{"memory_mb":{BIG}}}',
        f'"budget":{{"max_turns":{BIG}}}',
        '"metadata":' + '{"a":' * 150 + "1" + "}" * 150,
        '"callback_url":"http://[::1"',
        '"callback_url":"http://host:99999/"',
        '"callback_url":"http://a b/"',
    ],
)
async def test_what_cannot_be_kept_or_called_is_refused_at_submission_and_stops_nobody(tmp_path: Path, fields: str) -> None:
    async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
        assert await code_of(client, "POST", "/rollout/task/submit", content=raw(fields)) == (422, "invalid_request")
        await submit(client)
        assert (await ended(client))["counts"] == {"graded": 1, "open": 0}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), _JSON, max_size=3), st.floats())
@settings(max_examples=150, deadline=None)
def test_a_task_that_is_accepted_comes_back_as_it_was(metadata: dict[str, Any], reward: float) -> None:
    request = TaskRequest.model_validate({**task(), "metadata": metadata, "on_policy_failure": reward})
    try:
        checked = check_task(request)
        kept = Submission.of(checked, b"")
    except (ConfigError, UnicodeEncodeError):
        return
    assert TaskRequest.model_validate_json(unpacked(kept.packed)) == checked


def test_a_task_may_be_as_deep_as_it_says() -> None:
    def nested(levels: int) -> dict[str, Any]:
        return {"a": nested(levels - 1)} if levels else {}

    check_task(TaskRequest.model_validate(task(metadata=nested(DEEPEST - 1))))
    with pytest.raises(ConfigError, match="levels deep"):
        check_task(TaskRequest.model_validate(task(metadata=nested(DEEPEST + 1))))


async def test_a_kept_task_that_cannot_be_read_ends_alone(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (service, url), http(url) as client:
        await submit(client, "spoiled", samples=3)
        await submit(client, "sound")
        spoiled = tasks.update().where(tasks.c.name == "spoiled").values(request=b'\x00{"task_id":"spoiled"}')
        await service.database.write(lambda tx: tx.connection.execute(spoiled))
        node = StubNode()
        async with listening(node.app) as own:
            await node.join(url, TOKEN, own)
            assert (await ended(client, "sound"))["counts"] == {"graded": 1, "open": 0}
            found = await ended(client, "spoiled")
            await node.leave()
    assert found["counts"] == {"infrastructure": 3, "open": 0}
    assert {one["error_code"] for one in found["results"]} == {"task_unreadable"}
    assert {one["reward"] for one in found["results"]} == {None}


@pytest.mark.parametrize("number", [BIG, "9" * 4000, "9223372036854775808", "-1", "1e5", "²", ""])
async def test_a_cursor_that_was_never_given_is_refused(tmp_path: Path, number: str) -> None:
    async with running_service(tmp_path) as (_, url), http(url) as client:
        await submit(client)
        for path in ("/tasks?cursor=", "/tasks/t/sessions?cursor=", "/events?after="):
            assert await code_of(client, "GET", path + number) == (400, "invalid_cursor")
        if number.isascii() and number:
            assert await code_of(client, "GET", "/events", headers={"last-event-id": number}) == (400, "invalid_cursor")


@pytest.mark.parametrize("body", [b"{", b"\xff", b"NaN", b"[" * 100_000, b'{"a":' * 5_000, b"7"])
async def test_a_body_that_is_no_json_is_refused_on_every_route(tmp_path: Path, body: bytes) -> None:
    async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
        for path in (
            "/rollout/task/submit",
            "/nodes/register",
            "/nodes/stub/heartbeat",
            "/callbacks/session_result",
            "/callbacks/session_state",
        ):
            assert await code_of(client, "POST", path, content=body) == (422, "invalid_request"), path


@pytest.mark.parametrize(
    "fields",
    [
        {"heartbeat_interval_seconds": 0},
        {"heartbeat_interval_seconds": -5},
        {"heartbeat_interval_seconds": "Infinity"},
        {"heartbeat_interval_seconds": "NaN"},
        {"max_run_workers": -5},
        {"max_init_workers": 10**12},
        {"gateway_url": "nonsense"},
        {"gateway_url": ""},
    ],
)
async def test_a_node_that_cannot_be_is_not_registered(tmp_path: Path, fields: dict[str, Any]) -> None:
    async with running_service(tmp_path) as (_, url), http(url) as client:
        body = {"node_id": "odd", "gateway_url": "http://127.0.0.1:1", **fields}
        assert await code_of(client, "POST", "/nodes/register", json=body) == (422, "invalid_request")
        assert (await client.get("/nodes")).json() == {"nodes": []}


@pytest.mark.parametrize(
    "metrics", [f'{{"x":{BIG}}}', '{"capacity":NaN}', '{"capacity":-1}', '{"backends":{"a":1}}', '{"default_runtime":7}']
)
async def test_a_node_may_say_anything_of_itself(tmp_path: Path, metrics: str) -> None:
    node = StubNode()
    async with stub_rollouts(tmp_path, [node]) as (_, url), http(url) as client:
        node.silent = True
        answer = await client.post("/nodes/stub/heartbeat", content=f'{{"metrics":{metrics},"attempts":["x.{BIG}","","."]}}')
        assert answer.status_code == 200
        node.silent = False
        await submit(client)
        assert (await client.get("/nodes")).status_code == 200
        await client.delete("/rollout/task/t")


@pytest.mark.parametrize("odd", [{"metadata": {"a": int(BIG)}}, {"trajectory": {"a": [int(BIG)]}}, {"answer": "\ud800"}])
def test_a_result_with_values_that_json_readers_refuse_is_kept_as_they_take_them(odd: dict[str, Any]) -> None:
    result = SessionResult(session_id="s", task_id="t", status="COMPLETED", reward=1.0).model_copy(update=odd)
    kept = SessionResult.model_validate_json(unpacked(Delivered.of(result).body))
    assert (kept.outcome, kept.reward) == ("graded", 1.0)
    assert orjson.loads(orjson.dumps(kept.model_dump())) == kept.model_dump()


async def test_a_reward_that_is_no_number_is_no_reward(tmp_path: Path) -> None:
    node = StubNode(play=never)
    async with stub_rollouts(tmp_path, [node]) as (_, url), http(url) as client:
        await submit(client, samples=2, early_stop={"min_usable": 1})
        await until(lambda: len(node.dispatched) == 2)
        body = {**graded(node.dispatched[0]).model_dump(), "reward": 7.125}
        answer = await client.post("/callbacks/session_result", content=orjson.dumps(body).replace(b"7.125", b"NaN"))
        assert answer.status_code == 200
        status = (await client.get("/rollout/task/t")).json()
    assert (status["status"], status["results"][0]["reward"]) == ("running", None)


async def test_a_redirect_is_no_receipt(tmp_path: Path) -> None:
    """Followed, a POST becomes a GET of a page that answers 200."""
    asked: list[str] = []

    async def moved(request: Request) -> Response:
        asked.append(request.method)
        return RedirectResponse("/page", 302)

    async def page(request: Request) -> Response:
        asked.append(request.url.path)
        return Response(b"log in first")

    app = Starlette(routes=[Route("/done", moved, methods=["POST"]), Route("/page", page)])
    async with listening(app) as receiver, stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client, callback_url=f"{receiver}/done")
        await until(lambda: len(asked) >= 2)
        assert set(asked) == {"POST"}
        assert (await client.get("/rollout/status")).json()["deliveries"] == {"due": 1}


async def test_a_receiver_that_never_answers_holds_up_no_other(tmp_path: Path) -> None:
    held = asyncio.Event()

    async def hang(request: Request) -> Response:
        await held.wait()
        return Response()

    silent = Starlette(routes=[Route("/{path:path}", hang, methods=["POST"])])
    async with listening(silent) as dead, receiving() as (receiver, callback), stub_rollouts(tmp_path) as (_, url), http(url) as client:
        for number in range(4):
            await submit(client, f"dead-{number}", samples=16, callback_url=f"{dead}/{number}", session_callbacks=True)
        for number in range(4):
            await ended(client, f"dead-{number}")
        await submit(client, "t", samples=4, callback_url=callback, session_callbacks=True)
        await until(lambda: len(receiver.bodies) == 5, 15)
        held.set()


async def test_two_processes_of_one_name_do_not_take_each_others_sessions_for_lost(tmp_path: Path) -> None:
    async def slow(request: SessionDispatchRequest) -> SessionResult:
        await asyncio.sleep(1.5)
        return graded(request)

    first, second = StubNode("twin", play=slow), StubNode("twin", play=slow)
    async with stub_rollouts(tmp_path, [first, second]) as (_, url), http(url) as client:
        await asyncio.sleep(1.0)  # heartbeats of both
        body = {"node_id": "twin", "gateway_url": first.url, "instance": first.instance, "heartbeat_interval_seconds": 0.2}
        assert await code_of(client, "POST", "/nodes/register", json=body) == (409, "node_id_taken")
        await submit(client, samples=4, max_attempts=1)
        assert (await ended(client))["counts"] == {"graded": 4, "open": 0}
        assert {one.session_id for one in first.dispatched} == set()
        await second.leave()  # the one that is left takes over once the other is silent

        async def taken_over() -> bool:
            return bool((await client.get("/nodes/twin")).json()["instance"] == first.instance)

        await until(taken_over)


@pytest.mark.parametrize("runtime", [None, {}, {"env": {"A": "1"}}])
async def test_a_task_without_a_backend_waits_for_a_node_that_no_open_listener_can_be_reached_from(
    tmp_path: Path, runtime: dict[str, object] | None
) -> None:
    shared = StubNode("shared", metrics={"default_runtime": {"backend": "local", "network": "gateway"}})
    apart = StubNode("apart", metrics={"default_runtime": {"backend": "bubblewrap", "network": "gateway"}})
    async with running_service(tmp_path, compat_open=True) as (_, url), http(url) as client:
        await submit(client, samples=3, runtime=runtime)  # no node has said yet what its default is
        async with listening(shared.app) as one, listening(apart.app) as two:
            await shared.join(url, TOKEN, one)
            await asyncio.sleep(0.5)
            assert shared.dispatched == []
            await apart.join(url, TOKEN, two)
            assert (await ended(client))["counts"] == {"graded": 3, "open": 0}
            await asyncio.gather(shared.leave(), apart.leave())
    assert shared.dispatched == []


async def test_a_task_from_before_the_open_listener_ends_where_its_sandbox_could_reach_it(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (_, url), http(url) as client:
        await submit(client, runtime={"backend": "local"})
    node = StubNode()
    async with stub_rollouts(tmp_path, [node], compat_open=True) as (_, url), http(url) as client:
        found = await ended(client)
    assert [one["error_code"] for one in found["results"]] == ["shares_host"]
    assert node.dispatched == []


async def test_an_evaluators_own_sandbox_does_not_reach_the_open_listener(tmp_path: Path) -> None:
    part = {"strategy": "harbor", "config": {"verifier_runtime": {"network": "host"}}}
    evaluator = {"strategy": "composition", "config": {"parts": [part]}}
    async with running_service(tmp_path, compat_open=True) as (_, url), http(url) as client:
        body = task(runtime={"backend": "bubblewrap"}, evaluator=evaluator)
        status, code = await code_of(client, "POST", "/rollout/task/submit", json=body)
    assert (status, code) == (403, "shares_host")
