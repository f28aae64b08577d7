"""Public bug reports of systems like this one, end to end through the whole gateway: request in, prompt at the engine, answer out, record.

Each has its number in the name. Parsing and encoding alone are tested per dialect in `tests/dialects`; here is what needs the gateway.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from gateway_players import NAMES, PARAMETERS, PLAYERS, THINKING, Anthropic, Chat, Google, Player, Responses, call_text
from test_capture import extends

from polar.engines.base import Generation, MessagesRequest, TokensRequest
from polar.store.export import completion_to_json
from polar.testing.engine import Reply, fake_logprob

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def prompts(gw: Any, client: Any, path: str, *bodies: dict[str, Any]) -> list[str]:
    """The prompts, as text, that these bodies become."""
    seen = len(gw.engine.calls)
    for body in bodies:
        answer = await client.post(path, body)
        assert answer.status == 200, answer.body
    return [call.text for call in gw.engine.calls[seen:]]


def messages(*history: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 50, "messages": list(history), **fields}


def user(text: str = "Go.") -> dict[str, Any]:
    return {"role": "user", "content": text}


ANTHROPIC_TOOL = {"name": "bash", "description": "d", "input_schema": PARAMETERS}
CHAT_TOOL = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": PARAMETERS}}
HI = "Hi."


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


# --- OpenAI Responses --------------------------------------------------------------------------------------------------


async def test_b38_a_freeform_tool_comes_back_as_the_same_tokens(gateway: Open) -> None:
    patch = "*** Begin Patch\n*** End Patch"
    sampled = call_text('{"input" : "*** Begin Patch\\n*** End Patch"}', name="apply_patch")
    tool = {
        "type": "custom",
        "name": "apply_patch",
        "description": "d",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    }
    async with gateway([sampled, HI]) as gw:
        session, client = await gw.session()
        body: dict[str, Any] = {"model": "m", "store": False, "tools": [tool], "input": [user()]}
        events = (await client.post("/v1/responses", {**body, "stream": True})).events()
        assert {"response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"} <= {event["type"] for event in events}
        (item,) = events[-1]["response"]["output"]
        assert (item["type"], item["input"]) == ("custom_tool_call", patch)
        body["input"] += [item, {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}]
        assert (await client.post("/v1/responses", body)).status == 200
        first, second = await gw.completions(session)
        assert extends(second, first)


async def test_b39_hosted_tools_do_not_break_the_call(gateway: Open) -> None:
    hosted = [{"type": name} for name in ("web_search", "local_shell", "image_generation", "tool_search")]
    async with gateway([HI]) as gw:
        session, client = await gw.session()
        body = {"model": "m", "input": "x", "tools": [*hosted, {"type": "function", "name": "f", "parameters": {"type": "object"}}]}
        assert (await client.post("/v1/responses", {**body, "tool_choice": {"type": "web_search"}})).status == 200
        assert "f" in [tool.name for tool in (await gw.completions(session))[0].tools]


async def test_b40_a_namespaced_tool_keeps_its_namespace_and_its_tokens(gateway: Open) -> None:
    read = {"type": "function", "name": "read", "parameters": {"type": "object"}}
    tool = {"type": "namespace", "name": "mcp__fs", "description": "d", "tools": [read]}
    async with gateway(lambda call: call_text("{}", name=flat_name(call.text)) if call.number == 0 else HI) as gw:
        session, client = await gw.session()
        body: dict[str, Any] = {"model": "m", "store": False, "tools": [tool], "input": [user()]}
        (item,) = (await client.post("/v1/responses", body)).json()["output"]
        assert (item["type"], item["namespace"], item["name"]) == ("function_call", "mcp__fs", "read")
        body["input"] += [item, {"type": "function_call_output", "call_id": item["call_id"], "output": "ok"}]
        assert (await client.post("/v1/responses", body)).status == 200
        first, second = await gw.completions(session)
        assert extends(second, first)


def flat_name(prompt: str) -> str:
    """The name under which the model sees the only tool."""
    return str(orjson.loads(prompt.split("<tools>\n")[1].split("\n</tools>")[0])["function"]["name"])


async def test_b41_items_of_one_answer_are_one_message_of_the_model(gateway: Open) -> None:
    history = [
        user(),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": '{"command": "ls"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "o"},
    ]
    async with gateway([HI]) as gw:
        session, client = await gw.session()
        player = Responses()
        player.history = history
        await player.turn(client)
        (made,) = await gw.completions(session)
        roles = [message.role for message in made.messages]
        assert roles == ["system", "user", "assistant", "tool"]
        assert (made.messages[2].reasoning, made.messages[2].text, len(made.messages[2].tool_calls)) == ("r", "t", 1)
        assert gw.engine.calls[0].text.count("<|im_start|>assistant") == 2


async def test_b44_the_completed_event_holds_all_that_was_said(gateway: Open) -> None:
    async with gateway([THINKING + "I look." + call_text()]) as gw:
        _, client = await gw.session()
        events = (await Responses().user("Go.").send(client, True)).events()
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == done
        assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]


@both_ways
async def test_b47_b48_a_cut_answer_is_incomplete_and_its_repeats_are_siblings(gateway: Open, stream: bool) -> None:
    async with gateway([Reply("one two", finish="length")] * 2 + [HI]) as gw:
        session, client = await gw.session()
        for _ in range(2):
            player = Responses().user("Go.")
            answer = await player.send(client, stream)
            turn = player.read(answer, stream)
            assert turn.stop == "incomplete"
            if stream:
                assert answer.events()[-1]["type"] == "response.incomplete"
                assert answer.events()[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
        await player.user("Go on.").turn(client)
        made = await gw.completions(session)
        assert [one.parent for one in made] == [None, None, 1]


async def test_b49_developer_and_instructions_are_one_system_message(gateway: Open) -> None:
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "D"}]}
    async with gateway([HI] * 2) as gw:
        _, client = await gw.session()
        (text,) = await prompts(gw, client, "/v1/responses", {"model": "m", "instructions": "I", "input": [developer, user()]})
        assert text.startswith("<|im_start|>system\nI\n\nD<|im_end|>")
        (chat,) = await prompts(gw, client, "/v1/chat/completions", messages({"role": "developer", "content": "D"}, user()))
        assert chat.startswith("<|im_start|>system\nD<|im_end|>")


@both_ways
async def test_b54_a_compaction_is_one_item_and_starts_afresh(gateway: Open, stream: bool) -> None:
    async with gateway([HI, "They said hello.", HI]) as gw:
        session, client = await gw.session()
        player = Responses().user("Hello.")
        await player.turn(client, stream)
        player.history.append({"type": "compaction_trigger"})
        answer = await player.send(client, stream)
        output = (answer.events()[-1]["response"] if stream else answer.json())["output"]
        assert [item["type"] for item in output] == ["compaction"]
        player.history = [output[0]]
        await player.user("Next.").turn(client, stream)
        assert "They said hello." in gw.engine.calls[2].text
        made = await gw.completions(session)
        assert made[2].parent is None or made[2].broken is not None


# --- OpenAI Chat Completions -----------------------------------------------------------------------------------------------


async def test_b58_no_content_is_no_word_of_the_prompt(gateway: Open) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "content": "o"}
    forms: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}]
    async with gateway([HI] * 3) as gw:
        _, client = await gw.session()
        bodies = [messages(user(), {"role": "assistant", "tool_calls": [call], **form}, result, tools=[CHAT_TOOL]) for form in forms]
        texts = await prompts(gw, client, "/v1/chat/completions", *bodies)
        assert texts == [texts[0]] * 3
        assert "None" not in texts[0]


@pytest.mark.parametrize(
    ("options", "shown"), [(None, False), ({}, False), ({"include_usage": False}, False), ({"include_usage": True}, True)]
)
async def test_b60_b61_usage_comes_in_a_chunk_of_its_own_to_those_who_ask(gateway: Open, options: Any, shown: bool) -> None:
    async with gateway([HI]) as gw:
        _, client = await gw.session()
        body = messages(user(), stream=True) if options is None else messages(user(), stream=True, stream_options=options)
        events = (await client.post("/v1/chat/completions", body)).events()
        assert events[-1] == "[DONE]"
        chunks = [event for event in events[:-1] if event.get("choices") == []]
        assert [bool(chunk["usage"]) for chunk in chunks] == [True] * shown
        assert (events[-2]["choices"] == []) == shown


async def test_b63_parallel_calls_have_indices_and_one_stream_id(gateway: Open) -> None:
    async with gateway([call_text() + "\n" + call_text()]) as gw:
        _, client = await gw.session()
        chunks = [event for event in (await Chat().user("Go.").send(client, True)).events() if event != "[DONE]"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls") or []]
        assert {call["index"] for call in calls} == {0, 1}
        assert all(isinstance(call["function"]["arguments"], str) for call in calls)


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
async def test_b64_either_reasoning_key_reaches_the_prompt(gateway: Open, key: str) -> None:
    """Inside a tool loop, where the template keeps it."""
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    said = {"role": "assistant", "content": "a", "tool_calls": [call], key: "because"}
    async with gateway([HI]) as gw:
        _, client = await gw.session()
        body = messages(user(), said, {"role": "tool", "tool_call_id": "c", "content": "o"}, tools=[CHAT_TOOL])
        (text,) = await prompts(gw, client, "/v1/chat/completions", body)
        assert "<think>\nbecause\n</think>\n\na" in text


async def test_b65_legacy_functions_are_answered_in_kind(gateway: Open) -> None:
    function = {"name": "bash", "parameters": PARAMETERS}
    async with gateway([call_text(), HI]) as gw:
        session, client = await gw.session()
        body = messages(user(), functions=[function])
        choice = (await client.post("/v1/chat/completions", body)).json()["choices"][0]
        assert choice["finish_reason"] == "function_call"
        assert choice["message"]["function_call"]["name"] == "bash"
        body["messages"] += [choice["message"], {"role": "function", "name": "bash", "content": "ok"}]
        assert (await client.post("/v1/chat/completions", body)).status == 200
        first, second = await gw.completions(session)
        assert extends(second, first)


REFUSAL = {"anthropic": "refusal", "openai_chat": "content_filter", "google": "SAFETY"}


@every_player
@both_ways
async def test_b68_a_refusal_is_never_a_plain_end(gateway: Open, kind: type[Player], stream: bool) -> None:
    async with gateway([HI], mode="messages") as gw:
        _, client = await gw.session()
        chat = gw.engine.chat

        async def refused(request: MessagesRequest) -> list[Generation]:
            (generation,) = await chat(request)
            generation.finish, generation.refusal, generation.message = "content_filter", "no", None
            return [generation]

        gw.engine.chat = refused
        answer = await kind().user("Go.").send(client, stream)
        assert answer.status == 200
        if kind is Responses:
            response = answer.events()[-1]["response"] if stream else answer.json()
            refusals = [part for item in response["output"] for part in item.get("content", []) if part["type"] == "refusal"]
            assert refusals or response["incomplete_details"] == {"reason": "content_filter"}
        else:
            assert kind().read(answer, stream).stop == REFUSAL[kind.name]


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


async def test_b77_google_usage_counts_thoughts_apart(gateway: Open) -> None:
    async with gateway([THINKING + HI]) as gw:
        session, client = await gw.session()
        usage = (await Google().user("Go.").send(client)).json()["usageMetadata"]
        (made,) = await gw.completions(session)
        assert made.sampled_ids is not None
        assert usage["thoughtsTokenCount"] == made.thinking_tokens > 0
        assert usage["candidatesTokenCount"] == len(made.sampled_ids) - made.thinking_tokens
        assert usage["totalTokenCount"] == usage["promptTokenCount"] + len(made.sampled_ids)


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
