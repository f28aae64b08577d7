"""An answer without anything in it is a turn like any other: its echo goes on from it, in every dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gateway_players import NAMES, PLAYERS, THINKING, Player

Open = Callable[..., Any]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["", " \n", THINKING])
@pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
async def test_a_conversation_goes_on_after_an_answer_that_says_nothing(gateway: Open, kind: type[Player], said: str, stream: bool) -> None:
    async with gateway(lambda call: said) as gw:
        session, client = await gw.session()
        player = kind()
        for number in range(3):
            await player.user(f"turn {number}").turn(client, stream)
        made = await gw.completions(session)
    assert [one.parent for one in made] == [None, 0, 1]
    assert all(one.broken is None for one in made)


async def test_a_reasoning_item_whose_content_the_client_took_out_is_no_reference(gateway: Open) -> None:
    async with gateway(lambda call: THINKING + "Hi.") as gw:
        session, client = await gw.session()
        first = (await client.post("/v1/responses", {"model": "m", "input": "Hi", "store": False})).json()
        item = {"type": "reasoning", "id": first["output"][0]["id"], "summary": []}
        history = [{"role": "user", "content": "Hi"}, item, {"role": "user", "content": "Go on"}]
        answer = await client.post("/v1/responses", {"model": "m", "input": history, "store": False})
        assert answer.status == 200, answer.body
        assert len(await gw.completions(session)) == 2
