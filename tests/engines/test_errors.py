import asyncio
from typing import Any

import numpy as np
import orjson
import pytest

from polar.chat import Sampling
from polar.engines.base import TokensRequest
from polar.engines.refusals import error_for, parse_overflow
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import (
    CallError,
    ContextOverflow,
    EngineBusy,
    EngineOverloaded,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
)
from polar.sockets import free_port
from polar.testing import Drop, Reply, serve_scripted


def request(max_tokens: int | None = 50) -> TokensRequest:
    return TokensRequest("scripted", np.array([1, 2, 3], np.int32), Sampling(max_tokens=max_tokens))


LIMIT = "This model's maximum context length is 4096 tokens. However, "
OVERFLOWS = [
    (
        LIMIT + "you requested 100 output tokens and your prompt contains at least 4200 input tokens, for a total of 4300 tokens.",
        4200,
        4096,
    ),
    (LIMIT + "your prompt contains 4200 input tokens, which exceeds this limit even without any output tokens.", 4200, 4096),
    (LIMIT + "you requested 4300 tokens (4200 in the messages, 100 in the completion).", 4200, 4096),
    (LIMIT + "your messages resulted in 4200 tokens.", 4200, 4096),
    (LIMIT + "your prompt contains 99999 characters", None, 4096),
    (
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total of 4300 tokens: "
        "4200 tokens from the input messages and 100 tokens for the completion.",
        4200,
        4096,
    ),
    ("The input (4200 tokens) is longer than the model's context length (4096 tokens).", 4200, 4096),
    ("Input length (4200 tokens) exceeds the maximum allowed length (4095 tokens). Use a shorter input", 4200, 4095),
    ("The decoder prompt (length 4200) is longer than the maximum model length of 4096.", 4200, 4096),
    (
        "'max_tokens' or 'max_completion_tokens' is too large: 2000. This model's maximum context length is 4096 tokens and your request "
        "has 4200 input tokens (2000 > 4096 - 4200).",
        4200,
        4096,
    ),
    (
        "You passed 4200 input tokens and requested 100 output tokens. However, the model's context length is only 4096 tokens, "
        "resulting in a maximum input length of 3996 tokens. (parameter=input_tokens, value=4200)",
        4200,
        4096,
    ),
    (
        "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4200 `inputs` tokens and 100 `max_new_tokens`",
        4200,
        4096,
    ),
    ("Prompt length (4200) exceeds maximum input length (4096)", 4200, 4096),
    (
        "Trying to keep the first 4200 tokens when context the overflows. However, the model is loaded with context length of only 4096 "
        "tokens",
        4200,
        4096,
    ),
    ("Prompt contains 4200 tokens and 0 draft tokens, too large for model with 4096 maximum context length", 4200, 4096),
    ("This model's maximum prompt length is 4096 but the request contains 4200 tokens.", 4200, 4096),
    ("The input token count (4200) exceeds the maximum number of tokens allowed (4096).", 4200, 4096),
    ("prompt is too long: 4200 tokens > 4096 maximum", 4200, 4096),
    ("the request exceeds the available context size", None, None),
    ("max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)", None, None),
    ("max_tokens must be at least 1, got -104.", None, None),
    ("prompt too long; exceeded max context length by 104 tokens", None, None),
    ("The number of tokens to keep from the initial prompt is greater than the context length", None, None),
    ("Input is too long for requested model.", None, None),
    ("Your request exceeded model token limit: 4096", None, None),
]


@pytest.mark.parametrize(("words", "prompt", "limit"), OVERFLOWS)
def test_b85_b86_an_overflow_keeps_its_words_and_numbers(words: str, prompt: int | None, limit: int | None) -> None:
    found = parse_overflow(words)
    assert found is not None
    assert (found.prompt_tokens, found.limit) == (prompt, limit)
    assert found.message == words
    assert found.code == "context_length_exceeded"


def test_an_overflow_is_known_by_its_code_alone() -> None:
    assert isinstance(error_for(400, b'{"error":{"message":"too much","code":"context_length_exceeded"}}', {}), ContextOverflow)


def test_another_refusal_is_no_overflow() -> None:
    assert parse_overflow("temperature must be non-negative") is None
    assert parse_overflow("max_tokens is too large: 32000. This model supports at most 16384 completion tokens") is None


@pytest.mark.parametrize("code", [500, "context_length_exceeded"])
def test_b85_an_overflow_that_the_server_calls_its_own_failure_is_one(code: Any) -> None:
    """NVIDIA-NeMo/RL#3878: vLLM let a too long prompt end in a 500, and the caller sent the same request again and again."""
    body = orjson.dumps({"error": {"message": LIMIT + "your prompt contains 4200 input tokens", "code": code}})
    assert isinstance(error_for(500, body, {}), ContextOverflow)
    assert not isinstance(error_for(503, body, {}), ContextOverflow)


@pytest.mark.parametrize(
    ("status", "kind", "told"),
    [
        (400, EngineRejected, 400),
        (404, EngineRejected, 404),
        (422, EngineRejected, 422),
        (401, EngineUnavailable, 502),
        (408, EngineTimeout, 504),
        (429, EngineBusy, 429),
        (500, EngineUnavailable, 502),
        (502, EngineUnavailable, 502),
        (503, EngineOverloaded, 503),
        (504, EngineTimeout, 504),
        (529, EngineOverloaded, 503),
    ],
)
def test_b84_statuses_become_kinds(status: int, kind: type[CallError], told: int) -> None:
    error = error_for(status, b'{"error":{"message":"words of the engine","type":"x","code":1}}', {"Retry-After": "7"})
    assert type(error) is kind
    assert error.status == told
    assert "words of the engine" in error.message
    if kind in (EngineBusy, EngineOverloaded):
        assert error.retry_after == "7"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"error":"words"}',
        b'{"message":"words","object":"error"}',
        b'{"detail":"words"}',
        b"words",
        b'{"detail":[{"msg":"words"}]}',
        b'["words"]',
        b'[{"error":{"code":400,"message":"words","status":"INVALID_ARGUMENT"}}]',
        b'{"errors":[{"message":"words"}]}',
        b'{"error":{"message":null,"reason":"words"}}',
        b'{"error":null,"message":"words"}',
        b'{"error":true,"reason":"words"}',
    ],
)
def test_every_shape_of_error_body_keeps_the_words(raw: bytes) -> None:
    message = error_for(400, raw, {}).message
    assert "words" in message
    assert "INVALID_ARGUMENT" not in message


@pytest.mark.parametrize("wire", ["vllm", "sglang"])
@pytest.mark.parametrize(
    "error", [EngineBusy("slow down", retry_after="7"), EngineOverloaded("full", retry_after="3"), EngineRejected("no", status=422)]
)
async def test_b84_an_engines_error_arrives_as_it_was_sent(wire: str, error: CallError) -> None:
    with serve_scripted([Reply(error=error)], wire=wire) as server:  # type: ignore[arg-type]
        engine = VllmEngine(server.url) if wire == "vllm" else SglangEngine(server.url)
        with pytest.raises(type(error)) as caught:
            await engine.generate(request())
        await engine.aclose()
    assert (caught.value.message, caught.value.status, caught.value.retry_after) == (error.message, error.status, error.retry_after)


async def test_a_refused_connection_is_unavailable() -> None:
    port = free_port()
    engine = VllmEngine(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineUnavailable, match="no engine answers"):
        await engine.info()
    await engine.aclose()


async def test_a_cut_body_is_unavailable() -> None:
    with serve_scripted([Reply(error=Drop())]) as server:
        engine = VllmEngine(server.url)
        with pytest.raises(EngineUnavailable, match="went away"):
            await engine.generate(request())
        await engine.aclose()


async def test_a_stream_that_is_cut_is_unavailable_after_what_had_come() -> None:
    with serve_scripted([Reply("hello", error=Drop(), error_after=3)]) as server:
        engine = VllmEngine(server.url)
        seen: list[int] = []

        async def read() -> None:
            async for chunk in engine.stream(request()):
                seen.extend(chunk.token_ids)

        with pytest.raises(EngineUnavailable):
            await read()
        await engine.aclose()
    assert seen == list(b"hel")


async def test_an_error_in_the_middle_of_a_stream_is_raised() -> None:
    with serve_scripted([Reply("hello", error=EngineOverloaded("full"), error_after=2)]) as server:
        engine = VllmEngine(server.url)
        with pytest.raises(EngineOverloaded, match="full"):
            async for _ in engine.stream(request()):
                pass
        await engine.aclose()


async def test_silence_is_a_timeout() -> None:
    with serve_scripted([Reply("late", delay_s=30)]) as server:
        engine = VllmEngine(server.url, timeout_s=0.3)
        with pytest.raises(EngineTimeout):
            await engine.generate(request())
        await engine.aclose()


async def test_leaving_cancels_the_generation() -> None:
    with serve_scripted([Reply("slow" * 50, token_delay_s=0.05)]) as server:
        engine = VllmEngine(server.url)
        task = asyncio.create_task(engine.generate(request(200)))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if server.backend.cancelled:
                break
            await asyncio.sleep(0.02)
        await engine.aclose()
        assert server.backend.cancelled == 1


async def test_leaving_a_stream_cancels_the_generation() -> None:
    with serve_scripted([Reply("slow" * 50, token_delay_s=0.02)]) as server:
        engine = VllmEngine(server.url)
        stream = engine.stream(request(200))
        await anext(stream)
        await stream.aclose()
        for _ in range(100):
            if server.backend.cancelled:
                break
            await asyncio.sleep(0.02)
        await engine.aclose()
        assert server.backend.cancelled == 1


async def test_a_kept_connection_that_the_server_had_closed_is_tried_once_more() -> None:
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        for number in range(2):
            head = await reader.readuntil(b"\r\n\r\n")
            if not head or (connections == 1 and number == 1):
                break
            writer.write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{"data": []}')
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    engine = VllmEngine(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert await engine.get("/v1/models") == {"data": []}
    assert await engine.get("/v1/models") == {"data": []}
    await engine.aclose()
    server.close()
    assert connections == 2
