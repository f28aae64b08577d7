"""Public bug reports of systems like this one, end to end through the whole gateway: request in, prompt at the engine, answer out, record.

Each has its number in the name. Parsing and encoding alone are tested per dialect in `tests/dialects`; here is what needs the gateway.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson
import pytest
from gateway_players import NAMES, PARAMETERS, PLAYERS, THINKING, Anthropic, Chat, Google, Player, Responses, call_text
from gateway_reports import ANTHROPIC_TOOL, HI, messages, prompts, user
from test_capture import extends

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# --- Anthropic -----------------------------------------------------------------------------------------------------


@every_player
@both_ways
async def test_b05_parallel_calls_of_one_tool_stay_apart(gateway: Open, kind: type[Player], stream: bool) -> None:
    async with gateway([call_text('{"p": 1}') + "\n" + call_text('{"p": 2}')]) as gw:
        _, client = await gw.session()
        turn = await kind().user("Go.").turn(client, stream)
        assert [call[2] for call in turn.calls] == [{"p": 1}, {"p": 2}]
        assert len({call[0] for call in turn.calls}) == 2


async def test_b07_a_replayed_call_starts_empty_and_comes_as_deltas(gateway: Open) -> None:
    async with gateway([call_text()]) as gw:
        _, client = await gw.session()
        events = (await Anthropic().user("Go.").send(client, True)).events()
        started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        assert [block["input"] for block in started if block["type"] == "tool_use"] == [{}]
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert orjson.loads("".join(delta.get("partial_json", "") for delta in deltas)) == {"command": "ls"}


@both_ways
async def test_b11_usage_is_always_there_in_numbers(gateway: Open, stream: bool) -> None:
    async with gateway([HI]) as gw:
        _, client = await gw.session()
        answer = await Anthropic().user("Go.").send(client, stream)
        if not stream:
            assert answer.json()["usage"]["input_tokens"] > 0
            return
        first, last = answer.events()[0], answer.events()[-2]
        assert first["message"]["usage"]["input_tokens"] > 0
        assert isinstance(first["message"]["usage"]["output_tokens"], int)
        assert last["usage"]["output_tokens"] > 0


async def test_b28_a_replayed_stream_counts_the_cache_from_its_first_event_on(gateway: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients differ in which event they take which count from: who mixes them must not count cached tokens twice."""
    async with gateway([HI]) as gw:
        _, client = await gw.session()
        honest = gw.engine.generate

        async def cached(request: Any) -> Any:
            return [replace(one, cached_tokens=8) for one in await honest(request)]

        monkeypatch.setattr(gw.engine, "generate", cached)
        events = (await Anthropic().user("Go.").send(client, True)).events()
        first, last = events[0]["message"]["usage"], events[-2]["usage"]
        assert first["cache_read_input_tokens"] == last["cache_read_input_tokens"] == 8
        assert first["input_tokens"] == last["input_tokens"] > 0


async def test_b14_b15_foreign_and_redacted_thinking_is_dropped_and_the_call_served(gateway: Open) -> None:
    blocks = [
        {"type": "thinking", "thinking": "secret", "signature": "EqMDCkYIBxgCKkBSb3N"},
        {"type": "redacted_thinking", "data": "QUFBQQ=="},
        {"type": "text", "text": "ok"},
    ]
    async with gateway([HI]) as gw:
        _, client = await gw.session()
        (text,) = await prompts(gw, client, "/v1/messages", messages(user(), {"role": "assistant", "content": blocks}, user("More.")))
        assert "secret" not in text
        assert "QUFB" not in text
        assert "ok<|im_end|>" in text


async def test_b14_our_own_thinking_is_never_visible_text(gateway: Open) -> None:
    async with gateway([THINKING + HI, HI]) as gw:
        _, client = await gw.session()
        player = Anthropic().user("Go.")
        await player.turn(client)
        await player.user("More.").turn(client)
        assert THINKING + HI in gw.engine.calls[1].text
        assert gw.engine.calls[1].text.count("Let me see.") == 1


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]], ids=["absent", "string", "list", "blank"])
async def test_b18_an_empty_tool_result_is_a_result(gateway: Open, content: Any) -> None:
    async with gateway([call_text(), HI]) as gw:
        session, client = await gw.session()
        player = Anthropic().user("Go.")
        turn = await player.turn(client)
        result: dict[str, Any] = {"type": "tool_result", "tool_use_id": turn.calls[0][0]}
        player.history.append({"role": "user", "content": [result if content is None else {**result, "content": content}]})
        await player.turn(client)
        first, second = await gw.completions(session)
        assert extends(second, first)
        assert "<tool_response>\n\n</tool_response>" in gw.engine.calls[1].text


async def test_b20_a_blank_text_beside_a_call_changes_nothing(gateway: Open) -> None:
    async with gateway([call_text(), HI]) as gw:
        session, client = await gw.session()
        player = Anthropic().user("Go.")
        turn = await player.turn(client)
        assert [block["type"] for block in player.history[-1]["content"]] == ["tool_use"]
        player.history[-1]["content"].insert(0, {"type": "text", "text": ""})
        await player.results(turn, "ok").turn(client)
        first, second = await gw.completions(session)
        assert extends(second, first)


async def test_b21_b22_a_system_message_in_the_middle_stays_in_its_place(gateway: Open) -> None:
    async with gateway([call_text(), call_text(), HI]) as gw:
        session, client = await gw.session()
        player = Anthropic().user("Go.")
        for left in (9, 8):
            turn = await player.turn(client)
            player.results(turn, "ok")
            player.history.append({"role": "system", "content": f"<total_tokens>{left}"})
        await player.turn(client)
        made = await gw.completions(session)
        assert all(extends(later, earlier) for earlier, later in pairwise(made))
        assert gw.engine.calls[2].text.count("<|im_start|>system") == 1
        assert gw.engine.calls[2].text.index("<total_tokens>9") < gw.engine.calls[2].text.index("<total_tokens>8")


async def test_b24_a_cache_breakpoint_that_moves_leaves_the_prompt_alone(gateway: Open) -> None:
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]
    async with gateway([HI] * 3) as gw:
        _, client = await gw.session()
        plain = messages(user(), system=system, tools=[ANTHROPIC_TOOL])
        first = messages(user(), system=[{**system[0], **mark}, system[1]], tools=[{**ANTHROPIC_TOOL, **mark}])
        other = messages({"role": "user", "content": [{"type": "text", "text": "Go.", **mark}]}, system=system, tools=[ANTHROPIC_TOOL])
        texts = await prompts(gw, client, "/v1/messages", plain, first, other)
        assert texts == [texts[0]] * 3


async def test_b31_tool_choices_reach_the_record(gateway: Open) -> None:
    choices: list[Any] = [
        {"type": "auto", "disable_parallel_tool_use": True},
        {"type": "any"},
        {"type": "tool", "name": "bash"},
        {"type": "none"},
    ]
    async with gateway([HI] * 4) as gw:
        session, client = await gw.session()
        for choice in choices:
            assert (await client.post("/v1/messages", messages(user(), tools=[ANTHROPIC_TOOL], tool_choice=choice))).status == 200
        made = await gw.completions(session)
        assert [one.asked.get("tool_choice") for one in made] == [None, "required", "bash", "none"]
        assert made[0].asked["parallel_tool_calls"] is False
        assert [one.mode for one in made] == ["tokens", "messages", "messages", "tokens"]


UNKNOWN: dict[type[Player], dict[str, Any]] = {
    Anthropic: {"context_management": {"edits": []}, "output_config": {"effort": "high"}, "metadata": {"user_id": "u"}, "new": [1]},
    Chat: {"metadata": {"a": "b"}, "prompt_cache_key": "k", "service_tier": "auto", "new": [1]},
    Responses: {
        "include": ["reasoning.encrypted_content"],
        "client_metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "text": {"verbosity": "low"},
        "new": [1],
    },
    Google: {"safetySettings": [], "cachedContent": "", "labels": {"a": "b"}, "new": [1]},
}


@every_player
@both_ways
async def test_b32_b52_unknown_fields_change_nothing(gateway: Open, kind: type[Player], stream: bool) -> None:
    async with gateway([HI] * 2) as gw:
        _, client = await gw.session()
        await kind().user("Go.").turn(client, stream)
        player = kind().user("Go.")
        player.extra = UNKNOWN[kind]
        assert (await player.turn(client, stream)).text == HI
        assert gw.engine.calls[0].text == gw.engine.calls[1].text


THINKING_OFF: dict[type[Player], dict[str, Any]] = {
    Anthropic: {"thinking": {"type": "disabled"}},
    Chat: {"reasoning_effort": "none"},
    Responses: {"reasoning": {"effort": "none"}},
    Google: {"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}},
}


@every_player
async def test_b34_thinking_switched_off_reaches_the_template(gateway: Open, kind: type[Player]) -> None:
    async with gateway([HI]) as gw:
        session, client = await gw.session()
        player = kind().user("Go.")
        player.extra = THINKING_OFF[kind]
        turn = await player.turn(client)
        assert gw.engine.calls[0].text.endswith("<think>\n\n</think>\n\n")
        assert (await gw.completions(session))[0].asked["thinking"] is False
        assert (turn.text, turn.thinking) == (HI, "")


# --- Google ------------------------------------------------------------------------------------------------------------------


async def test_b70_both_schema_forms_reach_the_model(gateway: Open) -> None:
    old = {"type": "OBJECT", "properties": {"n": {"type": "ARRAY", "items": {"type": "STRING"}}}}
    declarations = [{"name": "w", "parametersJsonSchema": PARAMETERS}, {"name": "o", "parameters": old}, {"name": "z"}]
    async with gateway([HI]) as gw:
        session, client = await gw.session()
        body = {"contents": [{"parts": [{"text": "hi"}]}], "tools": [{"functionDeclarations": declarations}]}
        assert (await client.post("/v1beta/models/m:generateContent", body)).status == 200
        w, o, z = (await gw.completions(session))[0].tools
        assert w.parameters == PARAMETERS
        assert o.parameters["properties"]["n"]["type"] == "array"
        assert z.parameters == {"type": "object", "properties": {}}


async def test_b71_every_spelling_of_the_system_instruction_is_the_same(gateway: Open) -> None:
    contents = {"contents": [{"parts": [{"text": "hi"}]}]}
    forms: list[dict[str, Any]] = [
        {"systemInstruction": {"role": "system", "parts": [{"text": "A"}]}},
        {"system_instruction": {"parts": [{"text": "A"}]}},
        {"systemInstruction": "A"},
    ]
    async with gateway([HI] * 3) as gw:
        _, client = await gw.session()
        texts = await prompts(gw, client, "/v1beta/models/m:generateContent", *({**contents, **form} for form in forms))
        assert texts == [texts[0]] * 3
        assert texts[0].startswith("<|im_start|>system\nA<|im_end|>")


@pytest.mark.parametrize("ids", [True, False], ids=["with ids", "without"])
async def test_b72_b74_calls_and_responses_are_paired_in_order(gateway: Open, ids: bool) -> None:
    async with gateway([call_text('{"command": "A"}') + "\n" + call_text('{"command": "B"}'), HI]) as gw:
        session, client = await gw.session()
        player = Google().user("Go.")
        turn = await player.turn(client)
        player.results(turn, "1", "2")
        player.history[-1]["parts"].append({"text": "also"})
        if not ids:
            for content in player.history:
                for part in content["parts"]:
                    part.get("functionCall", part.get("functionResponse", {})).pop("id", None)
        await player.turn(client)
        first, second = await gw.completions(session)
        assert extends(second, first)
        assert [message.role for message in second.messages[-3:]] == ["tool", "tool", "user"]
        called = [call.id for call in second.messages[-4].tool_calls]
        assert [message.tool_call_id for message in second.messages[-3:-1]] == called


@pytest.mark.parametrize("mode", ["tokens", "messages"])
async def test_b77_google_usage_counts_thoughts_apart(gateway: Open, mode: str) -> None:
    async with gateway([THINKING + HI], mode=mode) as gw:
        session, client = await gw.session()
        usage = (await Google().user("Go.").send(client)).json()["usageMetadata"]
        (made,) = await gw.completions(session)
        assert made.sampled_ids is not None
        assert usage["thoughtsTokenCount"] == made.thinking_tokens > 0
        assert usage["candidatesTokenCount"] == len(made.sampled_ids) - made.thinking_tokens
        assert usage["totalTokenCount"] == usage["promptTokenCount"] + len(made.sampled_ids)
