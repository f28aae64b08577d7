"""`polar engine` with a random little Qwen3, through the same client that talks to vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tiny
import torch
import typer
from typer.testing import CliRunner

from polar.chat import Message, Sampling, Tool, ToolChoice
from polar.cli.engine import engine as engine_command
from polar.engine import Server, build
from polar.engine.serve import bind, serve
from polar.engines.base import Generation, MessagesRequest, TokensRequest
from polar.engines.check import check
from polar.engines.http import HttpEngine
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError, ContextOverflow, EngineRejected
from polar.testing import serve_app

torch.set_num_threads(1)
END = 258
RUNS = [(1.0, 1.0), (0.6, 1.0), (1.0, 0.9), (0.7, 0.8)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[tuple[Server, str]]:
    server = build(str(directory), served_name="tiny", max_model_len=600, device="cpu", max_sequences=8)
    with serve_app(server.app) as running:
        yield server, running.url


@pytest.fixture
async def engine(served: tuple[Server, str]) -> AsyncIterator[VllmEngine]:
    client = VllmEngine(served[1], timeout_s=60)
    yield client
    await client.aclose()


def request(prompt: list[int], temperature: float = 1.0, top_p: float = 1.0, **more: Any) -> TokensRequest:
    sampling = Sampling(
        max_tokens=more.pop("max_tokens", 40), temperature=temperature, top_p=top_p, seed=more.pop("seed", None), stop=more.pop("stop", ())
    )
    return TokensRequest("tiny", np.array(prompt, np.int32), sampling, **more)


def recompute(model: Any, prompt: list[int], answer: Generation, temperature: float, top_p: float) -> np.ndarray[Any, Any]:
    """What transformers says of the recorded ids."""
    assert answer.token_ids is not None
    ids = torch.tensor([[*prompt, *answer.token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / temperature
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        probabilities = ordered.softmax(-1)
        ordered = ordered.masked_fill(probabilities.cumsum(-1) - probabilities >= top_p, -torch.inf)
        logits = logits.scatter(1, order, ordered)
    found: np.ndarray[Any, Any] = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return found


def difference(model: Any, prompt: list[int], answer: Generation, temperature: float, top_p: float) -> float:
    """The largest between what was recorded and what is recomputed. A token at the very edge of the nucleus may be inside by the one sum of
    probabilities and outside by the other, in one of some thousand steps."""
    edges = (top_p,) if top_p == 1 else (top_p - 1e-5, top_p, top_p + 1e-5)
    assert answer.logprobs is not None
    each = [np.abs(answer.logprobs - recompute(model, prompt, answer, temperature, edge)) for edge in edges]
    return float(np.min(each, axis=0).max())


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, length + 7 * index).tolist() for index in range(count)]


async def test_recorded_logprobs_equal_a_recompute_in_a_mixed_batch(engine: VllmEngine, model: Any) -> None:
    sent = prompts(8, 60)
    answers = await asyncio.gather(*(engine.generate(request(prompt, *RUNS[at % 4])) for at, prompt in enumerate(sent)))
    for at, (prompt, (answer,)) in enumerate(zip(sent, answers, strict=True)):
        assert answer.logprobs is not None
        assert answer.untrainable is None
        assert difference(model, prompt, answer, *RUNS[at % 4]) < 1e-4


async def test_a_reused_prefix_changes_nothing(served: tuple[Server, str], engine: VllmEngine, model: Any) -> None:
    """A conversation that grows, branches, and grows again on both branches."""
    root = prompts(1, 120, seed=1)[0]
    before = served[0].backend.cached_tokens
    first = (await engine.generate(request(root)))[0]
    assert first.token_ids is not None
    grown = [*root, *first.token_ids.tolist(), 1, 2, 3]
    branch = [*root[:80], 9, 9, 9]
    for prompt in (grown, branch, [*grown, 4], [*branch, 5], root):
        answer = (await engine.generate(request(prompt)))[0]
        assert answer.logprobs is not None
        assert np.abs(answer.logprobs - recompute(model, prompt, answer, 1.0, 1.0)).max() < 1e-4
    assert served[0].backend.cached_tokens - before > 4 * 80


async def test_a_prompt_longer_than_one_step_is_computed_in_pieces(engine: VllmEngine, model: Any) -> None:
    prompt = prompts(1, 555, seed=2)[0]
    answer = (await engine.generate(request(prompt, max_tokens=20)))[0]
    assert answer.logprobs is not None
    assert np.abs(answer.logprobs - recompute(model, prompt, answer, 1.0, 1.0)).max() < 1e-4


async def test_a_seed_repeats_an_answer_and_choices_differ(engine: VllmEngine) -> None:
    prompt = prompts(1, 30, seed=3)[0]
    once, again = [(await engine.generate(request(prompt, seed=5)))[0].token_ids for _ in range(2)]
    assert once is not None
    assert again is not None
    assert once.tolist() == again.tolist()
    several = await engine.generate(request(prompt, seed=5, n=3))
    assert len({tuple(item.token_ids.tolist()) for item in several if item.token_ids is not None}) == 3


async def test_the_stop_token_is_among_the_ids_with_its_logprob(engine: VllmEngine, model: Any) -> None:
    sent = prompts(8, 20, seed=100)
    ended: list[tuple[list[int], Generation]] = []
    for seed in range(20):  # a random model ends by itself when it happens to
        answers = await asyncio.gather(*(engine.generate(request(prompt, max_tokens=300, seed=seed)) for prompt in sent))
        ended = [(prompt, answer) for prompt, (answer,) in zip(sent, answers, strict=True) if answer.finish == "stop"]
        if ended:
            break
    assert ended
    for prompt, answer in ended:
        assert answer.token_ids is not None
        assert answer.logprobs is not None
        assert answer.token_ids[-1] == END
        assert END not in answer.token_ids[:-1]
        assert abs(answer.logprobs[-1] - recompute(model, prompt, answer, 1.0, 1.0)[-1]) < 1e-4


async def test_a_stop_id_ends_and_is_named(engine: VllmEngine) -> None:
    answer = (await engine.generate(request([65, 66], stop_token_ids=tuple(range(128)), max_tokens=200)))[0]
    assert answer.token_ids is not None
    assert (answer.finish, answer.stop) == ("stop", int(answer.token_ids[-1]))


async def test_streams_give_what_whole_answers_give(engine: VllmEngine) -> None:
    prompt = prompts(1, 25, seed=4)[0]
    whole = (await engine.generate(request(prompt, seed=7)))[0]
    chunks = [chunk async for chunk in engine.stream(request(prompt, seed=7))]
    assert whole.token_ids is not None
    assert whole.logprobs is not None
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids.tolist()
    assert [value for chunk in chunks for value in chunk.logprobs] == pytest.approx(whole.logprobs.tolist(), abs=1e-5)
    assert chunks[-1].completion_tokens == len(whole.token_ids)


async def test_a_prompt_that_cannot_fit_is_an_overflow_and_a_long_answer_is_cut(engine: VllmEngine) -> None:
    with pytest.raises(ContextOverflow) as caught:
        await engine.generate(request([1] * 700))
    assert (caught.value.prompt_tokens, caught.value.limit) == (700, 600)
    answer = (await engine.generate(request([1] * 590, max_tokens=300)))[0]
    assert answer.completion_tokens <= 10
    chat = MessagesRequest("tiny", [Message("user", "x")], (), ToolChoice(), Sampling(max_tokens=32_000))
    assert (await engine.chat(chat))[0].completion_tokens < 600


async def test_leaving_frees_the_sequence(served: tuple[Server, str], engine: VllmEngine) -> None:
    backend: Any = served[0].backend
    tasks = [asyncio.create_task(engine.generate(request([at], max_tokens=500, stop_token_ids=()))) for at in range(6)]
    await asyncio.sleep(0.05)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _ in range(200):
        if not backend._active:
            break
        await asyncio.sleep(0.02)
    assert not backend._active
    assert not any(slot.busy for slot in backend._slots)


async def test_the_start_up_check_finds_it_trainable(engine: VllmEngine) -> None:
    report = await check(engine, None, "tiny")
    assert (report.trainable, report.logprobs) == (True, "processed")


async def test_tokenize_equals_apply_chat_template(engine: VllmEngine, directory: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(directory)
    messages = [Message("system", "s"), Message("user", "héllo  <|im_end|> 日本")]
    ids = await engine.tokenize(messages, [])
    wire = [{"role": message.role, "content": message.content} for message in messages]
    assert ids is not None
    assert ids.tolist() == reference.apply_chat_template(wire, add_generation_prompt=True, tokenize=True, return_dict=False)


async def test_what_needs_guided_decoding_is_refused(engine: VllmEngine) -> None:
    forced = MessagesRequest("tiny", [Message("user", "x")], [Tool("f")], ToolChoice("required"), Sampling(max_tokens=3))
    with pytest.raises(EngineRejected, match="guided decoding"):
        await engine.chat(forced)
    schema = MessagesRequest("tiny", [Message("user", "x")], [], ToolChoice(), Sampling(), response_format={"type": "json_object"})
    with pytest.raises(EngineRejected, match="guided decoding"):
        await engine.chat(schema)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": []},
        {"prompt": {"a": 1}},
        {"prompt": "x", "temperature": -1},
        {"prompt": "x", "repetition_penalty": 0},
        {"prompt": "x", "temperature": "hot"},
        {"prompt": "x", "n": 0},
        {"prompt": "x", "logprobs": True},
        {"prompt": "x", "stop": [""]},
        {"prompt": "x", "logit_bias": {"a": "b"}},
        {"prompt": [999_999]},
    ],
)
async def test_a_wrong_request_is_a_400_that_says_what(engine: VllmEngine, body: dict[str, Any]) -> None:
    with pytest.raises(EngineRejected) as caught:
        await engine.post("/v1/completions", body)
    assert caught.value.status == 400
    assert caught.value.message


async def test_pause_holds_requests_and_resume_lets_them_go(engine: VllmEngine) -> None:
    await engine.post("/pause", {})
    task = asyncio.create_task(engine.generate(request([1, 2], max_tokens=2)))
    await asyncio.sleep(0.2)
    assert not task.done()
    assert (await engine.get("/is_paused"))["is_paused"]
    await engine.post("/resume", {})
    assert (await task)[0].completion_tokens > 0


async def test_a_weight_version_is_kept(engine: VllmEngine) -> None:
    await engine.post("/update_weight_version", {"new_version": "v3"})
    assert (await engine.get("/weight_info"))["weight_version"] == "v3"


@pytest.mark.parametrize("tied", [False, True])
async def test_reloaded_weights_are_the_ones_sampled_from(tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    old = tiny.make(tmp_path / "old", seed=1, tied=tied)
    new = tiny.make(tmp_path / "new", seed=2, tied=tied)
    server = build(str(old), served_name="tiny", device="cpu", max_sequences=4)
    prompt = prompts(1, 40)[0]
    with serve_app(server.app) as running:
        client = VllmEngine(running.url, timeout_s=60)
        await client.generate(request(prompt))
        in_flight = asyncio.create_task(client.generate(request(prompt, max_tokens=100, seed=1)))
        await asyncio.sleep(0.02)
        await reload(client, new)
        answer = (await client.generate(request(prompt)))[0]
        before = (await in_flight)[0]
        wrong = tiny.make(tmp_path / "wrong", hidden=32)
        with pytest.raises(EngineRejected, match="shapes"):
            await reload(client, wrong)
        after = (await client.generate(request(prompt)))[0]
        await client.aclose()
    models = {name: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for name, path in (("old", old), ("new", new))}
    for generation, name in ((before, "old"), (answer, "new"), (after, "new")):
        assert generation.logprobs is not None
        assert np.abs(generation.logprobs - recompute(models[name], prompt, generation, 1.0, 1.0)).max() < 1e-4


async def reload(client: HttpEngine, directory: Path) -> None:
    await client.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}})
    await client.post("/reset_prefix_cache", {})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1], "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_a_model_that_is_not_served_is_a_404_in_vllm_s_words(served: tuple[Server, str], path: str, body: dict[str, Any]) -> None:
    async with aiohttp.ClientSession(served[1]) as session:
        async with session.post(path, json={**body, "model": "nope"}) as answer:
            assert answer.status == 404
            error = (await answer.json())["error"]
            assert (error["message"], error["type"], error["param"]) == ("The model `nope` does not exist.", "NotFoundError", "model")
        for more in ({}, {"model": "tiny"}):
            async with session.post(path, json={**body, **more}) as answer:
                assert answer.status == 200


def test_a_taken_port_is_refused_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(serve.__globals__, "build", lambda *_, **__: pytest.fail("it loaded the model"))
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}: Address already in use"):
            serve("tiny-qwen3", port=port)


def test_an_address_of_another_machine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize("option", [("--port", "99999"), ("--max-model-len", "0"), ("--threads", "0")])
def test_options_that_cannot_work_are_refused(option: tuple[str, str]) -> None:
    app = typer.Typer()
    app.command()(engine_command)
    result = CliRunner().invoke(app, option)
    assert (result.exit_code, option[0] in result.output) == (2, True)
