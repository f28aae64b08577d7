"""Public bug reports about both OpenAI protocols, end to end through the whole gateway: request in, prompt at the engine, answer out.

Each has its number in the name. Parsing and encoding alone are tested per dialect in `tests/dialects`; here is what needs the gateway.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from gateway_players import NAMES, PARAMETERS, PLAYERS, THINKING, Chat, Player, Responses, call_text
from gateway_reports import CHAT_TOOL, HI, messages, prompts, user
from test_capture import extends

from polar.engines.base import Generation, MessagesRequest
from polar.testing.engine import Reply

Open = Callable[..., Any]
every_player = pytest.mark.parametrize("kind", PLAYERS, ids=NAMES)
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


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
