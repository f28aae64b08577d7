"""Law 4: nobody sees the end of an answer before it is on disk, and a store that fails is heard of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gateway_players import NAMES, PLAYERS, Player, call_text, until

from polar.errors import StoreError
from polar.records import Completion
from polar.store import open_store
from polar.testing.asgi import AsgiClient

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
WAYS = {"whole": (False, "replay"), "replayed": (True, "replay"), "live": (True, "live")}
every_way = pytest.mark.parametrize("way", WAYS)
OVERLOADED = {
    "anthropic": (529, "overloaded_error"),
    "openai_chat": (503, ""),
    "openai_responses": (503, ""),
    "google": (503, "UNAVAILABLE"),
}


class Slow:
    """A store whose appends wait until `free` is set, or fail while `broken` is. Everything else is the real store's."""

    def __init__(self, folder: Path) -> None:
        self.inner = open_store(str(folder / "polar.db"))
        self.free = asyncio.Event()
        self.free.set()
        self.broken = False
        self.appending = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def healthy(self) -> str | None:
        return "the disk is full" if self.broken else self.inner.healthy

    async def append(self, completions: Sequence[Completion]) -> None:
        self.appending += 1
        await self.free.wait()
        if self.broken:
            raise StoreError("the disk is full", retry_after="5")
        await self.inner.append(completions)


@every_player
@every_way
async def test_no_terminal_event_leaves_before_the_sync_returns(gateway: Open, tmp_path: Path, kind: type[Player], way: str) -> None:
    stream, mode = WAYS[way]
    store = Slow(tmp_path)
    store.free.clear()
    async with gateway(["Some text. " + call_text()], store=store, stream=mode, first_ping_s=0.01, ping_s=0.01) as gw:
        session, client = await gw.session()
        exchange = kind().user("Go.").start(client, stream)
        await until(lambda: store.appending == 1)
        await asyncio.sleep(0.05)
        assert not exchange.done
        assert not any(mark in exchange.answer.body for mark in kind.terminal[:1])
        if not stream:
            assert exchange.answer.status == 0
        if mode == "live":
            assert b"Some" in exchange.answer.body or kind.name == "google"
        assert await gw.completions(session) == []
        store.free.set()
        answer = await exchange.finished()
        turn = kind().read(answer, stream)
        assert (turn.text.strip(), len(turn.calls)) == ("Some text.", 1)
        assert len(await gw.completions(session)) == 1


@every_player
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_store_that_fails_gives_the_dialects_overload_error(
    gateway: Open, tmp_path: Path, kind: type[Player], stream: bool
) -> None:
    store = Slow(tmp_path)
    async with gateway(lambda call: "Done.", store=store) as gw:
        session, client = await gw.session()
        store.broken = True
        answer = await kind().user("Go.").send(client, stream)
        status, word = OVERLOADED[kind.name]
        assert answer.status == status
        assert word in kind().error(answer)[0]
        assert answer.headers["retry-after"] == "5"
        assert b"Done." not in answer.body
        store.broken = False
        assert (await kind().user("Go.").turn(client, stream)).text == "Done."
        assert len(await gw.completions(session)) == 1


@every_player
async def test_a_store_that_fails_under_a_live_answer_ends_it_with_an_error(gateway: Open, tmp_path: Path, kind: type[Player]) -> None:
    store = Slow(tmp_path)
    async with gateway(lambda call: "Some text.", store=store, stream="live") as gw:
        session, client = await gw.session()
        store.broken = True
        answer = await kind().user("Go.").send(client, True)
        assert b"disk is full" in answer.chunks[-1] or (kind.name == "google" and b"disk is full" in answer.body)
        assert not any(mark in answer.body for mark in kind.terminal[:1])
        assert await gw.completions(session) == []


async def test_health_is_red_while_the_store_fails_and_green_again(gateway: Open, tmp_path: Path) -> None:
    store = Slow(tmp_path)
    async with gateway([], store=store) as gw:
        admin = AsgiClient(gw.gateway.admin)
        public = AsgiClient(gw.gateway.api)
        for broken, status in ((False, 200), (True, 503), (False, 200)):
            store.broken = broken
            assert (await admin.get("/health")).status == status
            assert (await public.get("/health")).status == status
        store.broken = True
        assert (await admin.get("/health")).json()["store"] == "the disk is full"
        assert "disk" not in (await public.get("/health")).body.decode()


async def test_a_failed_append_does_not_become_a_parent(gateway: Open, tmp_path: Path) -> None:
    store = Slow(tmp_path)
    async with gateway(lambda call: "Done.", store=store) as gw:
        session, client = await gw.session()
        player = PLAYERS[1]().user("Go.")
        store.broken = True
        await player.send(client)
        store.broken = False
        player.history.append({"role": "assistant", "content": "Done."})
        await player.user("More.").turn(client)
        (made,) = await gw.completions(session)
        assert (made.parent, made.number) == (None, 1)
