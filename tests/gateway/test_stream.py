"""Streams in time: pings, errors before and after the status is fixed, and live answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from gateway_players import NAMES, PLAYERS, THINKING, Anthropic, Chat, Google, Player, Responses, call_text, until

from polar.dialects.openai_chat.reply import ChatEncoder
from polar.errors import EngineBusy, EngineOverloaded, EngineRejected, EngineTimeout, EngineUnavailable
from polar.testing.engine import Drop, Reply, fake_logprob

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
QUICK: dict[str, Any] = {"first_ping_s": 0.02, "ping_s": 0.02}
IN_STREAM = {
    "anthropic": b"event: error",
    "openai_chat": b'"error"',
    "openai_responses": b"response.failed",
    "google": b'"error"',
}


@every_player
async def test_b83_a_slow_answer_is_preceded_by_pings_and_read_as_ever(gateway: Open, kind: type[Player]) -> None:
    async with gateway([Reply(THINKING + "Hi. " + call_text(), delay_s=0.15)], **QUICK) as gw:
        _, client = await gw.session()
        turn = await kind().user("Go.").turn(client, True)
        assert kind().pings(turn.answer) >= 2
        assert (turn.text.strip(), turn.thinking, len(turn.calls)) == ("Hi.", "Let me see.", 1)


@every_player
async def test_a_quick_answer_has_no_ping(gateway: Open, kind: type[Player]) -> None:
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        turn = await kind().user("Go.").turn(client, True)
        assert kind().pings(turn.answer) == 0


async def test_pings_come_only_after_message_start(gateway: Open) -> None:
    async with gateway([Reply("Hi.", delay_s=0.1)], **QUICK) as gw:
        _, client = await gw.session()
        turn = await Anthropic().user("Go.").turn(client, True)
        assert turn.answer.body.index(b"message_start") < turn.answer.body.index(Anthropic.ping)


FAILURES = {
    "429": (EngineBusy("slow down", retry_after="7"), {"anthropic": 429, "openai_chat": 429, "openai_responses": 429, "google": 429}),
    "503": (
        EngineOverloaded("full", retry_after="7"),
        {"anthropic": 529, "openai_chat": 503, "openai_responses": 503, "google": 503},
    ),
    "529": (
        EngineOverloaded("full", status=529, retry_after="7"),
        {"anthropic": 529, "openai_chat": 503, "openai_responses": 503, "google": 503},
    ),
    "400": (EngineRejected("bad"), {"anthropic": 400, "openai_chat": 400, "openai_responses": 400, "google": 400}),
    "504": (EngineTimeout("late"), {"anthropic": 504, "openai_chat": 504, "openai_responses": 504, "google": 504}),
    "gone": (EngineUnavailable("gone"), {"anthropic": 500, "openai_chat": 502, "openai_responses": 502, "google": 503}),
    "cut": (Drop(), {"anthropic": 500, "openai_chat": 502, "openai_responses": 502, "google": 503}),
}


@every_player
@both_ways
@pytest.mark.parametrize("failure", FAILURES)
async def test_b84_an_engines_error_keeps_status_and_retry_after_in_the_callers_shape(
    gateway: Open, kind: type[Player], stream: bool, failure: str
) -> None:
    error, statuses = FAILURES[failure]
    async with gateway([Reply(error=error)]) as gw:
        session, client = await gw.session()
        answer = await kind().user("Go.").send(client, stream)
        assert answer.status == statuses[kind.name]
        kind().error(answer)
        assert answer.headers.get("retry-after") == getattr(error, "retry_after", None)
        assert await gw.completions(session) == []


@every_player
async def test_an_error_after_the_first_ping_is_the_streams_last_event(gateway: Open, kind: type[Player]) -> None:
    async with gateway([Reply(delay_s=0.1, error=EngineBusy("slow down", retry_after="3"))], **QUICK) as gw:
        session, client = await gw.session()
        answer = await kind().user("Go.").send(client, True)
        assert answer.status == 200
        assert IN_STREAM[kind.name] in answer.chunks[-1]
        assert b"slow down" in answer.chunks[-1]
        assert not any(mark in answer.body for mark in kind.terminal)
        assert await gw.completions(session) == []


async def test_an_answer_that_cannot_be_written_is_an_error_of_status_500(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """jwadow/kiro-gateway#268: once the status was out, a fault became a stream without an end."""
    async with gateway([call_text()]) as gw:
        _, client = await gw.session()
        monkeypatch.setattr(ChatEncoder, "_tool_call", lambda self, delta: delta.secret)
        answer = await Chat().user("Go.").send(client, True)
        assert answer.status == 500
        assert Chat().error(answer)[0] == "server_error"


@every_player
async def test_an_error_inside_the_gateway_tells_nothing_of_its_inside(gateway: Open, kind: type[Player]) -> None:
    async with gateway([Reply(error=RuntimeError("a secret path"))]) as gw:
        _, client = await gw.session()
        answer = await kind().user("Go.").send(client)
        assert answer.status == 500
        assert "secret" not in kind().error(answer)[1]


@every_player
async def test_live_text_arrives_before_the_end(gateway: Open, kind: type[Player]) -> None:
    async with gateway([Reply("one two three four", token_delay_s=0.03)], stream="live") as gw:
        session, client = await gw.session()
        exchange = kind().user("Go.").start(client, True)
        await until(lambda: b"two" in exchange.answer.body)
        assert not exchange.done
        assert not any(mark in exchange.answer.body for mark in kind.terminal[:1])
        assert await gw.completions(session) == []
        await exchange.finished()
        assert len(await gw.completions(session)) == 1


@every_player
async def test_a_live_answer_reads_like_a_replayed_one(gateway: Open, kind: type[Player]) -> None:
    sampled = THINKING + "I look: é漢🙂 " + call_text('{"command" : "ls"}') + "\n" + call_text()
    async with gateway(lambda call: sampled) as gw:
        session, replayed = await gw.session()
        live_session, live = await gw.session(settings={"stream": "live"})
        ours, theirs = kind().user("Go."), kind().user("Go.")
        one, two = await ours.turn(replayed, True), await theirs.turn(live, True)
        assert (one.text, one.thinking, one.stop, [call[1:] for call in one.calls]) == (
            two.text,
            two.thinking,
            two.stop,
            [call[1:] for call in two.calls],
        )
        assert (one.prompt_tokens, one.completion_tokens) == (two.prompt_tokens, two.completion_tokens)
        (first,), (second,) = await gw.completions(session), await gw.completions(live_session)
        assert first.sampled_ids is not None
        assert second.sampled_ids is not None
        assert first.logprobs is not None
        assert second.logprobs is not None
        assert first.sampled_ids.tolist() == second.sampled_ids.tolist()
        assert first.logprobs.tolist() == second.logprobs.tolist()


@every_player
async def test_a_live_malformed_call_is_text(gateway: Open, kind: type[Player]) -> None:
    sampled = "I try. <tool_call>\n{oops}\n</tool_call>"
    async with gateway([sampled], stream="live") as gw:
        session, client = await gw.session()
        turn = await kind().user("Go.").turn(client, True)
        assert (turn.text, turn.calls, turn.stop) == (sampled, [], kind.stops["stop"])
        assert "tool_call_malformed" in (await gw.completions(session))[0].tags


@every_player
async def test_a_live_forbidden_call_is_text(gateway: Open, kind: type[Player]) -> None:
    async with gateway(["Well. " + call_text()], stream="live") as gw:
        _, client = await gw.session()
        turn = await kind(tools=False).user("Go.").turn(client, True)
        assert (turn.text, turn.calls) == ("Well. " + call_text(), [])


@every_player
async def test_a_live_error_in_the_middle_keeps_what_was_sampled(gateway: Open, kind: type[Player]) -> None:
    async with gateway([Reply("one two three", error=EngineUnavailable("died"), error_after=2)], stream="live") as gw:
        session, client = await gw.session()
        answer = await kind().user("Go.").send(client, True)
        assert answer.status == 200
        assert b"one" in answer.body
        assert IN_STREAM[kind.name] in answer.chunks[-1]
        assert not any(mark in answer.body for mark in kind.terminal[:1])
        (made,) = await gw.completions(session)
        assert made.status == "aborted"
        assert made.sampled_ids is not None
        assert made.logprobs is not None
        assert gw.engine.tokenizer.decode(made.sampled_ids.tolist()) == "one two"
        assert made.logprobs.tolist() == [fake_logprob(token, at) for at, token in enumerate(made.sampled_ids.tolist())]
        assert made.untrainable is not None
        assert "died" in made.untrainable


@every_player
async def test_a_live_error_before_the_first_token_keeps_its_status(gateway: Open, kind: type[Player]) -> None:
    async with gateway([Reply(error=EngineBusy("slow down", retry_after="7"))], stream="live") as gw:
        session, client = await gw.session()
        answer = await kind().user("Go.").send(client, True)
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")
        assert await gw.completions(session) == []


async def test_live_pings_while_nothing_is_certain(gateway: Open) -> None:
    async with gateway([Reply("Hi.", delay_s=0.1)], stream="live", **QUICK) as gw:
        _, client = await gw.session()
        turn = await Anthropic().user("Go.").turn(client, True)
        assert turn.text == "Hi."
        assert Anthropic.ping in turn.answer.body


async def test_a_live_session_in_mode_messages_is_replayed(gateway: Open) -> None:
    async with gateway(["Hi."], stream="live", mode="messages") as gw:
        session, client = await gw.session()
        assert (await Chat().user("Go.").turn(client, True)).text == "Hi."
        assert (await gw.completions(session))[0].mode == "messages"


@every_player
async def test_no_text_ends_a_line_of_the_stream(gateway: Open, kind: type[Player]) -> None:
    """langgenius/dify#39008, Soju06/codex-lb#1010: httpx's `iter_lines` splits at these and finds half an event."""
    text = "a\u2028b\u2029c\u0085d\\\u2028e"
    async with gateway([text]) as gw:
        _, client = await gw.session()
        turn = await kind().user("Go.").turn(client, True)
        assert turn.text == text
        assert turn.answer.body.decode().splitlines() == turn.answer.body.decode().split("\n")[:-1]


async def test_b45_sequence_numbers_rise_through_pings_and_live_deltas(gateway: Open) -> None:
    async with gateway([Reply(THINKING + "one two", delay_s=0.05, token_delay_s=0.01)], stream="live", **QUICK) as gw:
        _, client = await gw.session()
        turn = await Responses().user("Go.").turn(client, True)
        numbers = [event["sequence_number"] for event in turn.answer.events()]
        assert numbers == list(range(len(numbers)))


async def test_google_streams_a_json_array_without_alt_sse(gateway: Open) -> None:
    async with gateway(["Hi."]) as gw:
        _, client = await gw.session()
        answer = await client.post("/v1beta/models/m:streamGenerateContent", Google().user("Go.").body(True))
        assert answer.headers["content-type"].startswith("application/json")
        chunks = answer.json()
        assert chunks[-1]["candidates"][0]["finishReason"] == "STOP"


@pytest.mark.parametrize("name", ["org/model:tag", "gemini-2.5-pro", "a/b/c"])
async def test_google_model_names_may_hold_slashes_and_colons(gateway: Open, name: str) -> None:
    async with gateway(["Hi."]) as gw:
        session, client = await gw.session()
        for version in ("v1beta", "v1"):
            answer = await client.post(f"/{version}/models/{name}:countTokens", {"contents": [{"parts": [{"text": "x"}]}]})
            assert answer.status == 200
        assert (await client.post(f"/v1beta/models/{name}:generateContent", Google().user("Go.").body(False))).status == 200
        assert (await gw.completions(session))[0].model_requested == name


async def test_several_choices_of_a_live_session_are_replayed(gateway: Open) -> None:
    async with gateway(["One.", "Two."], stream="live") as gw:
        session, client = await gw.session()
        player = Chat().user("Go.")
        player.extra = {"n": 2}
        answer = await player.send(client, True)
        said = ["", ""]
        for event in answer.events()[:-1]:
            for choice in event["choices"]:
                said[choice["index"]] += choice["delta"].get("content") or ""
        assert said == ["One.", "Two."]
        assert [made.answer.text for made in await gw.completions(session)] == said


@pytest.mark.parametrize("kind", [Chat, Responses], ids=["openai_chat", "openai_responses"])
async def test_a_live_session_shows_the_alternatives_that_were_asked_for(gateway: Open, kind: type[Player]) -> None:
    """A live stream's tokens come without them, so that the lists were empty; such an answer is replayed."""
    async with gateway(["Hi."], stream="live") as gw:
        _, client = await gw.session()
        player = kind().user("Go.")
        player.extra = {"logprobs": True, "top_logprobs": 2}
        events = [event for event in (await player.send(client, True)).events() if event != "[DONE]"]
        parts = [choice["logprobs"] for event in events for choice in event.get("choices", ()) if choice["logprobs"]]
        if kind is Responses:
            parts = [{"content": events[-1]["response"]["output"][0]["content"][0]["logprobs"]}]
        assert [len(entry["top_logprobs"]) for part in parts for entry in part["content"]] == [2, 2]
