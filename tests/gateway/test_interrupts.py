"""Live answers while weights change: one that its client has seen nothing of begins anew, one under way ends with the dialect's error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from gateway_players import Chat, until

from polar.testing.engine import Reply

Open = Callable[..., Any]


async def test_a_live_answer_without_a_token_yet_begins_anew(gateway: Open) -> None:
    async with gateway([Reply("never seen", delay_s=5.0), "Hello."], stream="live") as gw:
        session, client = await gw.session()
        gate = gw.gateway.gate
        exchange = Chat().user("Go.").start(client, True)
        await until(lambda: gw.engine.calls)
        assert not await gate.pause(0.01)
        assert gate.interrupt() == 1
        assert await gate.drained(5.0)
        gate.policy_version = "2"
        gate.resume()
        assert Chat().read(await exchange.finished(), True).text == "Hello."
        (completion,) = await gw.completions(session)
        assert (completion.status, completion.policy_version) == ("complete", "2")


async def test_a_live_answer_under_way_ends_and_is_kept_as_aborted(gateway: Open) -> None:
    async with gateway([Reply("one two three four five six", token_delay_s=0.1)], stream="live") as gw:
        session, client = await gw.session()
        gate = gw.gateway.gate
        gate.policy_version = "1"
        exchange = Chat().user("Go.").start(client, True)
        await until(lambda: b"one" in exchange.answer.body)
        assert not await gate.pause(0.01)
        gate.interrupt()
        assert await gate.drained(5.0)
        gate.resume()
        async with asyncio.timeout(5):
            answer = await exchange.finished()
        assert b"weights were changed" in answer.body
        (completion,) = await gw.completions(session)
        assert (completion.status, completion.policy_version) == ("aborted", "1")
        assert completion.untrainable is not None
        assert "weights were changed" in completion.untrainable
