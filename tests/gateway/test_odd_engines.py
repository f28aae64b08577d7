"""What an engine gives that can be neither recorded nor shown is its failure; the session goes on unharmed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gateway_players import Chat

Open = Callable[..., Any]


async def test_more_choices_than_asked_for_take_no_other_calls_number(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(lambda call: "Hi.") as gw:
        session, client = await gw.session()
        honest = gw.engine.generate

        async def generous(request: Any) -> Any:
            return [*await honest(request), *await honest(request)]

        monkeypatch.setattr(gw.engine, "generate", generous)
        refused = await Chat().user("Hi").send(client)
        assert refused.status == 502
        assert "2 choices where 1" in refused.json()["error"]["message"]
        monkeypatch.setattr(gw.engine, "generate", honest)
        assert (await Chat().user("Hi").send(client)).status == 200
        assert [one.choice for one in await gw.completions(session)] == [0]


async def test_an_answer_without_ids_is_never_shown_as_an_empty_one(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(lambda call: "Hi.") as gw:
        session, client = await gw.session()
        honest = gw.engine.generate

        async def silent(request: Any) -> Any:
            return [replace(one, token_ids=None, logprobs=None) for one in await honest(request)]

        monkeypatch.setattr(gw.engine, "generate", silent)
        for stream in (False, True):
            refused = await Chat().user("Hi").send(client, stream)
            assert refused.status == 502
            assert "no ids" in refused.json()["error"]["message"]
        assert await gw.completions(session) == []
