"""Public bug reports about tokens and records, end to end through the whole gateway: request in, prompt at the engine, answer out.

Each has its number in the name. Parsing and encoding alone are tested per dialect in `tests/dialects`; here is what needs the gateway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import orjson
import pytest
from gateway_players import NAMES, PLAYERS, THINKING, Chat, Player, call_text
from gateway_reports import HI
from test_capture import extends

from polar.engines.base import Chunk, Generation, MessagesRequest, TokensRequest
from polar.store.export import completion_to_json
from polar.testing.engine import Reply, fake_logprob

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# --- tokens ------------------------------------------------------------------------------------------------------------------


@every_player
async def test_b92_a_streamed_call_with_tools_loses_no_token(gateway: Open, kind: type[Player]) -> None:
    sampled = THINKING + "I look." + call_text()
    async with gateway([sampled], stream="live") as gw:
        session, client = await gw.session()
        turn = await kind().user("Go.").turn(client, True)
        (made,) = await gw.completions(session)
        assert made.sampled_ids is not None
        assert gw.engine.tokenizer.decode(made.sampled_ids.tolist(), skip_special=False) == sampled + "<|im_end|>"
        assert turn.completion_tokens == len(made.sampled_ids)


@pytest.mark.parametrize(("count", "told"), [("completion_tokens", "ids and counts 7777"), ("prompt_tokens", "the engine counts 7777")])
async def test_b92_a_live_stream_that_counts_other_tokens_is_served_and_not_trained(gateway: Open, count: str, told: str) -> None:
    async with gateway([HI], stream="live") as gw:
        session, client = await gw.session()
        stream = gw.engine.stream_into

        async def miscounted(request: TokensRequest, take: Callable[[Sequence[Chunk]], object]) -> None:
            await stream(request, lambda chunks: take([replace(one, **{count: 7777}) if one.finish else one for one in chunks]))

        gw.engine.stream_into = miscounted
        assert (await Chat().user("Go.").turn(client, True)).text == HI
        (made,) = await gw.completions(session)
        assert made.status == "complete"
        assert told in (made.untrainable or "")


@pytest.mark.parametrize("missing", ["token_ids", "prompt_ids", "logprobs"])
async def test_b93_half_a_record_is_served_and_not_trained(gateway: Open, missing: str) -> None:
    async with gateway(lambda call: HI, mode="messages", check=True) as gw:
        session, client = await gw.session()
        chat = gw.engine.chat

        async def partly(request: MessagesRequest) -> list[Generation]:
            generations = await chat(request)
            for generation in generations:
                setattr(generation, missing, None)
            return list(generations)

        gw.engine.chat = partly
        assert (await Chat().user("Go.").turn(client)).text == HI
        (made,) = await gw.completions(session)
        assert made.untrainable is not None


async def test_b95_log_probabilities_without_a_value_are_valid_json_everywhere(gateway: Open) -> None:
    async with gateway([Reply("Hi.", logprobs=[float("-inf"), None, -0.5])]) as gw:
        session, client = await gw.session()
        player = Chat().user("Go.")
        player.extra = {"logprobs": True}
        content = (await player.send(client)).json()["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in content] == [-9999.0, -9999.0]
        (made,) = await gw.completions(session)
        assert made.logprobs is not None
        assert np.isnan(made.logprobs[1])
        exported = orjson.loads(completion_to_json(made))
        assert exported["logprobs"][1:] == [None, -0.5]


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"temperature": 1.0}, {"temperature": 0}, {"top_p": 0.8}], ids=str)
async def test_b97_each_completion_says_how_it_was_sampled(gateway: Open, sampling: dict[str, Any]) -> None:
    async with gateway([HI]) as gw:
        session, client = await gw.session(kind="eval")
        player = Chat().user("Go.")
        player.extra = sampling
        await player.turn(client)
        (made,) = await gw.completions(session)
        assert sampling.items() <= made.sampling.items()
        assert ("greedy" in made.tags) == (sampling.get("temperature") == 0)


@every_player
async def test_b100_a_sub_agent_in_between_takes_no_ones_place(gateway: Open, kind: type[Player]) -> None:
    async with gateway(lambda call: call_text() if call.number < 4 else HI) as gw:
        session, client = await gw.session()
        main, sub = kind().user("Main."), kind(system="You search.").user("Sub.")
        for _ in range(2):
            main.results(await main.turn(client), "ok")
            sub.results(await sub.turn(client), "ok")
        await main.turn(client)
        made = await gw.completions(session)
        assert [one.parent for one in made] == [None, None, 0, 1, 2]
        assert all(extends(one, made[one.parent]) for one in made if one.parent is not None)


async def test_b108_b114_what_a_harness_writes_as_the_assistant_is_prompt_not_sample(gateway: Open) -> None:
    async with gateway([HI]) as gw:
        session, client = await gw.session()
        player = Chat().user("Go.")
        player.history.append({"role": "assistant", "content": "Sorry, max turns."})
        await player.user("More.").turn(client)
        (made,) = await gw.completions(session)
        assert "Sorry, max turns." in gw.engine.tokenizer.decode((made.prompt_ids if made.prompt_ids is not None else []).tolist())  # type: ignore[union-attr]
        assert made.answer.text == HI
        assert made.parent is None


@every_player
async def test_b109_count_prompt_and_engine_agree_on_every_token(gateway: Open, kind: type[Player]) -> None:
    async with gateway([HI]) as gw:
        session, client = await gw.session()
        turn = await kind().user("Go.").turn(client)
        (made,) = await gw.completions(session)
        assert made.prompt_ids is not None
        assert turn.prompt_tokens == len(made.prompt_ids) == len(gw.engine.calls[0].prompt_ids)
        assert gw.engine.tokenizer.encode(gw.engine.calls[0].text) == made.prompt_ids.tolist()


async def test_b111_each_turn_keeps_its_own_stop_reason(gateway: Open) -> None:
    async with gateway([Reply("one", finish="length"), call_text(), HI]) as gw:
        session, client = await gw.session()
        player = Chat().user("Go.")
        await player.turn(client)
        turn = await player.user("Go on.").turn(client)
        await player.results(turn, "ok").turn(client)
        assert [one.finish for one in await gw.completions(session)] == ["length", "tool_calls", "stop"]


@every_player
async def test_b112_parallel_results_share_one_turn_of_the_template(gateway: Open, kind: type[Player]) -> None:
    async with gateway([call_text() + "\n" + call_text(), HI]) as gw:
        _, client = await gw.session()
        player = kind().user("Go.")
        await player.results(await player.turn(client), "one", "two").turn(client)
        tail = gw.engine.calls[1].text.rpartition("</tool_call>")[2]
        assert tail.count("<|im_start|>user") == 1
        assert tail.count("<tool_response>") == 2


@every_player
@both_ways
async def test_b119_ids_decode_to_what_was_said_and_line_up(gateway: Open, kind: type[Player], stream: bool) -> None:
    async with gateway(["naïve 漢 🙂"]) as gw:
        session, client = await gw.session()
        turn = await kind().user("Go.").turn(client, stream)
        (made,) = await gw.completions(session)
        assert made.sampled_ids is not None
        assert made.logprobs is not None
        assert gw.engine.tokenizer.decode(made.sampled_ids.tolist()) == turn.text
        assert len(made.sampled_ids) == len(made.logprobs)
        assert made.logprobs.tolist() == [fake_logprob(token, at) for at, token in enumerate(made.sampled_ids.tolist())]


async def test_an_engine_that_aborts_is_no_finished_answer(gateway: Open) -> None:
    """A weight update may end a generation early; half an answer must not look like a whole one."""
    async with gateway([HI, HI]) as gw:
        session, client = await gw.session()
        generate = gw.engine.generate

        async def aborted(request: TokensRequest) -> list[Generation]:
            (generation,) = await generate(request)
            generation.finish = "abort"
            return [generation]

        gw.engine.generate = aborted
        answer = await Chat().user("Go.").send(client)
        assert answer.status == 502
        (made,) = await gw.completions(session)
        assert made.status == "aborted"
        assert made.sampled_ids is not None
        assert len(made.sampled_ids) == 3
