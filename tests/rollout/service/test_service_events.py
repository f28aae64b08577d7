"""The event stream: in order, without gaps, resumable."""

from __future__ import annotations

import asyncio
from pathlib import Path

from service_parts import ended, http, submit, until

from polar.rollout.client import AsyncClient
from polar.rollout.events import page
from polar.testing.node import StubNode
from polar.testing.rollout import TOKEN, running_service, stub_rollouts


async def read(client: object, path: str, count: int, headers: dict[str, str] | None = None) -> list[tuple[int, str]]:
    """The first events of a stream: their ids and types."""
    found: list[tuple[int, str]] = []
    async with client.stream("GET", path, headers=headers or {}) as answer:  # type: ignore[attr-defined]
        number = 0
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("event: "):
                found.append((number, line[7:]))
                if len(found) == count:
                    break
    return found


async def test_a_stream_resumes_after_the_last_id(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client, samples=3)
        await ended(client)
        first = await read(client, "/events?after=0", 4)
        rest = await read(client, "/events", 4, {"last-event-id": str(first[-1][0])})
        assert [seq for seq, _ in first + rest] == list(range(1, 9))
        assert [kind for _, kind in first][:2] == ["node.registered", "task.submitted"]


async def test_ids_go_on_over_a_restart(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client)
        await ended(client)
        before = await read(client, "/events?after=0", 5)
    async with running_service(tmp_path) as (_, url), http(url) as client:
        await submit(client, "u")
        again = await read(client, "/events?after=0", 6)
    assert again[:5] == before
    assert again[5][0] == 6
    assert again[5][1] in ("task.submitted", "node.lost")


async def test_a_stream_can_be_of_one_task(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path, [StubNode(max_run_workers=8)]) as (_, url), http(url) as client:
        await submit(client, "a", 2)
        await submit(client, "b", 2)
        await ended(client, "a")
        await ended(client, "b")
        async with AsyncClient(url, TOKEN) as polar:
            kinds = []
            async for event in polar.events(task_id="b", after=0):
                assert event.task_id == "b"
                kinds.append(event.type)
                if event.type == "task.finished":
                    break
        assert kinds.count("session.finished") == 2
        assert kinds[0] == "task.submitted"


async def test_what_retention_forgot_is_a_told_gap(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client)
        await ended(client)
    async with running_service(tmp_path, retention_days=1e-9) as (service, url), http(url) as client:

        async def forgotten() -> bool:
            found, _ = await service.database.read(lambda connection: page(connection, 0))
            return len(found) == 1

        await until(forgotten)
        assert (await read(client, "/events", 1, {"last-event-id": "1"}))[0][1] == "gap"


async def test_a_number_of_another_database_is_a_told_gap_and_all_of_this_one_follows(tmp_path: Path) -> None:
    async with stub_rollouts(tmp_path) as (_, url), http(url) as client:
        await submit(client)
        await ended(client)
        seen = await read(client, "/events", 3, {"last-event-id": "5000"})
    assert [seen[0][1], seen[1][0], seen[2][0]] == ["gap", 1, 2]


async def test_a_silent_stream_says_that_it_lives(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (service, _):
        lines = service.feed.lines(None, None, None, ping_s=0.05)
        assert await anext(lines) == b": polar\n\n"
        assert await anext(lines) == b": ping\n\n"
        await lines.aclose()


async def test_a_stream_of_one_task_says_that_it_lives_while_only_others_have_news(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (service, _):

        async def others() -> None:
            while True:
                service.feed.wake()
                await asyncio.sleep(0.005)

        news = asyncio.create_task(others())
        lines = service.feed.lines(None, "mine", None, ping_s=0.05)
        try:
            async with asyncio.timeout(20):
                assert await anext(lines) == b": polar\n\n"
                assert await anext(lines) == b": ping\n\n"
        finally:
            news.cancel()
            await lines.aclose()
