"""Which sampling parameters a call is really made with, and what an overflow looks like in each dialect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from gateway_players import NAMES, PLAYERS, Anthropic, Chat, Google, Player, Responses, call_text

from polar.engines.base import Generation, MessagesRequest
from polar.errors import ContextOverflow
from polar.gateway.config import TrainSampling
from polar.testing.engine import Reply

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
ASKED: dict[type[Player], dict[str, Any]] = {
    Anthropic: {"temperature": 0.2, "top_p": 0.5, "top_k": 7},
    Chat: {"temperature": 0.2, "top_p": 0.5, "presence_penalty": 0.3},
    Responses: {"temperature": 0.2, "top_p": 0.5},
    Google: {"generationConfig": {"temperature": 0.2, "topP": 0.5, "topK": 7}},
}
FULL = 400
"""A context that the words below fill."""


@every_player
async def test_a_train_session_forces_the_trainers_sampling(gateway: Open, kind: type[Player]) -> None:
    async with gateway(["Hi."]) as gw:
        session, client = await gw.session()
        player = kind().user("Go.")
        player.extra = ASKED[kind]
        await player.turn(client)
        (made,) = await gw.completions(session)
        assert {name: made.sampling[name] for name in TrainSampling.model_fields} == TrainSampling().model_dump()
        assert (made.asked["sampling"]["temperature"], made.asked["sampling"]["top_p"]) == (0.2, 0.5)


@every_player
async def test_an_eval_session_keeps_the_harnesss_sampling(gateway: Open, kind: type[Player]) -> None:
    async with gateway(["Hi."]) as gw:
        session, client = await gw.session(kind="eval")
        player = kind().user("Go.")
        player.extra = ASKED[kind]
        await player.turn(client)
        (made,) = await gw.completions(session)
        assert (made.sampling["temperature"], made.sampling["top_p"]) == (0.2, 0.5)
        assert "repetition_penalty" not in made.sampling


async def test_a_session_overrides_the_gateways_sampling(gateway: Open) -> None:
    async with gateway(lambda call: "Hi.", train_sampling={"temperature": 0.8, "top_p": 0.95}) as gw:
        session, client = await gw.session(settings={"sampling": {"temperature": 0.6}})
        await Chat().user("Go.").turn(client)
        (made,) = await gw.completions(session)
        assert (made.sampling["temperature"], made.sampling["top_p"]) == (0.6, 0.95)


@every_player
async def test_max_tokens_is_clamped_to_the_room_left(gateway: Open, kind: type[Player]) -> None:
    async with gateway(lambda call: "Hi.", engine={"context": FULL}) as gw:
        session, client = await gw.session()
        turn = await kind().user("Go.").turn(client)
        (made,) = await gw.completions(session)
        assert made.prompt_ids is not None
        assert made.sampling["max_tokens"] == FULL - len(made.prompt_ids)
        asked = made.asked["sampling"].get("max_tokens")
        assert ("clamped" in made.tags) == (asked is not None)
        assert turn.text == "Hi."


async def test_max_tokens_below_the_room_is_kept(gateway: Open) -> None:
    async with gateway(lambda call: "Hi there, you.") as gw:
        session, client = await gw.session()
        player = Chat().user("Go.")
        player.extra = {"max_completion_tokens": 2}
        turn = await player.turn(client)
        (made,) = await gw.completions(session)
        assert (turn.text, turn.stop, made.sampling["max_tokens"]) == ("Hi there", "length", 2)
        assert "clamped" not in made.tags


async def test_a_full_context_is_named_as_such(gateway: Open) -> None:
    async with gateway(lambda call: "word " * 1000, engine={"context": FULL}) as gw:
        _, client = await gw.session()
        assert (await Anthropic().user("Go.").turn(client)).stop == "max_tokens"
        client.headers["anthropic-beta"] = "interleaved-thinking-2025-05-14,model-context-window-exceeded-2025-08-26"
        assert (await Anthropic().user("Go on.").turn(client)).stop == "model_context_window_exceeded"


@both_ways
async def test_b85_an_overflow_makes_claude_code_compact(gateway: Open, stream: bool) -> None:
    async with gateway([], engine={"context": FULL}) as gw:
        session, client = await gw.session()
        answer = await Anthropic().user("word " * FULL).send(client, stream)
        assert answer.status == 400
        kind, message = Anthropic().error(answer)
        assert kind == "invalid_request_error"
        assert message.startswith("prompt is too long: ")
        assert message.endswith(f" tokens > {FULL} maximum")
        assert await gw.completions(session) == []


@both_ways
async def test_b86_an_overflow_has_openais_code(gateway: Open, stream: bool) -> None:
    async with gateway([], engine={"context": FULL}) as gw:
        _, client = await gw.session()
        answer = await Chat().user("word " * FULL).send(client, stream)
        error = answer.json()["error"]
        assert (answer.status, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
        assert "maximum context length" in error["message"]


async def test_b87_an_overflow_is_an_event_of_codexs_stream(gateway: Open) -> None:
    async with gateway([], engine={"context": FULL}) as gw:
        _, client = await gw.session()
        answer = await Responses().user("word " * FULL).send(client, True)
        assert answer.status == 200
        events = answer.events()
        assert events[0]["type"] == "response.created"
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["status"] == "failed"
        assert events[-1]["response"]["error"]["code"] == "context_length_exceeded"


async def test_b87_an_unstreamed_overflow_is_a_400(gateway: Open) -> None:
    async with gateway([], engine={"context": FULL}) as gw:
        _, client = await gw.session()
        answer = await Responses().user("word " * FULL).send(client)
        assert (answer.status, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@both_ways
async def test_an_overflow_in_googles_words(gateway: Open, stream: bool) -> None:
    async with gateway([], engine={"context": FULL}) as gw:
        _, client = await gw.session()
        answer = await Google().user("word " * FULL).send(client, stream)
        word, message = Google().error(answer)
        assert (answer.status, word) == (400, "INVALID_ARGUMENT")
        assert "exceeds the maximum number of tokens allowed" in message


async def test_b85_in_mode_messages_the_sum_is_clamped_too(gateway: Open) -> None:
    """The engine counts the prompt there, and refuses when only the sum is too big."""
    async with gateway(lambda call: "Hi.", mode="messages", engine={"context": FULL}) as gw:
        session, client = await gw.session()
        assert (await Anthropic().user("Go.").turn(client)).text == "Hi."
        assert (await Anthropic().user("word " * FULL).send(client)).status == 400
        assert len(await gw.completions(session)) == 1


@pytest.mark.parametrize("counted", [1, 2001])
async def test_b85_an_engine_that_only_counts_until_the_sum_is_too_big_finds_the_room_itself(gateway: Open, counted: int) -> None:
    """vllm-project/vllm#42474: it says that a prompt has at least one token more than fits beside the answer, however long it is."""
    too_much = ContextOverflow(f"your prompt contains at least {counted} input tokens", prompt_tokens=counted, limit=4000)
    async with gateway([Reply(error=too_much), "Hi."], mode="messages", engine={"context": 4000}) as gw:
        session, client = await gw.session()
        assert (await Anthropic().user("Go.").turn(client)).text == "Hi."
        assert "max_tokens" not in gw.engine.calls[1].body
        assert "clamped" in (await gw.completions(session))[0].tags


async def test_a_server_s_own_longest_answer_is_recorded_as_clamped(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(["Hi."], mode="messages") as gw:
        chat = gw.engine.chat

        async def capped(request: MessagesRequest) -> list[Generation]:
            return [replace(generation, max_tokens=100) for generation in await chat(request)]

        monkeypatch.setattr(gw.engine, "chat", capped)
        session, client = await gw.session()
        await Chat().user("Go.").turn(client)
        (made,) = await gw.completions(session)
        assert (made.sampling["max_tokens"], "clamped" in made.tags) == (100, True)


@pytest.mark.parametrize(
    ("extra", "kind", "tag"),
    [
        ({"temperature": 0}, "eval", "greedy"),
        ({"temperature": 1e-8}, "eval", "greedy"),
        ({"temperature": 0.005}, "eval", "greedy"),
        ({"response_format": {"type": "json_object"}}, "train", "constrained"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}}, "train", "constrained"),
        ({"logit_bias": {"5": 3}}, "train", "constrained"),
        ({"tool_choice": "required"}, "train", "constrained"),
        ({"max_completion_tokens": 10**6}, "train", "clamped"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_bends_the_distribution_is_tagged(gateway: Open, extra: dict[str, Any], kind: str, tag: str) -> None:
    async with gateway([call_text()]) as gw:
        session, client = await gw.session(kind=kind)
        player = Chat().user("Go.")
        player.extra = extra
        await player.turn(client)
        (made,) = await gw.completions(session)
        assert tag in made.tags


async def test_a_plain_call_has_no_such_tag(gateway: Open) -> None:
    async with gateway(["Hi."]) as gw:
        session, client = await gw.session()
        await Chat().user("Go.").turn(client)
        assert (await gw.completions(session))[0].tags == frozenset()


@both_ways
@pytest.mark.parametrize("kind", [Anthropic, Chat, Google], ids=lambda kind: kind.name)
async def test_b25_a_stop_sequence_reaches_the_engine_and_is_left_out(gateway: Open, kind: type[Player], stream: bool) -> None:
    extras: dict[type[Player], dict[str, Any]] = {
        Anthropic: {"stop_sequences": ["</x>"]},
        Chat: {"stop": ["</x>"]},
        Google: {"generationConfig": {"stopSequences": ["</x>"]}},
    }
    async with gateway([Reply("so </x> and on")]) as gw:
        session, client = await gw.session()
        player = kind().user("Go.")
        player.extra = extras[kind]
        turn = await player.turn(client, stream)
        assert turn.text == "so "
        (made,) = await gw.completions(session)
        assert made.stop_sequence == "</x>"
        assert made.sampling["stop"] == ["</x>"]
        if kind is Anthropic:
            assert turn.stop == "stop_sequence"


async def test_a_train_session_samples_without_the_harnesss_seed(gateway: Open) -> None:
    """With a fixed seed all samples of a group would be the same."""
    async with gateway(lambda call: "Hi.") as gw:
        for kind, kept in (("train", False), ("eval", True)):
            session, client = await gw.session(kind=kind)
            player = Chat().user("Go.")
            player.extra = {"seed": 7}
            await player.turn(client)
            (made,) = await gw.completions(session)
            assert ("seed" in made.sampling) == kept
            assert made.asked["sampling"]["seed"] == 7


async def test_the_token_budget_bounds_the_last_answer(gateway: Open) -> None:
    async with gateway(lambda call: "one two three four five six seven eight nine ten") as gw:
        session, client = await gw.session(settings={"budgets": {"max_tokens": 4}})
        turn = await Chat().user("Go.").turn(client)
        (made,) = await gw.completions(session)
        assert (turn.stop, len(made.sampled_ids), made.sampling["max_tokens"]) == ("length", 4, 4)


async def test_what_no_parser_can_read_is_recorded_all_the_same(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    async with gateway(lambda call: "Hi.") as gw:
        session, client = await gw.session()

        def broken(*_: object) -> None:
            raise RuntimeError("a fault of the parser")

        monkeypatch.setattr(gw.gateway.models.find("any").path, "read", broken)
        answer = await client.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "Go."}]})
        assert answer.status == 500
        (made,) = await gw.completions(session)
        assert (made.status, made.sampled_ids is not None) == ("aborted", True)
        assert made.untrainable is not None
        assert "a fault of the parser" in made.untrainable


async def test_the_choices_of_a_call_share_what_the_budget_lets_it_sample(gateway: Open) -> None:
    async with gateway(lambda call: "one two three four five six seven eight") as gw:
        session, client = await gw.session(settings={"budgets": {"max_tokens": 9}})
        player = Chat().user("Go.")
        player.extra = {"n": 3}
        assert (await player.send(client)).status == 200
        made = await gw.completions(session)
        assert [len(one.sampled_ids) for one in made] == [3, 3, 3]
