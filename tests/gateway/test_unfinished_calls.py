"""Calls between the end of their generation and the end of their record: nothing of them is lost, counted twice or forgotten too early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gateway_players import Chat, until

from polar.gateway.gate import Gate
from polar.gateway.sessions import SessionState
from polar.records import Completion
from polar.store import open_store
from polar.testing.engine import Call, Reply

Open = Callable[..., Any]


class SlowToAppend:
    """A store that appends only while `free` is set."""

    def __init__(self, folder: Path) -> None:
        self.inner = open_store(str(folder / "polar.db"))
        self.free = asyncio.Event()
        self.asked = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def healthy(self) -> str | None:
        return self.inner.healthy

    async def append(self, completions: Any) -> None:
        self.asked = True
        await self.free.wait()
        await self.inner.append(completions)


async def test_the_end_of_a_session_waits_for_a_call_that_is_past_its_grace(gateway: Open, tmp_path: Path) -> None:
    store = SlowToAppend(tmp_path)
    async with gateway([Reply("late", delay_s=30)], grace_s=0.0, store=store) as gw:
        session, client = await gw.session()
        exchange = Chat().user("Go.").start(client)
        await until(lambda: gw.engine.calls)
        exchange.leave()
        await until(lambda: store.asked)
        ending = asyncio.create_task(gw.gateway.sessions.close(session.id))
        await asyncio.sleep(0.05)
        assert not ending.done()
        store.free.set()
        assert await ending
        assert [made.status for made in await gw.completions(session)] == ["aborted"]


async def test_a_call_past_its_grace_that_was_complete_is_recorded_and_forgotten(gateway: Open, tmp_path: Path) -> None:
    store = SlowToAppend(tmp_path)
    async with gateway(lambda call: f"Answer {call.number}.", grace_s=0.0, store=store) as gw:
        session, client = await gw.session()
        exchange = Chat().user("Go.").start(client)
        await until(lambda: store.asked)
        exchange.leave()
        await exchange.finished()
        await asyncio.sleep(0.02)
        store.free.set()
        state = gw.gateway.sessions.loaded_state(client.key)
        await until(lambda: not state.busy)
        assert (await Chat().user("Go.").turn(client)).text == "Answer 1."
        assert [made.status for made in await gw.completions(session)] == ["complete", "complete"]


async def test_what_was_complete_when_its_caller_was_cancelled_is_not_lost() -> None:
    gate = Gate()

    async def work() -> str:
        asyncio.get_running_loop().call_soon(caller.cancel)  # runs before the caller is woken by the result
        return "sampled"

    caller = asyncio.create_task(gate.through(work))
    assert await caller == "sampled"
    assert not caller.cancelling()
    assert gate.inflight == 0


async def test_a_fault_of_the_reader_loses_no_choice(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(call: Call) -> str:
        return f"Choice {call.index}."

    async with gateway(script) as gw:
        session, client = await gw.session()
        path = gw.gateway.default.path
        read = path.read
        readings: list[str] = []

        def faulty(plan: Any, generation: Any, ref: str) -> Any:
            readings.append(ref)
            if len(readings) == 2:
                raise RuntimeError("a fault of a parser")
            return read(plan, generation, ref)

        monkeypatch.setattr(path, "read", faulty)
        player = Chat().user("Go.")
        player.extra = {"n": 3}
        assert (await player.send(client)).status == 500
        made = await gw.completions(session)
        assert [(one.number, one.choice, one.status) for one in made] == [(0, 0, "aborted"), (1, 1, "aborted"), (2, 2, "aborted")]
        assert all(one.sampled_ids is not None and len(one.sampled_ids) for one in made)


async def test_a_turn_is_never_counted_twice(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its record and the end of its task a call is one turn, not one that is made and one that is running."""
    async with gateway(lambda call: "Hi.", budgets={"max_turns": 2}) as gw:
        _, client = await gw.session()
        refused: list[BaseException] = []
        recorded = SessionState.recorded

        def look(state: SessionState) -> None:
            try:
                state.check_budget(0.0)
            except Exception as error:
                refused.append(error)

        def recording(state: SessionState, completion: Completion) -> None:
            recorded(state, completion)
            asyncio.get_running_loop().call_soon(look, state)

        monkeypatch.setattr(SessionState, "recorded", recording)
        await Chat().user("Go.").turn(client)
        assert refused == []


async def test_a_clock_that_is_set_back_makes_no_negative_durations(gateway: Open) -> None:
    async with gateway(lambda call: "Hi.") as gw:
        times = iter(range(1000, 0, -10))
        gw.gateway.api._context.clock = lambda: float(next(times))
        _, client = await gw.session()
        await Chat().user("Go.").turn(client)
        lines = gw.gateway.metrics.exposition().decode().splitlines()
        sums = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if "_seconds_sum" in line)}
        assert len(sums) == 3
        assert min(sums.values()) >= 0
