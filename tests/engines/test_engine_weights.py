"""New weights by each server's own wire: what is loaded is what is sampled from, and what fails says whether anything has changed."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from polar.chat import Sampling
from polar.engine import Server
from polar.engine.text import load_text
from polar.engine.worker import TransformersBackend
from polar.engines.base import Engine, Generation, TokensRequest
from polar.engines.openai import OpenAIEngine
from polar.engines.sglang import SglangEngine
from polar.engines.vllm import VllmEngine
from polar.errors import ConfigError, EngineError, EngineUnavailable
from polar.testing import serve_app
from polar.testing.sglang import SglangServer

torch.set_num_threads(1)
PROMPT = list(range(60, 100))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three of one shape, and one of another."""
    root = tmp_path_factory.mktemp("models")
    return [*(tiny.make(root / f"v{seed}", seed=seed) for seed in range(3)), tiny.make(root / "other", hidden=32)]


def request(max_tokens: int = 20, **more: Any) -> TokensRequest:
    return TokensRequest("tiny", np.array(PROMPT, np.int32), Sampling(max_tokens=max_tokens, temperature=1.0, **more))


def distance(folder: Path, answer: Generation) -> float:
    """Between what was recorded and what the model in `folder` says."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert answer.token_ids is not None
    assert answer.logprobs is not None
    ids = torch.tensor([[*PROMPT, *answer.token_ids.tolist()]])
    with torch.no_grad():
        logprobs = model(ids).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    found = logprobs.gather(1, ids[0, len(PROMPT) :, None])[:, 0].numpy()
    return float(np.abs(found - answer.logprobs).max())


def of_kind(kind: str, folder: Path) -> tuple[Server, type[Engine]]:
    """A server whose answers end at their length only."""
    tokenizer, template = load_text(folder)
    backend = TransformersBackend(folder, name="tiny", eos_ids=(), max_sequences=4)
    if kind == "vllm":
        return Server(backend, tokenizer, template), VllmEngine
    return SglangServer(backend, tokenizer, template), SglangEngine


@pytest.fixture(params=["vllm", "sglang"])
def served(request: pytest.FixtureRequest, models: list[Path]) -> Iterator[Engine]:
    server, kind = of_kind(request.param, models[0])
    with serve_app(server.app) as running:
        yield kind(running.url, timeout_s=60)


async def test_the_new_weights_are_sampled_from_and_called_by_their_version(served: Engine, models: list[Path]) -> None:
    assert await served.weight_version() is None
    for number in (1, 2):
        await served.update_weights(str(models[number]), str(number))
        assert await served.weight_version() == str(number)
        (answer,) = await served.generate(request())
        assert distance(models[number], answer) < 1e-4
        assert distance(models[number - 1], answer) > 0.1
        assert answer.policy_version == (str(number) if served.name == "sglang" else None)
    await served.aclose()


@pytest.mark.parametrize("folder", ["/nowhere/at/all", "empty", "broken", "other"])
async def test_polar_engine_refuses_what_it_cannot_load_and_keeps_what_it_has(folder: str, models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"half a file")
    path = str(models[3]) if folder == "other" else folder if folder.startswith("/") else str(tmp_path / folder)
    server, _ = of_kind("vllm", models[0])
    with serve_app(server.app) as running:
        engine = VllmEngine(running.url, timeout_s=60)
        with pytest.raises(ConfigError, match="refuses the weights") as caught:
            await engine.update_weights(path, "1")
        assert path in str(caught.value) or "shapes" in str(caught.value)
        assert await engine.weight_version() is None
        assert distance(models[0], (await engine.generate(request()))[0]) < 1e-4
        await engine.aclose()


async def test_sglang_that_cannot_load_has_undefined_weights(models: list[Path]) -> None:
    server, _ = of_kind("sglang", models[0])
    with serve_app(server.app) as running:
        engine = SglangEngine(running.url, timeout_s=60)
        with pytest.raises(EngineUnavailable, match=r"no folder /nowhere.*does the path /nowhere exist on its machine"):
            await engine.update_weights("/nowhere", "1")
        await engine.aclose()


async def test_a_pause_that_aborts_ends_what_runs_with_what_it_has(served: Engine, models: list[Path]) -> None:
    running = asyncio.create_task(served.generate(request(3000, seed=1)))
    await asyncio.sleep(0.3)
    assert not running.done()
    assert await served.pause(abort=True, timeout_s=30)
    (answer,) = await running
    assert answer.finish == "abort"
    assert answer.token_ids is not None
    assert 0 < len(answer.token_ids) < 3000
    waiting = asyncio.create_task(served.generate(request(3)))
    await served.update_weights(str(models[1]), "1")
    assert not waiting.done()
    await served.resume()
    assert distance(models[1], (await waiting)[0]) < 1e-4
    await served.resume()
    await served.aclose()


async def test_a_pause_that_waits_lets_what_runs_come_to_its_end(models: list[Path]) -> None:
    server, _ = of_kind("vllm", models[0])
    with serve_app(server.app) as running:
        engine = VllmEngine(running.url, timeout_s=60)
        answering = asyncio.create_task(engine.generate(request(200, seed=1)))
        await asyncio.sleep(0.1)
        assert await engine.pause(timeout_s=60)
        (answer,) = await answering
        assert (answer.finish, answer.completion_tokens) == ("length", 200)
        await engine.resume()
        await engine.aclose()


# --- servers that are not as they should be -----------------------------------------------------------------------


def app(answers: dict[str, Response | list[Response]], seen: list[tuple[str, bytes]] | None = None) -> Starlette:
    """Answers each path as told (the last of a list again and again), and notes what came."""

    async def answer(request: Request) -> Response:
        if seen is not None:
            seen.append((request.url.path, await request.body()))
        told = answers[request.url.path]
        return told if isinstance(told, Response) else told.pop(0) if len(told) > 1 else told[0]

    return Starlette(routes=[Route(path, answer, methods=["GET", "POST"]) for path in answers])


async def test_vllm_without_its_development_endpoints_is_told_how_to_be_started() -> None:
    with serve_app(app({})) as running:
        engine = VllmEngine(running.url)
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.update_weights("/checkpoints/1", "1")
        with pytest.raises(ConfigError, match=r"--enable-lora.*VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"):
            await engine.load_adapter("/checkpoints/1", "policy", "1")
        assert await engine.weight_version() is None
        assert await engine.pause() is False
        await engine.resume()
        await engine.aclose()


async def test_a_vllm_that_fails_to_load_says_what_to_look_at_and_to_restart_it() -> None:
    words = "Call to collective_rpc method failed: Worker failed with error 'Repo id must be in the form ...'"
    body = JSONResponse({"error": {"message": words, "type": "InternalServerError", "param": None, "code": 500}}, 500)
    with serve_app(app({"/collective_rpc": body})) as running:
        engine = VllmEngine(running.url)
        with pytest.raises(EngineUnavailable, match=r"Repo id must be.*does the path /checkpoints/1 exist.*Restart it"):
            await engine.update_weights("/checkpoints/1", "1")
        await engine.aclose()


async def test_vllm_is_asked_again_while_requests_hold_its_prefixes() -> None:
    yes, no = JSONResponse({"success": True}), JSONResponse({"success": False})
    with serve_app(app({"/reset_prefix_cache": [no, no, yes]})) as running:
        engine = VllmEngine(running.url)
        await engine.reset_prefix_cache()
        await engine.aclose()
    with serve_app(app({"/reset_prefix_cache": no})) as running:
        engine = VllmEngine(running.url)
        with pytest.raises(EngineError, match="does not forget its prefixes"):
            await engine.reset_prefix_cache(patience_s=0.2)
        await engine.aclose()


async def test_vllm_loads_an_adapter_over_the_one_of_its_name_and_forgets_its_prefixes() -> None:
    seen: list[tuple[str, bytes]] = []
    ok = JSONResponse({"success": True, "new_version": "4"})
    paths = ("/v1/load_lora_adapter", "/reset_prefix_cache", "/update_weight_version")
    answers: dict[str, Response | list[Response]] = {
        paths[0]: PlainTextResponse("Success: LoRA adapter 'policy' added."),
        paths[1]: ok,
        paths[2]: ok,
    }
    with serve_app(app(answers, seen)) as running:
        engine = VllmEngine(running.url)
        await engine.load_adapter("/adapters/4", "policy", "4")
        await engine.aclose()
    assert [path for path, _ in seen] == list(paths)
    assert seen[0][1] == b'{"lora_name":"policy","lora_path":"/adapters/4","load_inplace":true}'
    assert seen[2][1] == b'{"new_version":"4"}'


async def test_vllm_that_cannot_see_an_adapter_is_left_as_it_was() -> None:
    words = "Loading lora policy failed: No adapter found for /adapters/4"
    body = JSONResponse({"error": {"message": words, "type": "NotFoundError", "param": None, "code": 404}}, 404)
    with serve_app(app({"/v1/load_lora_adapter": body})) as running:
        engine = VllmEngine(running.url)
        with pytest.raises(ConfigError, match=r"refuses the adapter.*does the path exist on its machine"):
            await engine.load_adapter("/adapters/4", "policy", "4")
        await engine.aclose()


async def test_sglang_loads_each_adapter_in_place_of_the_last(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    server, _ = of_kind("sglang", models[0])
    assert isinstance(server, SglangServer)
    with serve_app(server.app) as running:
        engine = SglangEngine(running.url)
        for version in ("1", "2"):
            await engine.load_adapter(str(tmp_path), "policy", version)
            assert await engine.weight_version() == version
        assert server.adapters == {"policy": str(tmp_path)}
        with pytest.raises(EngineUnavailable, match="holds no adapter"):
            await engine.load_adapter("/nowhere", "policy", "3")
        await engine.aclose()


async def test_a_hosted_model_has_no_weights_to_change() -> None:
    engine = OpenAIEngine("http://127.0.0.1:9")
    for call in (engine.update_weights("/checkpoints/1", "1"), engine.load_adapter("/checkpoints/1", "policy", "1")):
        with pytest.raises(ConfigError, match="kind openai has no way"):
            await call
    assert await engine.weight_version() is None
    assert await engine.pause() is False


# --- mixtures of experts ------------------------------------------------------------------------------------------


def packed(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


async def test_expert_routing_of_the_sampled_ids_is_kept_and_the_prompts_is_not_asked_for_again() -> None:
    """vLLM's form: a row for each token but the last, of the whole row first, then from where it was told to begin."""
    seen: list[tuple[str, bytes]] = []
    whole = np.arange(len(PROMPT) + 2, dtype=np.uint8)[:, None, None] * np.ones((1, 2, 4), np.uint8)
    logprobs = {"tokens": ["token_id:7", "token_id:8", "token_id:9"], "token_logprobs": [-1.0, -2.0, -3.0]}
    usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 3}

    def answer(routing: object) -> JSONResponse:
        choice = {"index": 0, "text": "x", "logprobs": logprobs, "finish_reason": "stop", "routed_experts": routing}
        return JSONResponse({"choices": [choice], "usage": usage})

    told: list[Response] = [answer(packed(whole)), answer(packed(whole[-3:])), answer("not base64!"), answer(None)]
    with serve_app(app({"/v1/completions": told}, seen)) as running:
        engine = VllmEngine(running.url)
        for _ in range(2):
            (generation,) = await engine.generate(request())
            assert generation.routed_experts is not None
            kept = np.load(io.BytesIO(base64.b64decode(generation.routed_experts)))
            assert (kept.shape, kept.dtype) == ((3, 2, 4), np.uint8)
            assert kept[:, 0, 0].tolist() == [len(PROMPT) - 1, len(PROMPT), len(PROMPT) + 1]
        with pytest.raises(EngineUnavailable, match="has not the form of its API"):
            await engine.generate(request())
        assert (await engine.generate(request()))[0].routed_experts is None
        await engine.aclose()
    starts = [json.loads(body).get("routed_experts_prompt_start") for _, body in seen]
    assert starts[:2] == [None, len(PROMPT) - 1]
