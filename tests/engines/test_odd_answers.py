"""Answers that have not the form of their API, error bodies under status 200, redirects: named failures of the engine, none of ours."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import orjson
import pytest

from polar.chat import Image, Message, Sampling, Text, Tool, ToolCall, ToolChoice
from polar.engines import registered
from polar.engines.base import Engine, Generation, MessagesRequest, TokensRequest
from polar.errors import EngineBusy, EngineError, EngineRejected, EngineUnavailable
from polar.testing import serve_app

JsonObject = dict[str, Any]
GOOD: JsonObject = {
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hi"},
            "finish_reason": "stop",
            "token_ids": [5, 6],
            "response_token_ids": [5, 6],
            "prompt_token_ids": [1, 2],
            "logprobs": {"content": [{"token": "H", "logprob": -0.5}, {"token": "i", "logprob": -0.25}]},
        }
    ],
    "prompt_token_ids": [1, 2],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2},
}


@contextmanager
def server(body: Any, status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Iterator[tuple[str, list[bytes]]]:
    """Says the same to every request; yields its URL and the bodies that it was sent."""
    seen: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw, more = b"", True
        while more:
            event = await receive()
            raw, more = raw + event.get("body", b""), event.get("more_body", False)
        seen.append(raw)
        await send({"type": "http.response.start", "status": status, "headers": list(headers)})
        await send({"type": "http.response.body", "body": body if isinstance(body, bytes) else orjson.dumps(body)})

    with serve_app(app) as running:
        yield running.url, seen


async def chat(kind: str, url: str, tools: tuple[Tool, ...] = ()) -> Generation:
    engine: Engine = registered()[kind](url)
    request = MessagesRequest("m", [Message("user", "Hi")], tools, ToolChoice(), Sampling(max_tokens=5))
    try:
        return (await engine.chat(request))[0]
    finally:
        await engine.aclose()


def changed(change: Callable[[JsonObject], Any]) -> JsonObject:
    answer = copy.deepcopy(GOOD)
    change(answer)
    return answer


def of_choice(**fields: Any) -> JsonObject:
    return changed(lambda answer: answer["choices"][0].update(fields))


@pytest.mark.parametrize("kind", ["vllm", "openai", "sglang"])
@pytest.mark.parametrize(
    "answer",
    [
        None,
        [1],
        {"choices": {"a": 1}},
        {"choices": ["x"]},
        of_choice(message="text"),
        of_choice(message={"content": 5}),
        of_choice(message={"content": "", "reasoning": {"a": 1}}),
        of_choice(message={"content": "", "tool_calls": ["x"]}),
        of_choice(message={"content": "", "tool_calls": [{"function": "x"}]}),
        of_choice(message={"content": "", "refusal": 3}),
        of_choice(logprobs=[1]),
        of_choice(logprobs={"content": ["x"]}),
    ],
)
async def test_an_answer_of_another_form_is_the_engines_failure(kind: str, answer: Any) -> None:
    with server(answer) as (url, _), pytest.raises(EngineUnavailable):
        await chat(kind, url)


@pytest.mark.parametrize("kind", ["vllm", "openai", "sglang"])
@pytest.mark.parametrize("usage", [None, [1], "x", {"prompt_tokens": "2", "completion_tokens": None, "prompt_tokens_details": [1]}])
async def test_a_usage_that_is_none_counts_nothing_and_fails_nothing(kind: str, usage: Any) -> None:
    with server(changed(lambda answer: answer.update(usage=usage))) as (url, _):
        generation = await chat(kind, url)
    assert (generation.prompt_tokens, generation.cached_tokens) == (0, 0)
    assert generation.token_ids is not None
    assert generation.token_ids.tolist() == [5, 6]
    assert generation.message is not None
    assert generation.message.text == "Hi"


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("vllm", {"choices": [{"logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-0.5]}}], "usage": {"prompt_tokens": 2}}),
        ("sglang", {"meta_info": {"prompt_tokens": 2, "completion_tokens": 1, "output_token_logprobs": [[-0.5, 5, None]]}}),
    ],
)
async def test_a_prompt_that_was_cut_on_its_way_is_served_and_not_trained(kind: str, answer: JsonObject) -> None:
    with server(answer) as (url, _):
        engine: Engine = registered()[kind](url)
        request = TokensRequest("m", np.array([1, 2, 3], np.int32), Sampling(max_tokens=5))
        try:
            (generation,) = await engine.generate(request)
        finally:
            await engine.aclose()
    assert generation.token_ids is not None
    assert generation.token_ids.tolist() == [5]
    assert generation.untrainable == "3 prompt ids were sent, and the engine counts 2"


@pytest.mark.parametrize("kind", ["vllm", "openai"])
@pytest.mark.parametrize("where", ["answer", "choice"])
async def test_ids_are_read_wherever_the_server_puts_them(kind: str, where: str) -> None:
    """vllm-project/vllm#28246: `token_ids` is null, and the log-probabilities name the ids."""
    named = {"content": [{"token": f"token_id:{one}", "logprob": -one / 8} for one in (5, 6)]}
    answer = of_choice(token_ids=None, logprobs=named, prompt_token_ids=[1, 2] if where == "choice" else None)
    answer["prompt_token_ids"] = [1, 2] if where == "answer" else None
    with server(answer) as (url, _):
        generation = await chat(kind, url)
    assert generation.prompt_ids is not None
    assert generation.token_ids is not None
    assert generation.logprobs is not None
    assert (generation.prompt_ids.tolist(), generation.token_ids.tolist()) == ([1, 2], [5, 6])
    assert (generation.logprobs.tolist(), generation.untrainable) == ([-0.625, -0.75], None)


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_names_that_are_text_are_never_made_into_ids(kind: str) -> None:
    with server(of_choice(token_ids=None)) as (url, _):
        generation = await chat(kind, url)
    assert generation.token_ids is None
    assert generation.untrainable == "the engine returned no sampled ids"


PAIRS = {"prompt_tokens": 2, "completion_tokens": 2, "output_token_logprobs": [[-0.5, 5, None], [-0.25, 6, None]]}


@pytest.mark.parametrize("output_ids", [None, [5, 6], [5], [], [1, 2, 5, 6]], ids=str)
async def test_sglangs_sampled_ids_are_those_of_the_sampler(output_ids: list[int] | None) -> None:
    """Some releases put the prompt's end before the ids (sgl-project/sglang#17240), others leave the stop token out; the ids that come
    with the log-probabilities are what was sampled."""
    answer = {"output_ids": output_ids, "meta_info": {**PAIRS, "finish_reason": {"type": "stop", "matched": 6}}}
    request = TokensRequest("m", np.array([1, 2], np.int32), Sampling(max_tokens=5))
    with server(answer) as (url, _):
        engine: Engine = registered()["sglang"](url)
        (generation,) = await engine.generate(request)
        await engine.aclose()
    with server(b"data: " + orjson.dumps(answer) + b"\n\ndata: [DONE]\n\n") as (url, _):
        engine = registered()["sglang"](url)
        streamed = [chunk async for chunk in engine.stream(request)]
        await engine.aclose()
    with server(of_choice(response_token_ids=output_ids, logprobs=None, meta_info=PAIRS)) as (url, _):
        chatted = await chat("sglang", url)
    for one in (generation, chatted):
        assert one.token_ids is not None
        assert one.logprobs is not None
        assert (one.token_ids.tolist(), one.logprobs.tolist(), one.untrainable) == ([5, 6], [-0.5, -0.25], None)
    assert [(chunk.token_ids, chunk.logprobs) for chunk in streamed] == [([5, 6], [-0.5, -0.25])]


@pytest.mark.parametrize("output_ids", [[5, 9], [9, 6], [5, 6, 7]], ids=str)
async def test_sglangs_ids_that_contradict_the_samplers_are_served_and_not_trained(output_ids: list[int]) -> None:
    with server({"output_ids": output_ids, "meta_info": PAIRS}) as (url, _):
        engine: Engine = registered()["sglang"](url)
        (generation,) = await engine.generate(TokensRequest("m", np.array([1, 2], np.int32), Sampling(max_tokens=5)))
        await engine.aclose()
    with server(of_choice(response_token_ids=output_ids, meta_info=PAIRS)) as (url, _):
        chatted = await chat("sglang", url)
    for one in (generation, chatted):
        assert one.token_ids is not None
        assert one.token_ids.tolist() == output_ids
        assert one.untrainable == "the engine returned no log-probabilities"


@pytest.mark.parametrize(("model", "adapter"), [("Qwen/Qwen3-4B", None), ("Qwen/Qwen3-4B:policy", "policy")])
async def test_sglang_samples_with_the_adapter_that_its_model_names(model: str, adapter: str | None) -> None:
    """Its chat route reads MODEL:ADAPTER, its own route wants a field: without it an adapter is loaded, and nothing sampled with it
    (radixark/miles#2075)."""
    answer = {"meta_info": {"prompt_tokens": 1, "completion_tokens": 1, "output_token_logprobs": [[-0.5, 5, None]]}}
    with server(answer) as (url, seen):
        engine: Engine = registered()["sglang"](url)
        await engine.generate(TokensRequest(model, np.array([1], np.int32), Sampling(max_tokens=5)))
        await engine.aclose()
    assert orjson.loads(seen[-1]).get("lora_path") == adapter


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_an_error_under_status_200_keeps_its_words_and_kind(kind: str) -> None:
    with server({"error": {"message": "slow down", "code": 429}}) as (url, _), pytest.raises(EngineBusy, match="slow down"):
        await chat(kind, url)


@pytest.mark.parametrize("kind", ["vllm", "openai", "sglang"])
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_refused_and_names_its_target(kind: str, status: int) -> None:
    with server({}, status, ((b"location", b"/elsewhere"),)) as (url, seen):
        with pytest.raises(EngineUnavailable, match="redirects to /elsewhere"):
            await chat(kind, url)
        assert len(seen) <= 2  # the question and, for vLLM, what the context is


async def test_what_only_slow_json_writers_can_write_reaches_the_engine() -> None:
    deep: JsonObject = {}
    for _ in range(400):
        deep = {"items": deep}
    tool = Tool("f", None, {"type": "object", "const": 10**30, "properties": deep, "title": "\ud800"})
    with server(GOOD) as (url, seen):
        await chat("openai", url, (tool,))
    assert b'"const":1000000000000000000000000000000' in seen[-1]
    assert b'"\\ud800"' in seen[-1]


async def test_ids_travel_whichever_json_writer_is_needed() -> None:
    answer = {"choices": [{"text": "", "finish_reason": "stop", "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-0.5]}}]}
    with server(answer) as (url, seen):
        engine = registered()["vllm"](url)
        prompt = np.array([7, 8, 9], np.int32)
        await engine.generate(TokensRequest("m", prompt, Sampling(max_tokens=5, seed=10**30)))
        await engine.aclose()
    assert b'"prompt":[7,8,9]' in seen[-1]


@pytest.mark.parametrize("kind", ["vllm", "openai", "sglang"])
async def test_a_login_in_the_url_is_sent_and_stands_in_no_record(kind: str) -> None:
    heard: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            heard.append(dict(scope["headers"]).get(b"authorization", b"").decode())
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})

    with serve_app(app) as running:
        engine = registered()[kind](running.url.replace("//", "//polar:s%40fe@") + "/v1")
        with pytest.raises(EngineRejected):
            await engine.info()
        await engine.aclose()
    assert heard[0] == "Basic " + base64.b64encode(b"polar:s@fe").decode()
    assert "s%40fe" not in engine.url
    assert engine.url.startswith(running.url)


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("eos_token", "stop"),
        ("stop_sequence", "stop"),
        ("model_length", "length"),
        ("repetition", "length"),
        ("error", "abort"),
    ],
)
async def test_every_servers_word_for_an_end_is_known(reason: str, finish: str) -> None:
    """A word that is not known counts as an abort, and then no call is ever answered. Text Generation Inference says `eos_token`, LiteLLM
    `end_turn` (BerriAI/litellm#12481)."""
    with server(of_choice(finish_reason=reason)) as (url, _):
        assert (await chat("openai", url)).finish == finish


async def test_half_a_surrogate_pair_is_replaced() -> None:
    raw = dict.fromkeys(("content", "reasoning"), "a\ud83d b \U0001f600")
    with server(json.dumps(of_choice(message=raw)).encode()) as (url, _):
        message = (await chat("vllm", url)).message
    assert message is not None
    assert (message.text, message.reasoning) == ("a\ufffd b \U0001f600", "a\ufffd b \U0001f600")


@pytest.mark.parametrize(("name", "status"), [(b"retry-after", 429), (b"location", 307)])
async def test_a_header_that_nobody_can_read_is_not_told(name: bytes, status: int) -> None:
    with server({}, status, ((name, b"\xff"),)) as (url, _), pytest.raises(EngineError) as caught:
        await chat("vllm", url)
    assert caught.value.retry_after is None
    assert caught.value.message.isascii()


@pytest.mark.parametrize("code", ["429", 429])
async def test_an_error_under_status_200_may_be_the_whole_body_and_its_code_a_string(code: Any) -> None:
    with server({"object": "error", "message": "slow down", "code": code}) as (url, _), pytest.raises(EngineBusy, match="slow down"):
        await chat("openai", url)


async def test_b17_openai_is_sent_a_tools_images_as_a_users() -> None:
    """bigduu/Bamboo-agent#416, CommandCodeAI/command-code#795: in a tool message, most servers of this API refuse them."""
    red, blue = Image("data:image/png;base64,AAAA"), Image("data:image/png;base64,BBBB")
    sent = (
        Message("user", "look"),
        Message("assistant", tool_calls=(ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}"))),
        Message("tool", (Text("red"), red), tool_call_id="a"),
        Message("tool", (blue,), tool_call_id="b"),
    )
    with server(GOOD) as (url, bodies):
        engine = registered()["openai"](url)
        await engine.chat(MessagesRequest("m", sent, (), ToolChoice(), Sampling()))
        await engine.chat(
            MessagesRequest("m", (*sent, Message("assistant", "seen"), Message("user", "go on")), (), ToolChoice(), Sampling())
        )
        await engine.aclose()
    first, second = (orjson.loads(body)["messages"] for body in bodies)
    assert [(each["role"], each["content"]) for each in first[2:4]] == [("tool", "red"), ("tool", "")]
    assert [part["image_url"]["url"] for part in first[4]["content"]] == [red.url, blue.url]
    assert [each["role"] for each in second] == ["user", "assistant", "tool", "tool", "user", "assistant", "user"]


@pytest.mark.parametrize("kind", ["vllm", "openai", "sglang"])
@pytest.mark.parametrize(
    "usage", [{"completion_tokens_details": {"reasoning_tokens": 1}}, {"reasoning_tokens": 1, "completion_tokens_details": None}]
)
async def test_b77_the_engines_count_of_reasoning_is_read(kind: str, usage: JsonObject) -> None:
    with server(changed(lambda answer: answer["usage"].update(usage))) as (url, _):
        assert (await chat(kind, url)).reasoning_tokens == 1


STRING = '{"command": "ls"}'
CALL: JsonObject = {"name": "bash", "arguments": STRING}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"tool_calls": [{"function": {**CALL, "arguments": orjson.dumps(STRING).decode()}}]}, ("", "", [STRING])),
        ({"tool_calls": [{"function": {**CALL, "arguments": '"ls"'}}]}, ("", "", ['"ls"'])),
        ({"tool_calls": [{"function": {**CALL, "arguments": '"{'}}]}, ("", "", ['"{'])),
        ({"tool_calls": None, "function_call": CALL}, ("", "", [STRING])),
        ({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}, {"text": "b"}, {"text": "c"}]}, ("a", "bc", [])),
        ({"content": [{"type": "thinking", "thinking": "a"}], "reasoning": "d"}, ("d", "", [])),
    ],
    ids=["arguments as JSON twice", "a string", "half", "legacy call", "thinking part", "reasoning too"],
)
async def test_b08_every_servers_form_of_calls_and_reasoning_is_read(message: JsonObject, expected: tuple[str, str, list[str]]) -> None:
    """Hermes parsers write arguments that were sampled as a string as JSON once more; nothing of the older or Mistral's form is lost."""
    with server(of_choice(message={"role": "assistant", "content": None, **message})) as (url, _):
        read = (await chat("openai", url)).message
    assert read is not None
    assert (read.reasoning, read.text, [call.arguments for call in read.tool_calls]) == expected


@pytest.mark.parametrize("kind", ["vllm", "openai", "sglang"])
@pytest.mark.parametrize(
    ("listing", "models"),
    [
        (None, ()),
        ([1], ()),
        ({"data": None}, ()),
        ({"data": 5}, ()),
        ({"data": ["x"]}, ()),
        ({"data": [{"id": "m", "max_model_len": "long", "root": {"a": 1}}]}, ("m",)),
        ({"data": [{"id": "m"}, {"object": "model"}, {"id": "n"}]}, ("m", "n")),
    ],
)
async def test_a_list_of_models_of_another_form_tells_what_can_be_read(kind: str, listing: Any, models: tuple[str, ...]) -> None:
    with server(listing) as (url, _):
        engine: Engine = registered()[kind](url)
        try:
            info = await engine.info()
        finally:
            await engine.aclose()
    assert (info.models, info.context, info.root) == (models, None, None)
