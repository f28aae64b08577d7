"""Stored responses: continued by id, fetched, listed, deleted, and never another session's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gateway_players import NAMES, PLAYERS, THINKING, Responses, call_text
from test_capture import extends

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
PNG = "iVBORw0KGgo="


async def test_b51_a_stored_response_is_continued(gateway: Open) -> None:
    async with gateway([THINKING + call_text(), "Done."]) as gw:
        session, client = await gw.session()
        player = Responses(system=None).user("Go.")
        player.extra = {"store": True}
        turn = await player.turn(client)
        body = player.body(False) | {
            "previous_response_id": turn.id,
            "input": [{"type": "function_call_output", "call_id": turn.calls[0][0], "output": "x.py"}],
        }
        assert (await client.post("/v1/responses", body)).status == 200
        first, second = await gw.completions(session)
        assert (second.parent, second.broken) == (0, None)
        assert extends(second, first)


@both_ways
async def test_a_stored_response_is_continued_under_its_own_instructions_and_more_than_once(gateway: Open, stream: bool) -> None:
    """BerriAI/litellm#37956 (a stream's id led nowhere); instructions are those of each call, as the provider documents."""
    async with gateway(["One.", "Two.", "Three."]) as gw:
        session, client = await gw.session()

        async def ask(text: str, **fields: Any) -> str:
            answer = await client.post("/v1/responses", {"model": "m", "input": text, "stream": stream, **fields})
            created = answer.events()[0]["response"] if stream else answer.json()
            return str(created["id"])

        first = await ask("one", instructions="INSTRUCTED")
        await ask("two", previous_response_id=first)
        await ask("three", previous_response_id=first, instructions="OTHERWISE")
        texts = [call.text for call in gw.engine.calls]
        assert ["INSTRUCTED" in text for text in texts] == [True, False, False]
        assert texts[1].index("one") < texts[1].index("One.") < texts[1].index("two")
        assert texts[2].startswith("<|im_start|>system\nOTHERWISE<|im_end|>")
        assert "two" not in texts[2]
        assert [completion.parent for completion in await gw.completions(session)] == [None, 0, 0]


@pytest.mark.parametrize("referred", [("reasoning",), ("reasoning", "function_call"), ("function_call",)], ids="-".join)
async def test_an_answer_may_be_sent_back_in_part_by_reference(gateway: Open, referred: tuple[str, ...]) -> None:
    """vercel/ai#10827: a client refers to the items that it knows the ids of, and sends the others whole, or not at all."""
    async with gateway([THINKING + call_text(), "Done."]) as gw:
        session, client = await gw.session()
        player = Responses().user("Go.")
        player.extra = {"store": True}
        turn = await player.turn(client)
        echoed = player.history[1:]
        player.history[1:] = [{"type": "item_reference", "id": item["id"]} for item in echoed if item["type"] in referred]
        if "function_call" not in referred:
            player.history += [{key: item[key] for key in item if key != "id"} for item in echoed if item["type"] == "function_call"]
        await player.results(turn, "x.py").turn(client)
        first, second = await gw.completions(session)
        assert (second.parent, second.broken) == (0, None)
        assert extends(second, first)


WHOLE = {"reasoning", "message", "first", "second"}


@pytest.mark.parametrize(
    "referred",
    [{"reasoning", "message"}, {"message"}, {"reasoning", "message", "first"}, {"second"}, {"first", "message"}, WHOLE],
    ids=lambda kinds: "-".join(sorted(kinds)),
)
async def test_a_turn_that_is_sent_partly_whole_has_the_items_that_it_refers_to(gateway: Open, referred: set[str]) -> None:
    """vercel/ai's Responses provider sends its calls whole and text and reasoning by reference: the text was left out of the prompt."""
    async with gateway([THINKING + "I look." + call_text() + "\n" + call_text('{"command": "b"}'), "Done."]) as gw:
        session, client = await gw.session()
        player = Responses().user("Go.")
        player.extra = {"store": True}
        turn = await player.turn(client)
        names = dict(zip((item["id"] for item in player.history[1:]), ("reasoning", "message", "first", "second"), strict=True))
        player.history[1:] = [
            {"type": "item_reference", "id": item["id"]} if names[item["id"]] in referred else item for item in player.history[1:]
        ]
        await player.results(turn, "x.py", "y.py").turn(client)
        first, second = await gw.completions(session)
        assert (second.parent, second.broken) == (0, None)
        assert extends(second, first)


async def test_what_a_turn_leaves_out_is_not_put_back_by_a_reference_to_its_neighbour(gateway: Open) -> None:
    async with gateway([THINKING + "I look." + call_text() + "\n" + call_text('{"command": "b"}'), "Done."]) as gw:
        _, client = await gw.session()
        player = Responses().user("Go.")
        player.extra = {"store": True}
        await player.turn(client)
        _, text, _, second = player.history[1:]
        player.history[1:] = [{"type": "item_reference", "id": text["id"]}, second]
        player.history.append({"type": "function_call_output", "call_id": second["call_id"], "output": "y.py"})
        await player.turn(client)
        prompt = gw.engine.calls[1].text
        assert "I look." in prompt
        assert '{"command": "b"}' in prompt
        assert '{"command": "ls"}' not in prompt


async def test_b51_an_unknown_previous_response_is_refused(gateway: Open) -> None:
    async with gateway([]) as gw:
        session, client = await gw.session()
        refused = await client.post("/v1/responses", {"model": "m", "previous_response_id": "resp_unknown", "input": "x"})
        assert (refused.status, refused.json()["error"]["code"]) == (400, "previous_response_not_found")
        assert await gw.completions(session) == []


@both_ways
async def test_a_stored_response_can_be_fetched_listed_and_deleted(gateway: Open, stream: bool) -> None:
    async with gateway([THINKING + "Hi."]) as gw:
        session, client = await gw.session()
        player = Responses().user("Go.")
        player.extra = {"store": True}
        turn = await player.turn(client, stream)
        first = turn.answer.events()[-1]["response"] if stream else turn.answer.json()
        again = await client.get(f"/v1/responses/{turn.id}")
        assert again.status == 200
        assert again.json() == first
        items = (await client.get(f"/v1/responses/{turn.id}/input_items")).json()
        assert [item["role"] for item in items["data"]] == ["user"]
        gone = await client.request("DELETE", f"/v1/responses/{turn.id}")
        assert gone.json() == {"id": turn.id, "object": "response", "deleted": True}
        assert (await client.get(f"/v1/responses/{turn.id}")).status == 404
        assert (await client.request("DELETE", f"/v1/responses/{turn.id}")).status == 404
        assert len(await gw.completions(session)) == 1


async def test_a_stored_response_can_be_fetched_as_its_stream(gateway: Open) -> None:
    async with gateway([THINKING + "Hi."]) as gw:
        _, client = await gw.session()
        player = Responses().user("Go.")
        player.extra = {"store": True}
        turn = await player.turn(client, True)
        again = await client.get(f"/v1/responses/{turn.id}?stream=true")
        assert again.headers["content-type"] == "text/event-stream"
        assert again.events() == turn.answer.events()


async def test_a_fetched_stream_goes_on_after_what_its_client_has_seen(gateway: Open) -> None:
    """openai-python's `responses.retrieve(id, stream=True, starting_after=n)`: a client that was cut off would have read it all twice."""
    async with gateway([THINKING + "Hi."]) as gw:
        _, client = await gw.session()
        made = (await client.post("/v1/responses", {"model": "m", "input": "Go.", "stream": True})).events()
        path = f"/v1/responses/{made[0]['response']['id']}?stream=true"
        for after in (0, 4, len(made) - 2):
            assert (await client.get(f"{path}&starting_after={after}")).events() == made[after + 1 :]
        for unread in ("x", "-1", "9" * 5000):
            assert (await client.get(f"{path}&starting_after={unread}")).events() == made


async def test_listed_calls_have_the_ids_that_were_given_out(gateway: Open) -> None:
    """They were listed without their prefix, so that a client found none of the calls that it had answered."""
    async with gateway([call_text() + "\n" + call_text('{"x": 1}', "patch"), "Done."]) as gw:
        _, client = await gw.session()
        tools = [{"type": "function", "name": "bash"}, {"type": "custom", "name": "patch"}]
        first = (await client.post("/v1/responses", {"model": "m", "input": "Go.", "tools": tools})).json()
        ids = [item["call_id"] for item in first["output"]]
        assert ids[1].startswith("call_raw_")
        results = [
            {"type": "function_call_output", "call_id": ids[0], "output": "a"},
            {"type": "custom_tool_call_output", "call_id": ids[1], "output": "b"},
        ]
        body = {"model": "m", "previous_response_id": first["id"], "input": results, "tools": tools}
        second = (await client.post("/v1/responses", body)).json()
        for query in ("limit=" + "9" * 5000, "limit=100"):
            listed = (await client.get(f"/v1/responses/{second['id']}/input_items?order=asc&{query}")).json()["data"]
            assert [item.get("call_id") for item in listed] == [None, *ids, *ids]


async def test_what_was_not_to_be_stored_cannot_be_fetched(gateway: Open) -> None:
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        turn = await Responses().user("Go.").turn(client)
        assert (await client.get(f"/v1/responses/{turn.id}")).status == 404


async def test_b51_another_sessions_response_is_unknown(gateway: Open) -> None:
    async with gateway(["Hi.", "Ho."]) as gw:
        _, client = await gw.session()
        _, other = await gw.session()
        player = Responses().user("Go.")
        player.extra = {"store": True}
        turn = await player.turn(client)
        assert (await other.get(f"/v1/responses/{turn.id}")).status == 404
        assert (await other.request("DELETE", f"/v1/responses/{turn.id}")).status == 404
        body = {"model": "m", "previous_response_id": turn.id, "input": "x"}
        assert (await other.post("/v1/responses", body)).json()["error"]["code"] == "previous_response_not_found"
        assert (await client.get(f"/v1/responses/{turn.id}")).status == 200
