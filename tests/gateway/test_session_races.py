"""A session that ends, is loaded or is dropped from memory while requests of it are on their way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_players import Chat, until

from polar.gateway import sessions as sessions_module
from polar.store import open_store
from polar.testing.engine import Reply

Open = Callable[..., Any]


class SlowToLoad:
    """A store that hands out heads only while `free` is set, and counts how often it was asked for them."""

    def __init__(self, folder: Path) -> None:
        self.inner = open_store(str(folder / "polar.db"))
        self.free = asyncio.Event()
        self.asked = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def healthy(self) -> str | None:
        return self.inner.healthy

    async def heads(self, session_id: str) -> Any:
        self.asked += 1
        await self.free.wait()
        return await self.inner.heads(session_id)


async def test_a_session_that_ends_while_it_is_being_loaded_is_closed(gateway: Open, tmp_path: Path) -> None:
    store = SlowToLoad(tmp_path)
    async with gateway(lambda call: "Hi.", store=store) as gw:
        session, client = await gw.session()
        early = Chat().user("Hi").start(client)
        await until(lambda: store.asked)
        ending = asyncio.create_task(gw.gateway.sessions.close(session.id))
        await asyncio.sleep(0.02)
        late = Chat().user("Hi").start(client)
        await asyncio.sleep(0.02)
        store.free.set()
        assert await ending is True
        assert [(await one.finished()).status for one in (early, late)] == [410, 410]
        assert (await Chat().user("Hi").send(client)).status == 410
        assert await gw.completions(session) == []
        assert gw.gateway.sessions.loaded == 0


async def test_requests_that_come_together_share_one_load(gateway: Open, tmp_path: Path) -> None:
    store = SlowToLoad(tmp_path)
    async with gateway(lambda call: "Hi.", store=store) as gw:
        session, client = await gw.session()
        asked = [Chat().user("Hi").start(client) for _ in range(10)]
        await until(lambda: store.asked)
        store.free.set()
        assert [(await one.finished()).status for one in asked] == [200] * 10
        assert store.asked == 1
        assert [one.number for one in await gw.completions(session)] == list(range(10))


async def test_a_state_dropped_while_a_body_came_gives_no_number_twice(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "IDLE_STATES", 1)
    async with gateway(lambda call: "Hi.") as gw:
        session, client = await gw.session()
        _, other = await gw.session()
        body = asyncio.Event()
        sent = {"asked": False}

        async def slow_receive() -> dict[str, Any]:
            if sent["asked"]:
                await asyncio.Event().wait()
            sent["asked"] = True
            await body.wait()
            return {"type": "http.request", "body": b'{"model":"m","messages":[{"role":"user","content":"slow"}]}', "more_body": False}

        statuses: list[int] = []

        async def send(event: dict[str, Any]) -> None:
            if event["type"] == "http.response.start":
                statuses.append(event["status"])

        path = f"/s/{client.key}/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        slow = asyncio.create_task(gw.gateway.api(scope, slow_receive, send))
        await until(lambda: sent["asked"])
        for one in (other, client, other):  # each load drops the idle one
            assert (await Chat().user("Hi").send(one)).status == 200
        body.set()
        await slow
        assert statuses == [200]
        assert [one.number for one in await gw.completions(session)] == [0, 1]


async def test_a_sessions_seconds_count_from_its_first_call_after_a_reload_too(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions_module, "IDLE_STATES", 1)
    async with gateway(lambda call: "Hi.", budgets={"max_seconds": 1.0}) as gw:
        _, client = await gw.session()
        _, other = await gw.session()
        await asyncio.sleep(1.1)  # it waits for its turn; nothing of its time is spent
        for one in (client, other, client):
            assert (await Chat().user("Hi").send(one)).status == 200
        await asyncio.sleep(1.0)
        await Chat().user("Hi").send(other)
        assert (await Chat().user("Hi").send(client)).json()["error"]["code"] == "max_seconds"


async def test_an_ended_session_is_no_load_of_its_engine_though_it_called_while_it_ended(gateway: Open, tmp_path: Path) -> None:
    """A call that falls back to another engine while its session ends would be counted there for ever."""
    store = SlowToLoad(tmp_path)
    store.free.set()
    async with gateway(lambda call: "Hi.", store=store) as gw:
        session, client = await gw.session()
        pool = gw.gateway.default.pool
        read = store.inner.session

        async def reading(session_id: str) -> Any:
            assert (await Chat().user("Hi").send(client)).status == 200
            return await read(session_id)

        store.session = reading  # type: ignore[attr-defined]
        assert await gw.gateway.close_session(session)
        assert [one["sessions"] for one in pool.health()] == [0]


async def test_a_session_that_is_loaded_while_all_others_are_busy_is_loaded_once(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one state over the cap that is idle is the new one itself: dropped at once, it would give out its numbers again."""
    monkeypatch.setattr(sessions_module, "IDLE_STATES", 1)
    async with gateway(lambda call: Reply("Hi.", delay_s=0.3)) as gw:
        _, busy = await gw.session()
        session, client = await gw.session()
        running = Chat().user("Hi").start(busy)
        await until(lambda: gw.engine.calls)
        asked = [Chat().user("Hi").start(client)]
        await until(lambda: len(gw.engine.calls) == 2)
        asked.append(Chat().user("Hi").start(client))
        assert [(await one.finished()).status for one in (running, *asked)] == [200, 200, 200]
        assert [one.number for one in await gw.completions(session)] == [0, 1]


async def test_a_dropped_state_that_comes_back_is_not_put_aside_by_a_load(gateway: Open, tmp_path: Path) -> None:
    """A request may have been given a state just before that was dropped: it puts it back, while another one has begun to load a second."""
    store = SlowToLoad(tmp_path)
    store.free.set()
    async with gateway(lambda call: "Hi.", store=store) as gw:
        _, client = await gw.session()
        sessions = gw.gateway.sessions
        first = await sessions.get(client.key)
        states = dict(sessions._states)
        sessions._states.clear()
        store.free.clear()
        second = asyncio.create_task(sessions.get(client.key))
        await until(lambda: store.asked == 2)
        sessions._states.update(states)
        store.free.set()
        assert await second is first
        assert list(sessions._states.values()) == [first]
