"""`POST /admin/recheck`: an engine that came back with other settings is taken as it is now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import pytest
from gateway_players import Chat

from polar.chat import Message, Tool
from polar.records import Ids

Open = Callable[..., Any]
LONG = "All work and no play makes a long prompt. " * 600


async def test_long_prompts_are_rendered_for_the_engine_as_it_is_now(gateway: Open) -> None:
    async with gateway(lambda call: "Hi.", engine={"context": 2000}, render_process=True) as gw:
        _, client = await gw.session()
        player = Chat().user(LONG)
        assert (await player.send(client)).status == 400
        gw.engine.backend.context = 131072
        await gw.gateway.recheck()
        assert (await player.turn(client)).text == "Hi."


async def test_a_render_process_that_died_is_started_again(gateway: Open) -> None:
    async with gateway(lambda call: "Hi.", render_process=True) as gw:
        _, client = await gw.session()
        await Chat().user(LONG).turn(client)
        (child,) = renderers()
        child.kill()
        await Chat().user(LONG + "Again.").turn(client)
        assert renderers() == []
        await gw.gateway.recheck()
        await Chat().user(LONG + "Once more.").turn(client)
        assert len(renderers()) == 1


async def test_a_tool_set_that_agreed_is_compared_again(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(lambda call: "Hi.", check=True) as gw:
        session, client = await gw.session()
        await Chat().user("Go.").turn(client)
        tokenize = gw.engine.tokenize

        async def other(messages: Sequence[Message], tools: Sequence[Tool], *, thinking: bool | None = None) -> Ids | None:
            ids = await tokenize(messages, tools, thinking=thinking)
            return np.concatenate([ids, ids[-1:]]) if [tool.name for tool in tools] == ["bash"] else ids

        monkeypatch.setattr(gw.engine, "tokenize", other)
        await gw.gateway.recheck()
        await Chat().user("Go.").turn(client)
        assert [made.mode for made in await gw.completions(session)] == ["tokens", "messages"]


def renderers() -> list[psutil.Process]:
    """The render processes of this one that live."""
    found = psutil.Process().children()
    return [one for one in found if one.status() != psutil.STATUS_ZOMBIE and "spawn_main" in " ".join(one.cmdline())]


async def test_nothing_is_left_of_a_comparison_but_its_outcome(gateway: Open) -> None:
    async with gateway(lambda call: "Hi.", check=True) as gw:
        _, client = await gw.session()
        for name in ("one", "two", "three"):
            player = Chat(tools=False).user("Go.")
            player.extra = {"tools": [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}]}
            await player.turn(client)
        served = gw.gateway.default
        assert (len(served._agreed_tools), len(served._checking)) == (3, 0)
