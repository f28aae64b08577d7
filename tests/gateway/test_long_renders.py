"""What takes long to render leaves the event loop, wherever in the request it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gateway_players import Chat

Open = Callable[..., Any]
LONG = "word " * 4_000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": f'{{"a": "{LONG}"}}'}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object", "description": LONG}}}
REQUESTS: dict[str, dict[str, Any]] = {
    "text": {"messages": [{"role": "user", "content": LONG}]},
    "reasoning": {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "reasoning_content": LONG}, {"role": "user", "content": "b"}]
    },
    "arguments": {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c", "content": "b"},
        ]
    },
    "tools": {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]},
    "short": {"messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_long_renders_run_in_the_renderers_thread(gateway: Open, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async with gateway(lambda call: "Hi.") as gw:
        _, client = await gw.session()
        sent: list[Any] = []
        submit = gw.gateway._renderer.submit
        monkeypatch.setattr(gw.gateway._renderer, "submit", lambda *work: sent.append(work) or submit(*work))
        assert (await client.post("/v1/chat/completions", {"model": "m", **REQUESTS[name]})).status == 200
        assert bool(sent) == (name != "short")


async def test_a_turn_that_adds_little_stays_on_the_loop_however_long_its_history(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(lambda call: "Hi.") as gw:
        _, client = await gw.session()
        player = Chat().user(LONG)
        await player.turn(client)
        monkeypatch.setattr(gw.gateway._renderer, "submit", lambda *work: pytest.fail("a bridge needs no thread"))
        await player.user("More.").turn(client)
