"""The whole way against the real vLLM: what the gateway recorded equals a transformers recompute over the recorded ids within 1e-3."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_vllm_real import PROCESSED, RUNS, load, recompute
from vllm_server import vllm

from polar.engine.models import known_models
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.records import Completion
from polar.testing.asgi import AsgiClient

torch.set_num_threads(1)
pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
TOOLS = [{"name": "bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}]


@pytest.fixture(scope="module", params=[("tiny-qwen3", "tokens", 4096), ("smollm2", "messages", 2048)], ids=["tokens", "messages"])
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[Path, str, EngineConfig]]:
    name, mode, context = request.param
    directory = known_models()[name]()
    with vllm(directory, name, *PROCESSED, context=context) as url:
        yield directory, mode, EngineConfig(urls=[url])


async def converse(gateway: Gateway, temperature: float, top_p: float) -> list[Completion]:
    """Three turns of an eval session over Anthropic Messages, the answers echoed as they came."""
    session, key = await gateway.sessions.create(kind="eval")
    client = AsgiClient(gateway.api, {"x-api-key": key, "anthropic-version": "2023-06-01"})
    messages: list[dict[str, Any]] = []
    for text in ("Write hello to the file a.txt.", "And now?", "Thanks. Say goodbye."):
        messages.append({"role": "user", "content": text})
        body = {"model": "any", "max_tokens": 60, "messages": messages, "tools": TOOLS, "temperature": temperature, "top_p": top_p}
        answer = await client.post("/v1/messages", body)
        assert answer.status == 200, answer.body
        content = answer.json()["content"]
        messages.append({"role": "assistant", "content": content or [{"type": "text", "text": "."}]})
        for block in content:
            if block["type"] == "tool_use":
                messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": block["id"], "content": "done"}]})
    return [completion async for completion in gateway.store.completions(session.id)]


async def test_recorded_logprobs_are_those_of_the_distribution_sampled_from(engine: tuple[Path, str, EngineConfig], tmp_path: Path) -> None:
    directory, mode, config = engine
    model = load(directory)
    gateway = Gateway(GatewayConfig(engines={"default": config}, store=str(tmp_path / "polar.db")))
    async with gateway:
        served = gateway.models.find("any")
        assert served.report is not None
        assert (served.mode, served.report.problems, served.report.logprobs) == (mode, [], "processed")
        for temperature, top_p in RUNS:
            for completion in await converse(gateway, temperature, top_p):
                assert completion.untrainable is None
                assert completion.mode == mode
                assert completion.sampling["temperature"] == temperature
                assert completion.prompt_ids is not None
                assert completion.sampled_ids is not None
                assert completion.logprobs is not None
                edges = (top_p,) if top_p == 1.0 else (top_p - 1e-5, top_p, top_p + 1e-5)
                expected = recompute(model, completion.prompt_ids, completion.sampled_ids, temperature, *edges)
                assert np.abs(completion.logprobs - expected).min(axis=0).max() < 1e-3
                if mode == "tokens" and completion.parent is not None:
                    assert completion.broken is None
