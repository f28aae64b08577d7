"""Results of tools as harnesses send them back: out of order, apart from their calls, of calls that nobody made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gateway_players import NAMES, PLAYERS, Google, Player, call_text
from gateway_reports import HI
from test_capture import extends

Open = Callable[..., Any]


@pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
async def test_results_reach_the_model_in_the_order_of_its_calls(gateway: Open, kind: type[Player]) -> None:
    """Harnesses send results as their tools finish (modelscope/ms-swift#10174); Qwen's template writes no ids beside them."""
    calls = call_text('{"command": "ls"}') + "\n" + call_text('{"command": "pwd"}')
    async with gateway([calls, HI, HI]) as gw:
        session, client = await gw.session()
        player = kind().user("Go.")
        player.results(await player.turn(client), "FIRST", "SECOND")
        entry = player.history[-1]
        if "role" in entry and entry["role"] == "user":
            entry["parts" if kind is Google else "content"].reverse()
        else:
            player.history[-2:] = reversed(player.history[-2:])
        await player.turn(client)
        prompt = gw.engine.calls[1].text
        assert prompt.index("FIRST") < prompt.index("SECOND")
        await player.user("And?").turn(client)
        first, second, third = await gw.completions(session)
        assert extends(second, first)
        assert extends(third, second)
