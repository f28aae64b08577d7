"""The official `openai` SDK drives a gateway over a real socket: Chat Completions and Responses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from gateway_listener import Listener, Shape, all_extend, ask
from gateway_players import PARAMETERS

CHAT_TOOLS: list[Any] = [{"type": "function", "function": {"name": "bash", "description": "Runs a command", "parameters": PARAMETERS}}]


@pytest.fixture
def gpt(listener: Listener) -> openai.OpenAI:
    return openai.OpenAI(api_key="unused", base_url=listener.base(listener.key()) + "/v1", max_retries=0)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_plays_a_tool_loop(listener: Listener, gpt: openai.OpenAI, stream: bool) -> None:
    messages = ask("loop")
    finishes: list[str | None] = []
    for _ in range(3):
        if stream:
            with gpt.chat.completions.stream(model="m", messages=messages, tools=CHAT_TOOLS) as events:
                for _event in events:
                    pass
                choice: Any = events.get_final_completion().choices[0]
        else:
            choice = gpt.chat.completions.create(model="m", messages=messages, tools=CHAT_TOOLS).choices[0]
        finishes.append(choice.finish_reason)
        messages.append(choice.message.to_dict())
        for call in choice.message.tool_calls or []:
            assert json.loads(call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
    assert finishes == ["tool_calls", "tool_calls", "stop"]
    made = listener.made()
    assert len(made) == 3
    assert all_extend(made)


def test_chat_streams_usage_and_reasoning(gpt: openai.OpenAI) -> None:
    chunks = list(gpt.chat.completions.create(model="m", messages=ask("think"), stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens_details is not None
    assert (chunks[-1].usage.completion_tokens_details.reasoning_tokens or 0) > 0
    reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for chunk in chunks for choice in chunk.choices)
    assert reasoning == "Let me see."


def test_openai_names_each_request(gpt: openai.OpenAI) -> None:
    completion = gpt.chat.completions.create(model="m", messages=ask("think"))
    assert completion._request_id == "req_" + completion.id.removeprefix("chatcmpl-")
    response = gpt.responses.create(model="m", input="think")
    assert response._request_id == "req_" + response.id.removeprefix("resp_")


def test_chat_parses_structured_output(gpt: openai.OpenAI) -> None:
    parsed = gpt.chat.completions.parse(model="m", messages=ask("json"), response_format=Shape)
    assert parsed.choices[0].message.parsed == Shape(a=1)


def test_chat_shows_log_probabilities_and_choices(listener: Listener, gpt: openai.OpenAI) -> None:
    completion = gpt.chat.completions.create(model="m", messages=ask("hello"), logprobs=True, top_logprobs=2, n=2)
    assert len(completion.choices) == 2
    logprobs = completion.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    recorded = listener.made()[1].logprobs
    assert recorded is not None
    assert [entry.logprob for entry in logprobs.content] == recorded[:-1].tolist()


def test_openai_models(gpt: openai.OpenAI) -> None:
    assert [model.id for model in gpt.models.list()] == ["scripted"]
    assert gpt.models.retrieve("scripted").id == "scripted"


OPENAI_ERRORS: list[tuple[str, type[openai.APIStatusError], int, str | None]] = [
    ("busy", openai.RateLimitError, 429, None),
    ("full", openai.InternalServerError, 503, None),
    ("gone", openai.InternalServerError, 502, None),
    ("word " * 5000, openai.BadRequestError, 400, "context_length_exceeded"),
]


@pytest.mark.parametrize(("text", "kind", "status", "code"), OPENAI_ERRORS, ids=["busy", "full", "gone", "overflow"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_chat_errors(gpt: openai.OpenAI, text: str, kind: type[openai.APIStatusError], status: int, code: str | None, stream: bool) -> None:
    with pytest.raises(kind) as caught:
        gpt.chat.completions.create(model="m", messages=ask(text), stream=stream)
    assert caught.value.status_code == status
    assert code is None or caught.value.code == code


def test_openai_keys(listener: Listener) -> None:
    base = listener.base("x").partition("/s/")[0] + "/v1"
    assert openai.OpenAI(api_key=listener.key(), base_url=base, max_retries=0).chat.completions.create(model="m", messages=ask("hello")).id
    refused = openai.OpenAI(api_key="no", base_url=base, max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        refused.chat.completions.create(model="m", messages=ask("hello"))
    with pytest.raises(openai.AuthenticationError):
        refused.responses.create(model="m", input="hello")
    with pytest.raises(openai.NotFoundError):
        openai.OpenAI(api_key=listener.key(), base_url=base, max_retries=0).embeddings.create(model="m", input="x")


async def test_openai_async(listener: Listener) -> None:
    async with openai.AsyncOpenAI(api_key="unused", base_url=listener.base(listener.key()) + "/v1", max_retries=0) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(model="m", messages=ask("think")) for _ in range(4)))
        assert [answer.choices[0].message.content for answer in answers] == ["Hi."] * 4
        stream = await client.responses.create(model="m", input="think", stream=True)
        assert [event.type async for event in stream][-1] == "response.completed"


RESPONSES_TOOLS: list[Any] = [{"type": "function", "name": "bash", "description": "Runs a command", "parameters": PARAMETERS}]


def outputs(response: Any) -> list[Any]:
    return [
        {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}
        for item in response.output
        if item.type == "function_call"
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_responses_plays_a_tool_loop_with_its_own_history(listener: Listener, gpt: openai.OpenAI, stream: bool) -> None:
    history: list[Any] = ask("loop")
    kinds = []
    for _ in range(3):
        if stream:
            with gpt.responses.stream(model="m", input=history, tools=RESPONSES_TOOLS, store=False) as events:
                for _event in events:
                    pass
                response: Any = events.get_final_response()
        else:
            response = gpt.responses.create(model="m", input=history, tools=RESPONSES_TOOLS, store=False)
        kinds.append([item.type for item in response.output])
        history += [item.to_dict() for item in response.output]
        history += outputs(response)
    assert kinds == [["reasoning", "message", "function_call"], ["reasoning", "function_call", "function_call"], ["message"]]
    made = listener.made()
    assert len(made) == 3
    assert all_extend(made)


def test_responses_continues_by_id_and_is_fetched_and_deleted(listener: Listener, gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(model="m", input="loop", tools=RESPONSES_TOOLS)
    second = gpt.responses.create(model="m", input=outputs(first), previous_response_id=first.id, tools=RESPONSES_TOOLS)
    third = gpt.responses.create(model="m", input=outputs(second), previous_response_id=second.id, tools=RESPONSES_TOOLS)
    assert third.output_text == "Done."
    made = listener.made()
    assert all_extend(made)
    assert gpt.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert [item.type for item in gpt.responses.input_items.list(first.id)] == ["message"]
    gpt.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        gpt.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model="m", input="x", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    assert len(listener.made()) == 3


def test_responses_compacts(listener: Listener, gpt: openai.OpenAI) -> None:
    first = gpt.responses.create(model="m", input="hello", store=False)
    history = [*ask("hello"), *(item.to_dict() for item in first.output)]
    compacted = gpt.responses.compact(model="m", input=history)
    assert [item.type for item in compacted.output][-1] == "compaction"
    assert "compaction" in [item.type for item in compacted.output]
    after = gpt.responses.create(model="m", input=[*(item.to_dict() for item in compacted.output), *ask("hello")], store=False)
    assert after.output_text
    assert len(listener.made()) == 3


def test_responses_counts(gpt: openai.OpenAI) -> None:
    counted = gpt.responses.input_tokens.count(model="m", input="hello")
    created = gpt.responses.create(model="m", input="hello")
    assert created.usage is not None
    assert counted.input_tokens == created.usage.input_tokens


def test_responses_parses_structured_output(gpt: openai.OpenAI) -> None:
    assert gpt.responses.parse(model="m", input="json", text_format=Shape).output_parsed == Shape(a=1)


@pytest.mark.parametrize(("text", "kind", "status", "code"), OPENAI_ERRORS, ids=["busy", "full", "gone", "overflow"])
def test_responses_errors(gpt: openai.OpenAI, text: str, kind: type[openai.APIStatusError], status: int, code: str | None) -> None:
    with pytest.raises(kind) as caught:
        gpt.responses.create(model="m", input=text)
    assert caught.value.status_code == status
    assert code is None or caught.value.code == code


def test_a_streamed_overflow_is_an_event(gpt: openai.OpenAI) -> None:
    with pytest.raises(openai.APIError, match="context window") as caught:
        list(gpt.responses.create(model="m", input="word " * 5000, stream=True))
    assert caught.value.code == "context_length_exceeded"
