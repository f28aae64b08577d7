"""A session knows what refused its last call: the gateway's evidence of what ended a harness (law 5)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polar.errors import EngineRejected, EngineUnavailable
from polar.testing.engine import Call, Reply
from polar.testing.gateway import SessionClient

Open = Callable[..., Any]
BODY = {"model": "m", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 8}


def script(call: Call) -> Reply | str:
    return {1: Reply(error=EngineUnavailable("gone")), 3: Reply(error=EngineRejected("odd"))}.get(call.number, "Hi.")


async def test_the_last_refusal_is_known_until_a_call_is_answered(gateway: Open) -> None:
    async with gateway(script) as gw:
        record, key = await gw.gateway.sessions.create(settings={"budgets": {"max_turns": 3}})
        client = SessionClient(gw.gateway.api, key)
        seen = []
        for _ in range(7):
            await client.post("/v1/chat/completions", BODY)
            state = gw.gateway.sessions.loaded_state(key)
            assert state is not None
            seen.append(None if state.refusals.last is None else (state.refusals.last.boundary, state.refusals.last.code))
        assert seen == [None, ("engine", None), None, ("invalid_request", None), None, ("budget", "max_turns"), ("budget", "max_turns")]
        assert state.refusals.counts == {"engine": 1, "invalid_request": 1, "budget": 2}
        assert record.id == state.record.id


async def test_a_session_that_made_no_call_has_no_state(gateway: Open) -> None:
    async with gateway(script) as gw:
        _, key = await gw.gateway.sessions.create()
        assert gw.gateway.sessions.loaded_state(key) is None
