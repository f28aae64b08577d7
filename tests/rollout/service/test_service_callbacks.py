"""Callbacks: at least once, under one id, over failures and restarts."""

from __future__ import annotations

import os
from pathlib import Path

from service_parts import ended, http, receiving, submit, until
from starlette.routing import Route

from polar.rollout.models import SessionResult, TaskResult
from polar.testing.node import StubNode
from polar.testing.rollout import running_service, stub_rollouts


async def test_a_tasks_result_is_called_back_with_its_files(tmp_path: Path) -> None:
    async with receiving() as (receiver, callback), stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client, samples=3, callback_url=callback)
        await until(lambda: receiver.bodies)
        body = receiver.bodies[0]
        found = TaskResult.model_validate(body)
        assert found.status == "completed"
        assert len(found.results) == len(found.result_paths) == 3
        assert sorted(map(os.path.basename, found.result_paths)) == sorted(os.listdir(tmp_path / "saved" / "task_t"))
        assert receiver.headers[0]["x-polar-delivery"] == body["delivery_id"]
        assert receiver.headers[0]["x-polar-event"] == "task.finished"


async def test_sessions_are_called_back_when_asked_for(tmp_path: Path) -> None:
    async with receiving() as (receiver, callback), stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client, samples=3, callback_url=callback, session_callbacks=True)
        await until(lambda: len(receiver.bodies) == 4)
        told = [
            SessionResult.model_validate(body)
            for body, headers in zip(receiver.bodies, receiver.headers, strict=True)
            if headers["x-polar-event"] == "session.finished"
        ]
        assert len({one.session_id for one in told}) == 3
        assert {one.delivery_id for one in told} == {
            headers["x-polar-delivery"] for headers in receiver.headers if headers["x-polar-event"] == "session.finished"
        }


async def test_a_callback_is_repeated_under_its_id_until_it_is_taken(tmp_path: Path) -> None:
    async with receiving(fail_first=3) as (receiver, callback), stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client, callback_url=callback)
        await until(lambda: len(receiver.bodies) == 4)
        assert len({headers["x-polar-delivery"] for headers in receiver.headers}) == 1

        async def done() -> bool:
            return bool((await client.get("/rollout/status")).json()["deliveries"] == {"done": 1})

        await until(done)
        assert len(receiver.bodies) == 4


async def test_a_callback_survives_a_restart(tmp_path: Path) -> None:
    async with receiving() as (receiver, callback):
        async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
            dead = callback.replace("/done", "/nowhere")
            await submit(client, callback_url=dead)
            await ended(client)
        assert receiver.bodies == []
        receiver.app.router.routes[0] = Route("/nowhere", receiver._take, methods=["POST"])
        async with running_service(tmp_path):
            await until(lambda: receiver.bodies)
        assert receiver.bodies[0]["task_id"] == "t"


async def test_a_callback_that_is_given_up_is_told_and_can_be_tried_again(tmp_path: Path) -> None:
    retry = {"first_seconds": 0.05, "longest_seconds": 0.05, "give_up_seconds": 0.3}
    async with (
        stub_rollouts(tmp_path, callback_retry=retry) as (_, url),
        http(url) as client,
        receiving(fail_first=10**6) as (bad, callback),
    ):
        await submit(client, callback_url=callback)

        async def given_up() -> bool:
            return bool((await client.get("/rollout/status")).json()["deliveries"] == {"given_up": 1})

        await until(given_up)
        tries = len(bad.bodies)
        bad.fail_first = 0
        assert (await client.post("/rollout/task/t/redeliver")).json() == {"task_id": "t", "due": 1}
        await until(lambda: len(bad.bodies) == tries + 1)
        assert (await ended(client))["counts"]["graded"] == 1


async def test_a_callback_to_nobody_holds_nothing_up(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path, [StubNode(max_run_workers=8)]) as (_, url), http(url) as client:
        for number in range(20):
            await submit(client, f"t{number}", callback_url="http://127.0.0.1:1/x")
        async with receiving() as (receiver, callback):
            await submit(client, "last", callback_url=callback)
            await until(lambda: receiver.bodies)


async def test_retention_forgets_tasks_and_their_files_but_not_what_is_owed(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path) as (service, url), http(url) as client:
        await submit(client, "old")
        await submit(client, "owed", callback_url="http://127.0.0.1:1/x")
        for name in ("old", "owed"):
            await ended(client, name)
        await until(lambda: len(list((tmp_path / "saved").glob("*/*.json"))) == 2)

        async def saved() -> bool:
            return len((await client.get("/rollout/task/old")).json()["result_paths"]) == 1

        await until(saved)
    async with running_service(tmp_path, retention_days=1e-9) as (service, url), http(url) as client:

        async def gone() -> bool:
            return (await client.get("/rollout/task/old")).status_code == 404

        await until(gone)
        assert (await client.get("/rollout/task/owed")).status_code == 200
        assert not (tmp_path / "saved" / "task_old").exists()
        assert service.trouble is None
