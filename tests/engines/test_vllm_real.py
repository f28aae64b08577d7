"""Against the real vLLM: recorded log-probabilities equal a transformers recompute over the recorded ids within 1e-3."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from vllm_server import vllm

from polar.chat import Message, Sampling, Tool, ToolChoice
from polar.engine.models import known_models
from polar.engines.base import Generation, Ids, MessagesRequest, TokensRequest
from polar.engines.check import check, check_tools
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError, ContextOverflow
from polar.tokens.path import TokenPath
from polar.tokens.tokenizer import load_tokenizer

torch.set_num_threads(1)
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
RUNS = [(1.0, 1.0), (0.6, 1.0), (1.0, 0.9)]
PROCESSED = ("--logprobs-mode", "processed_logprobs")
TOOL = Tool("read_file", "Reads a file.", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]})


def load(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def recompute(model: Any, prompt: Ids, sampled: Ids, temperature: float, *edges: float) -> np.ndarray[Any, Any]:
    """float[len(edges), len(sampled)]: the log-probabilities with each of `edges` as top-p."""
    ids = torch.from_numpy(np.concatenate([prompt, sampled]).astype(np.int64)).unsqueeze(0)
    with torch.no_grad():
        raw = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    ordered, order = raw.sort(-1, descending=True)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    found = []
    for edge in edges:
        logits = raw if edge == 1.0 else raw.scatter(1, order, ordered.masked_fill(before >= edge, -torch.inf))
        found.append(logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy())
    return np.stack(found)


def assert_true(model: Any, prompt: Ids | None, answer: Generation, temperature: float, top_p: float) -> None:
    assert answer.untrainable is None
    assert prompt is not None
    assert answer.token_ids is not None
    assert answer.logprobs is not None
    assert np.isfinite(answer.logprobs).all()
    # Where the nucleus ends within float32 rounding of top_p, the token at its edge may rightly be in or out.
    edges = (top_p,) if top_p == 1.0 else (top_p - 1e-5, top_p, top_p + 1e-5)
    found = recompute(model, prompt, answer.token_ids, temperature, *edges)
    assert np.abs(answer.logprobs - found).min(axis=0).max() < 1e-3


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled tiny Qwen3; a random one stands in while it is not built."""
    try:
        return known_models()["tiny-qwen3"]()
    except ConfigError:
        return tiny.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def qwen_url(qwen: Path) -> Iterator[str]:
    with vllm(qwen, "tiny", *PROCESSED) as url:
        yield url


@pytest.fixture
async def engine(qwen_url: str) -> AsyncIterator[VllmEngine]:
    client = VllmEngine(qwen_url, timeout_s=300)
    yield client
    await client.aclose()


async def test_tokens_mode_logprobs_are_those_of_the_distribution_sampled_from(qwen: Path, engine: VllmEngine) -> None:
    model = load(qwen)
    tokenizer = load_tokenizer(qwen)
    ends = set(tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    text = "<|im_start|>user\nList the files, then say what {} is.<|im_end|>\n<|im_start|>assistant\n"
    prompts = [np.array(tokenizer.encode(text.format(word)), np.int32) for word in ("a cat", "7 + 5", "Rust", "日本", "x" * 60)]
    jobs = [(prompt, temperature, top_p) for prompt in prompts for temperature, top_p in RUNS]
    answers = await asyncio.gather(
        *(
            engine.generate(TokensRequest("tiny", prompt, Sampling(max_tokens=120, temperature=temperature, top_p=top_p, top_k=0)))
            for prompt, temperature, top_p in jobs
        )
    )
    stopped = 0
    for (prompt, temperature, top_p), (answer,) in zip(jobs, answers, strict=True):
        assert_true(model, prompt, answer, temperature, top_p)
        assert answer.token_ids is not None
        assert not ends & set(answer.token_ids[:-1].tolist())
        assert (answer.finish == "stop") == (int(answer.token_ids[-1]) in ends)
        stopped += answer.finish == "stop"
    assert stopped or not (qwen / "polar-trained").exists()


async def test_a_stop_id_and_a_stop_string_leave_the_ids_whole(qwen: Path, engine: VllmEngine) -> None:
    prompt = np.array(load_tokenizer(qwen).encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"), np.int32)
    free = (await engine.generate(TokensRequest("tiny", prompt, Sampling(max_tokens=30, temperature=1.0, seed=3))))[0]
    assert free.token_ids is not None
    stop = int(free.token_ids[min(5, len(free.token_ids) - 1)])
    first = free.token_ids.tolist().index(stop)
    again = (
        await engine.generate(TokensRequest("tiny", prompt, Sampling(max_tokens=30, temperature=1.0, seed=3), stop_token_ids=(stop,)))
    )[0]
    assert again.token_ids is not None
    assert again.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert again.logprobs is not None
    assert len(again.logprobs) == first + 1


async def test_streamed_ids_and_logprobs_are_complete(qwen: Path, engine: VllmEngine) -> None:
    model = load(qwen)
    prompt = np.array(load_tokenizer(qwen).encode("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"), np.int32)
    request = TokensRequest("tiny", prompt, Sampling(max_tokens=60, temperature=0.6))
    chunks = [chunk async for chunk in engine.stream(request)]
    ids = np.array([token for chunk in chunks for token in chunk.token_ids], np.int32)
    logprobs = np.array([value for chunk in chunks for value in chunk.logprobs], np.float32)
    assert chunks[-1].completion_tokens == len(ids)
    assert np.abs(logprobs - recompute(model, prompt, ids, 0.6, 1.0)).max() < 1e-3


async def test_renderer_and_vllm_agree_and_it_is_trainable(qwen: Path, engine: VllmEngine) -> None:
    if "tool_call" not in (load_tokenizer(qwen).chat_template or ""):
        pytest.skip("the random stand-in has no Qwen3 template; the bundled model does")
    path = TokenPath(load_tokenizer(qwen), model="tiny-qwen3", renderer="qwen3", mode="tokens")
    report = await check(engine, path, "tiny")
    assert (report.problems, report.trainable, report.logprobs) == ([], True, "processed")
    assert await check_tools(engine, path, [TOOL]) is None


async def test_an_overflow_is_recognised_and_a_long_answer_clamped(qwen: Path, engine: VllmEngine) -> None:
    for length in (2048, 3000):
        with pytest.raises(ContextOverflow):
            await engine.generate(TokensRequest("tiny", np.full(length, 7, np.int32), Sampling(max_tokens=10)))
    request = MessagesRequest("tiny", [Message("user", "hi")], (), ToolChoice(), Sampling(max_tokens=32_000, temperature=1.0))
    assert (await engine.chat(request))[0].finish in ("stop", "length")
    long = MessagesRequest("tiny", [Message("user", "word " * 9000)], (), ToolChoice(), Sampling(max_tokens=100))
    with pytest.raises(ContextOverflow) as caught:
        await engine.chat(long)
    assert caught.value.limit == 2048


async def test_messages_mode_of_smollm2_gives_true_logprobs() -> None:
    directory = known_models()["smollm2"]()
    model = load(directory)
    messages = [Message("system", "You answer in one sentence."), Message("user", "What is the capital of France?")]
    with vllm(directory, "smollm2", *PROCESSED) as url:
        client = VllmEngine(url, timeout_s=300)
        answers = await asyncio.gather(
            *(
                client.chat(
                    MessagesRequest(
                        "smollm2",
                        messages,
                        (TOOL,) if tools else (),
                        ToolChoice(),
                        Sampling(max_tokens=40, temperature=temperature, top_p=top_p, top_k=0),
                    )
                )
                for temperature, top_p in RUNS
                for tools in (False, True)
            )
        )
        report = await check(client, None, "smollm2")
        await client.aclose()
    assert (report.trainable, report.logprobs) == (True, "processed")
    for (temperature, top_p), (answer,) in zip([run for run in RUNS for _ in range(2)], answers, strict=True):
        assert answer.message is not None
        assert_true(model, answer.prompt_ids, answer, temperature, top_p)


async def test_default_raw_logprobs_are_recognised_as_raw(qwen: Path) -> None:
    with vllm(qwen, "tiny") as url:
        client = VllmEngine(url, timeout_s=300)
        report = await check(client, None, "tiny")
        await client.aclose()
    assert (report.trainable, report.logprobs) == (True, "raw")
    assert report.untrainable({"temperature": 0.6}) is not None
    assert report.untrainable({"temperature": 1.0, "top_p": 1.0}) is None
