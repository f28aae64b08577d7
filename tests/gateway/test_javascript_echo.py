"""Harnesses in JavaScript parse arguments to doubles: what they send back of a long id is another number of the same call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gateway_players import Anthropic, Google, Player, call_text
from test_capture import extends

Open = Callable[..., Any]


def through_javascript(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: through_javascript(item) for key, item in value.items()}
    if isinstance(value, list):
        return [through_javascript(item) for item in value]
    return int(float(value)) if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.parametrize("kind", [Anthropic, Google])
async def test_a_long_id_among_the_arguments_breaks_no_prefix(gateway: Open, kind: type[Player]) -> None:
    async with gateway([call_text('{"command": "show", "id": 1234567890123456789}'), "Done."]) as gw:
        session, client = await gw.session()
        player = kind().user("Go.")
        turn = await player.turn(client)
        player.history = through_javascript(player.history)
        await player.results(turn, "shown").turn(client)
        first, second = await gw.completions(session)
    assert (second.parent, second.broken) == (0, None)
    assert extends(second, first)
    assert second.messages[-2].tool_calls[0].arguments == '{"command": "show", "id": 1234567890123456789}'
