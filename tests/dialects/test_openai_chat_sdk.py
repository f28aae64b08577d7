"""The official `openai` SDK reads our bodies, streams and errors, over a transport that never leaves the process."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import orjson
import pytest

from polar.chat import Answer, Message, Thinking, TokenLogprob, ToolCall, Usage
from polar.dialects.base import Operation, Reply, replay
from polar.dialects.openai_chat import OpenAIChat
from polar.errors import CallError, ContextOverflow, EngineBusy, EngineUnavailable

CHAT = OpenAIChat()
REF = "0123456789abcdef0123456789"
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}]
USER: Any = [{"role": "user", "content": "x"}]


def client(*answers: Answer, error: CallError | None = None, broken: CallError | None = None) -> openai.OpenAI:
    """A client whose every call is given `answers`, refused with `error`, or broken off with `broken` after the stream's start."""

    def handle(http: httpx2.Request) -> httpx2.Response:
        headers = {name.lower(): value for name, value in http.headers.items()}
        route = CHAT.route(http.method, http.url.path, {}, headers)
        assert route is not None
        assert CHAT.key(headers, {}) == "the-key"
        if route.operation is Operation.MODELS:
            return httpx2.Response(200, json=CHAT.models(["m"]))
        if route.operation is Operation.MODEL:
            return httpx2.Response(200, json=CHAT.model(route.params["model"]))
        if error is not None:
            refused = CHAT.error(error)
            return httpx2.Response(refused.status, json=refused.body, headers=dict(refused.headers))
        request = CHAT.parse(orjson.loads(http.content), route)
        reply = Reply(request, REF, created=1)
        encoder = CHAT.encoder(reply)
        if broken is not None:
            stream = encoder.start() + encoder.ping() + encoder.error(broken)
        elif request.stream:
            early, late = replay(encoder, answers)
            stream = early + encoder.ping() + late
        else:
            return httpx2.Response(200, json=CHAT.complete(reply, answers))
        return httpx2.Response(200, content=stream, headers={"content-type": encoder.content_type})

    transport = httpx2.Client(transport=httpx2.MockTransport(handle))
    return openai.OpenAI(api_key="the-key", base_url="http://127.0.0.1:1/v1", http_client=transport, max_retries=0)


ANSWER = Answer(
    Message("assistant", "hi", (Thinking("plan"),), (ToolCall("x", "f", '{"a":1}'), ToolCall("y", "f", '{"a":2}'))),
    "tool_calls",
    Usage(10, 5, thinking=2),
    logprobs=(TokenLogprob("hi", -0.5),),
)


def test_a_whole_answer() -> None:
    completion = client(ANSWER).chat.completions.create(model="m", messages=USER, tools=TOOLS, logprobs=True)
    choice = completion.choices[0]
    assert completion.id == f"chatcmpl-{REF}"
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "hi"
    assert choice.message.model_extra == {"reasoning_content": "plan", "reasoning": "plan"}
    assert [call.id for call in choice.message.tool_calls or []] == [f"call_{REF}00", f"call_{REF}01"]
    assert choice.logprobs is not None
    assert [entry.logprob for entry in choice.logprobs.content or []] == [-0.5]
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None
    assert completion.usage.completion_tokens_details.reasoning_tokens == 2


def test_a_stream() -> None:
    chunks = list(
        client(ANSWER).chat.completions.create(model="m", messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "hi"
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "plan"
    pieces = [piece for delta in deltas for piece in delta.tool_calls or []]
    assert [piece.function.arguments for piece in pieces if piece.function] == ["", '{"a":1}', "", '{"a":2}']
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 15


def test_the_sdks_own_accumulator_agrees_with_the_whole_answer() -> None:
    with client(ANSWER).chat.completions.stream(model="m", messages=USER, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert message.content == "hi"
    assert [call.function.arguments for call in message.tool_calls or []] == ['{"a":1}', '{"a":2}']
    assert final.choices[0].finish_reason == "tool_calls"


def test_models() -> None:
    assert [model.id for model in client().models.list()] == ["m"]
    assert client().models.retrieve("org/name").id == "org/name"


def test_errors_are_the_sdks_own() -> None:
    overflow = ContextOverflow("maximum context length is 10 tokens", prompt_tokens=20, limit=10)
    with pytest.raises(openai.BadRequestError) as caught:
        client(error=overflow).chat.completions.create(model="m", messages=USER)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.RateLimitError) as limited:
        client(error=EngineBusy("slow", retry_after="7")).chat.completions.create(model="m", messages=USER)
    assert limited.value.response.headers["retry-after"] == "7"


def test_an_error_in_a_stream_is_raised() -> None:
    stream = client(broken=EngineUnavailable("engine went away")).chat.completions.create(model="m", messages=USER, stream=True)
    with pytest.raises(openai.APIError, match="engine went away"):
        list(stream)
