"""The official `anthropic` SDK drives a gateway over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import anthropic
import pytest
from gateway_listener import Listener, all_extend, ask
from gateway_players import PARAMETERS

ANTHROPIC_TOOLS: list[Any] = [{"name": "bash", "description": "Runs a command", "input_schema": PARAMETERS}]


@pytest.fixture
def claude(listener: Listener) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="unused", base_url=listener.base(listener.key()), max_retries=0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_anthropic_plays_a_tool_loop(listener: Listener, claude: anthropic.Anthropic, stream: bool) -> None:
    messages = ask("loop")
    thinking: Any = {"type": "enabled", "budget_tokens": 1024}
    said: list[anthropic.types.Message] = []
    for _ in range(3):
        options: Any = {"model": "m", "max_tokens": 2000, "messages": messages, "tools": ANTHROPIC_TOOLS, "thinking": thinking}
        if stream:
            with claude.messages.stream(**options) as events:
                message = events.get_final_message()
        else:
            message = claude.messages.create(**options)
        said.append(message)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        if calls:
            messages.append(
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]}
            )
    assert [message.stop_reason for message in said] == ["tool_use", "tool_use", "end_turn"]
    assert [block.type for block in said[0].content] == ["thinking", "text", "tool_use"]
    assert [block.input for block in said[1].content if block.type == "tool_use"] == [{"command": "a"}, {"command": "b"}]
    assert said[2].usage.output_tokens > 0
    made = listener.made()
    assert len(made) == 3
    assert all_extend(made)


def test_anthropic_streams_thinking_and_text(claude: anthropic.Anthropic) -> None:
    kinds: list[str] = []
    with claude.messages.stream(model="m", max_tokens=100, messages=ask("think")) as events:
        kinds.extend(event.type for event in events)
        final = events.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert {"thinking", "signature", "text"} <= set(kinds)
    assert [block.type for block in final.content] == ["thinking", "text"]


def test_anthropic_names_each_request(claude: anthropic.Anthropic) -> None:
    message = claude.messages.create(model="m", max_tokens=64, messages=ask("think"))
    assert message._request_id == "req_" + message.id.removeprefix("msg_")
    with claude.messages.stream(model="m", max_tokens=64, messages=ask("think")) as events:
        streamed = events.get_final_message()
        assert events.request_id == "req_" + streamed.id.removeprefix("msg_")


def test_anthropic_counts_and_lists(listener: Listener, claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model="m", messages=ask("hello"), tools=ANTHROPIC_TOOLS)
    message = claude.messages.create(model="m", max_tokens=9, messages=ask("hello"), tools=ANTHROPIC_TOOLS)
    assert counted.input_tokens == message.usage.input_tokens
    assert [model.id for model in claude.models.list()] == ["scripted"]
    assert claude.models.retrieve("scripted").display_name == "scripted"
    assert len(listener.made()) == 1


def test_anthropic_structured_output(claude: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    output: Any = {"format": {"type": "json_schema", "schema": schema}}
    message = claude.messages.create(model="m", max_tokens=50, messages=ask("json"), output_config=output)
    assert message.content[0].type == "text"
    assert json.loads(message.content[0].text) == {"a": 1}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_anthropic_runs_tools_with_its_whole_history(listener: Listener, claude: anthropic.Anthropic, stream: bool) -> None:
    """The SDK's own loop sends new messages only, to a thread that it takes the server to hold, until it is told that there is none."""

    @anthropic.beta_tool
    def bash(command: str) -> str:
        """Runs a command."""
        return f"ran {command}"

    runner = claude.beta.messages.tool_runner(model="m", max_tokens=2000, tools=[bash], messages=ask("loop"), stream=stream)
    said = [message.get_final_message() if stream else message for message in runner]
    assert [message.stop_reason for message in said] == ["tool_use", "tool_use", "end_turn"]
    made = listener.made()
    assert len(made) == 3
    assert all_extend(made)


ANTHROPIC_ERRORS = [
    ("busy", anthropic.RateLimitError, 429),
    ("full", anthropic.InternalServerError, 529),
    ("gone", anthropic.InternalServerError, 500),
    ("word " * 5000, anthropic.BadRequestError, 400),
]


@pytest.mark.parametrize(("text", "kind", "status"), ANTHROPIC_ERRORS, ids=["busy", "full", "gone", "overflow"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_anthropic_errors(claude: anthropic.Anthropic, text: str, kind: type[anthropic.APIStatusError], status: int, stream: bool) -> None:
    with pytest.raises(kind) as caught:
        claude.messages.create(model="m", max_tokens=9, messages=ask(text), stream=stream)
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"


def test_anthropic_keys(listener: Listener) -> None:
    base = listener.base("x").partition("/s/")[0]
    good = anthropic.Anthropic(api_key=listener.key(), base_url=base, max_retries=0)
    assert good.messages.create(model="m", max_tokens=9, messages=ask("hello")).type == "message"
    bearer = anthropic.Anthropic(auth_token=listener.key(), base_url=base, max_retries=0)
    assert bearer.messages.create(model="m", max_tokens=9, messages=ask("hello")).type == "message"
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(api_key="no", base_url=base, max_retries=0).messages.create(model="m", max_tokens=9, messages=ask("hello"))


async def test_anthropic_async(listener: Listener) -> None:
    async with anthropic.AsyncAnthropic(api_key="unused", base_url=listener.base(listener.key()), max_retries=0) as client:
        messages = await asyncio.gather(*(client.messages.create(model="m", max_tokens=99, messages=ask("think")) for _ in range(4)))
        assert [message.content[-1].type for message in messages] == ["text"] * 4
        async with client.messages.stream(model="m", max_tokens=99, messages=ask("think")) as events:
            assert [text async for text in events.text_stream] == ["Hi."]
