"""An answer that its caller has begun (Anthropic's prefill): the model goes on with it, and the next turn finds both halves as one."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from gateway_players import Anthropic
from gateway_reports import messages, prompts, user
from test_capture import extends

from polar.testing.engine import Reply
from polar.trajectory import build, builder, validate

Open = Callable[..., Any]
BEGUN = {"role": "assistant", "content": "The capital of France"}
GOES_ON = " is Paris."


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("settings", [{}, {"stream": "live"}], ids=["replayed", "live"])
async def test_the_model_goes_on_where_the_caller_stopped(gateway: Open, stream: bool, settings: dict[str, Any]) -> None:
    """BerriAI/litellm#28580: the last message was taken for a finished turn, and the model began another one."""
    async with gateway([GOES_ON], **settings) as gw:
        session, client = await gw.session()
        player = Anthropic(system=None, tools=False).user("Which is it?")
        player.history.append(BEGUN)
        turn = await player.turn(client, stream)
        assert gw.engine.calls[0].text.endswith("<|im_start|>assistant\nThe capital of France")
        assert turn.text == GOES_ON
        (completion,) = await gw.completions(session)
        assert completion.answer.text == "The capital of France is Paris."
        assert [message.role for message in completion.messages] == ["user"]
        assert turn.prompt_tokens == len(completion.prompt_ids)


@pytest.mark.parametrize("earlier", [False, True])
async def test_the_next_turn_extends_the_tokens_of_both_halves(gateway: Open, earlier: bool) -> None:
    async with gateway(["Ask.", GOES_ON, "Yes."] if earlier else [GOES_ON, "Yes."]) as gw:
        session, client = await gw.session()
        player = Anthropic().user("Hello.")
        if earlier:
            await player.turn(client)
            player.user("Which is it?")
        player.history.append(BEGUN)
        turn = await player.turn(client)
        player.history[-2:] = [{"role": "assistant", "content": BEGUN["content"] + turn.text}]
        await player.user("Sure?").turn(client)
        chain = await gw.completions(session)
        assert [extends(later, before) for before, later in pairwise(chain)] == [True] * (1 + earlier)
        assert chain[-1].broken is None


async def test_in_rows_what_was_sampled_is_not_the_message_that_holds_what_the_caller_wrote(gateway: Open) -> None:
    async with gateway([GOES_ON, "Yes."]) as gw:
        session, client = await gw.session()
        player = Anthropic().user("Which is it?")
        player.history.append(BEGUN)
        turn = await player.turn(client)
        player.history[-2:] = [{"role": "assistant", "content": BEGUN["content"] + turn.text}]
        await player.user("Sure?").turn(client)
        (row,) = build(session, await gw.completions(session), builder(config={"untrainable": True})).traces
        assert [span.message for span in row.spans] == [None, 4]
        assert row.messages[2].text == "The capital of France is Paris."
        assert row.trained_messages == (False, False, False, False, True)
        assert validate(row.to_json(), tokenizer=gw.gateway.default.tokenizer) == []


async def test_where_the_prompt_opens_thinking_it_is_closed_first(gateway: Open) -> None:
    async with gateway([GOES_ON, "Yes."], renderer="qwen3.5") as gw:
        session, client = await gw.session()
        player = Anthropic(tools=False).user("Which is it?")
        player.history.append(BEGUN)
        turn = await player.turn(client)
        assert (turn.thinking, turn.text) == ("", GOES_ON)
        assert gw.engine.calls[0].text.endswith("<think>\n\n</think>\n\nThe capital of France")
        player.history[-2:] = [{"role": "assistant", "content": BEGUN["content"] + turn.text}]
        await player.user("Sure?").turn(client)
        first, second = await gw.completions(session)
        assert extends(second, first)


async def test_what_it_is_counted_as_is_what_is_sent(gateway: Open) -> None:
    async with gateway(["x"]) as gw:
        _, client = await gw.session()
        body = messages(user(), BEGUN)
        await prompts(gw, client, "/v1/messages", body)
        count = await client.post("/v1/messages/count_tokens", body)
        assert count.json()["input_tokens"] == len(gw.engine.calls[0].prompt_ids)


async def test_an_answer_that_is_sent_back_last_is_gone_on_with(gateway: Open) -> None:
    """A harness that was cut off sends what it has; what it has may be an answer of ours, cut at its limit."""
    async with gateway([Reply("It is", finish="length"), " so."]) as gw:
        session, client = await gw.session()
        player = Anthropic(tools=False).user("Well?")
        await player.turn(client)
        turn = await player.turn(client)
        assert turn.text == " so."
        first, second = await gw.completions(session)
        assert gw.engine.calls[1].text.endswith("It is")
        assert second.answer.text == "It is so."
        assert extends(second, first)
        assert second.broken is None


@pytest.mark.parametrize(
    "content",
    [[{"type": "tool_use", "id": "a", "name": "bash", "input": {}}], "", [{"type": "thinking", "thinking": "x", "signature": ""}], "  \n"],
    ids=["call", "empty", "thinking", "blank"],
)
async def test_a_call_or_nothing_is_no_beginning(gateway: Open, content: Any) -> None:
    async with gateway(["x"]) as gw:
        _, client = await gw.session()
        (prompt,) = await prompts(gw, client, "/v1/messages", messages(user(), {"role": "assistant", "content": content}))
        assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")


async def test_where_the_engine_renders_a_new_turn_is_begun(gateway: Open) -> None:
    async with gateway(["x"], mode="messages") as gw:
        _, client = await gw.session()
        (prompt,) = await prompts(gw, client, "/v1/messages", messages(user(), BEGUN))
        assert prompt.endswith("France<|im_end|>\n<|im_start|>assistant\n")
