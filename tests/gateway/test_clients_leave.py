"""Clients that go away, and clients that ask again: what is cancelled, what is adopted, and that nothing is counted twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import orjson
import pytest
from gateway_players import NAMES, PLAYERS, Chat, Google, Player, until

from polar.records import Cause
from polar.testing.engine import Call, Reply

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
SITUATIONS = {
    "whole": (False, {}),
    "before the first byte": (True, {}),
    "after the first byte": (True, {"first_ping_s": 0.01, "ping_s": 0.01}),
}


@every_player
@pytest.mark.parametrize("situation", SITUATIONS)
async def test_b81_a_generation_that_nobody_waits_for_is_cancelled(gateway: Open, kind: type[Player], situation: str) -> None:
    stream, settings = SITUATIONS[situation]
    async with gateway(lambda call: Reply("late", delay_s=30), grace_s=0.05, **settings) as gw:
        session, client = await gw.session()
        exchange = kind().user("Go.").start(client, stream)
        await until(lambda: gw.engine.calls and (exchange.answer.status or not settings))
        exchange.leave()
        await until(lambda: gw.engine.backend.cancelled == 1)
        await exchange.finished()
        await until(lambda: gw.gateway.gate.inflight == 0)
        (made,) = await gw.completions(session)
        assert (made.status, made.sampled_ids, made.delivered) == ("aborted", None, False)
        assert made.untrainable == "aborted: the client left"
        assert made.prompt_ids is not None


@every_player
async def test_b81_a_live_generation_is_cancelled_and_its_tokens_are_kept(gateway: Open, kind: type[Player]) -> None:
    async with gateway([Reply("one two three four five", token_delay_s=0.05)], grace_s=0.02, stream="live") as gw:
        session, client = await gw.session()
        exchange = kind().user("Go.").start(client, True)
        await until(lambda: b"one" in exchange.answer.body)
        exchange.leave()
        await until(lambda: gw.engine.backend.cancelled == 1)
        await until(lambda: gw.gateway.gate.inflight == 0)
        (made,) = await gw.completions(session)
        assert made.status == "aborted"
        assert made.sampled_ids is not None
        assert 1 <= len(made.sampled_ids) < 5


async def test_b81_the_next_call_is_not_affected_and_names_the_retry(gateway: Open) -> None:
    script = [Reply("one two three four", token_delay_s=0.05), "Done.", "Again."]
    async with gateway(script, grace_s=0.01, stream="live") as gw:
        session, client = await gw.session()
        exchange = Chat().user("Go.").start(client, True)
        await until(lambda: b"one" in exchange.answer.body)
        exchange.leave()
        await until(lambda: gw.gateway.gate.inflight == 0)
        player = Chat().user("Go.")
        assert (await player.turn(client, True)).text == "Done."
        await player.user("More.").turn(client)
        aborted, second, third = await gw.completions(session)
        assert aborted.status == "aborted"
        assert second.parent is None or (second.broken is not None and second.broken.cause is Cause.RETRY)
        assert third.parent == second.number


@every_player
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_byte_equal_retry_within_the_grace_adopts_the_call(gateway: Open, kind: type[Player], stream: bool) -> None:
    async with gateway([Reply("Done.", delay_s=0.1)], grace_s=5.0) as gw:
        session, client = await gw.session()
        exchange = kind().user("Go.").start(client, stream)
        await until(lambda: gw.engine.calls)
        exchange.leave()
        await exchange.finished()
        assert (await kind().user("Go.").turn(client, stream)).text == "Done."
        assert len(gw.engine.calls) == 1
        (made,) = await gw.completions(session)
        assert (made.status, made.delivered) == ("complete", True)


async def test_a_retry_adopts_an_answer_that_was_finished_meanwhile(gateway: Open) -> None:
    async with gateway([Reply("Done.", delay_s=0.05)], grace_s=5.0) as gw:
        session, client = await gw.session()
        exchange = Chat().user("Go.").start(client)
        await until(lambda: gw.engine.calls)
        exchange.leave()
        await exchange.finished()
        await asyncio.sleep(0.1)
        assert [made.delivered for made in await gw.completions(session)] == [False]
        assert (await Chat().user("Go.").turn(client)).text == "Done."
        assert len(gw.engine.calls) == 1
        assert [made.delivered for made in await gw.completions(session)] == [True]


async def test_a_retry_after_the_grace_is_a_call_of_its_own(gateway: Open) -> None:
    async with gateway([Reply("late", delay_s=30), "Done."], grace_s=0.01) as gw:
        session, client = await gw.session()
        exchange = Chat().user("Go.").start(client)
        await until(lambda: gw.engine.calls)
        exchange.leave()
        await until(lambda: gw.engine.backend.cancelled == 1)
        assert (await Chat().user("Go.").turn(client)).text == "Done."
        assert [made.status for made in await gw.completions(session)] == ["aborted", "complete"]


async def test_another_sessions_equal_request_adopts_nothing(gateway: Open) -> None:
    async with gateway(lambda call: Reply(f"Answer {call.number}.", delay_s=0.05), grace_s=5.0) as gw:
        session, client = await gw.session()
        other, stranger = await gw.session()
        exchange = Chat().user("Go.").start(client)
        await until(lambda: gw.engine.calls)
        exchange.leave()
        await exchange.finished()
        assert (await Chat().user("Go.").turn(stranger)).text == "Answer 1."
        await until(lambda: gw.gateway.gate.inflight == 0)
        assert len(await gw.completions(session)) == len(await gw.completions(other)) == 1


async def test_google_calls_that_differ_in_their_path_alone_are_no_retries(gateway: Open) -> None:
    """Model and streaming stand in Google's path, so equal bodies are not equal requests."""
    async with gateway(lambda call: Reply(f"Answer {call.number}.", delay_s=0.05), grace_s=5.0) as gw:
        session, client = await gw.session()
        player = Google().user("Go.")
        exchange = player.start(client)
        await until(lambda: gw.engine.calls)
        exchange.leave()
        await exchange.finished()
        other = await client.post("/v1beta/models/other:generateContent", player.body(False))
        assert Google().read(other, False).text == "Answer 1."
        assert len(gw.engine.calls) == 2
        assert [made.model_requested for made in await gw.completions(session)] == ["m", "other"]


@every_player
async def test_b82_live_equal_requests_are_completions_of_their_own(gateway: Open, kind: type[Player]) -> None:
    def script(call: Call) -> Reply:
        return Reply(f"Answer {call.number}.", delay_s=0.03)

    async with gateway(script) as gw:
        session, client = await gw.session()
        players = [kind().user("Go.") for _ in range(3)]
        turns = await asyncio.gather(*(player.turn(client, True) for player in players))
        assert sorted(turn.text for turn in turns) == ["Answer 0.", "Answer 1.", "Answer 2."]
        await players[1].user("More.").turn(client)
        made = await gw.completions(session)
        assert [one.number for one in made] == [0, 1, 2, 3]
        chosen = next(one for one in made if one.answer.text == turns[1].text)
        assert made[3].parent == chosen.number
        assert made[3].broken is None


async def test_b82_of_equal_answers_the_one_that_was_pointed_at_is_the_parent(gateway: Open) -> None:
    async with gateway(lambda call: '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>') as gw:
        session, client = await gw.session()
        players = [Chat().user("Go.") for _ in range(3)]
        turns = [await player.turn(client) for player in players]
        await players[1].results(turns[1], "ok").turn(client)
        last = (await gw.completions(session))[-1]
        assert last.parent == 1
        assert "ambiguous_parent" not in last.tags


async def test_b82_of_equal_answers_without_a_pointer_the_latest_delivered_is_taken_and_tagged(gateway: Open) -> None:
    async with gateway(lambda call: "Hi.") as gw:
        session, client = await gw.session()
        for _ in range(2):
            player = Chat().user("Go.")
            await player.turn(client)
        await player.user("More.").turn(client)
        last = (await gw.completions(session))[-1]
        assert last.parent == 1
        assert "ambiguous_parent" in last.tags


async def test_a_client_that_left_counts_once(gateway: Open) -> None:
    async with gateway([Reply("late", delay_s=30)], grace_s=0.0) as gw:
        _, client = await gw.session()
        exchange = Chat().user("Go.").start(client)
        await until(lambda: gw.engine.calls)
        exchange.leave()
        await exchange.finished()
        assert b"polar_clients_left_total 1.0" in gw.gateway.metrics.exposition()


async def test_a_client_that_leaves_while_it_sends_leaves_no_trace(gateway: Open) -> None:
    async with gateway([]) as gw:
        session, client = await gw.session()
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(event: Any) -> None:
            sent.append(event)

        path = f"/s/{client.key}/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        await gw.gateway.api(scope, receive, send)
        assert sent == []
        assert await gw.completions(session) == []


async def test_a_live_answer_is_adopted_from_its_beginning(gateway: Open) -> None:
    async with gateway([Reply("one two three four", token_delay_s=0.03)], grace_s=5.0, stream="live") as gw:
        session, client = await gw.session()
        exchange = Chat().user("Go.").start(client, True)
        await until(lambda: b"two" in exchange.answer.body)
        exchange.leave()
        await exchange.finished()
        assert (await Chat().user("Go.").turn(client, True)).text == "one two three four"
        assert len(gw.engine.calls) == 1
        assert [made.status for made in await gw.completions(session)] == ["complete"]


async def test_a_session_that_ends_while_a_body_is_coming_records_nothing(gateway: Open) -> None:
    async with gateway([]) as gw:
        session, client = await gw.session()
        ready, waiting = asyncio.Event(), asyncio.Event()
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            waiting.set()
            await ready.wait()
            return {"type": "http.request", "body": orjson.dumps(Chat().user("Go.").body(False))}

        async def send(event: Any) -> None:
            sent.append(event)

        path = f"/s/{client.key}/v1/chat/completions"
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        request = asyncio.create_task(gw.gateway.api(scope, receive, send))
        await waiting.wait()
        await gw.gateway.close_session(session)
        ready.set()
        await request
        assert sent[0]["status"] == 410
        assert gw.engine.calls == []
        assert await gw.completions(session) == []
