"""Real faults of a real vLLM on a CPU: what it answers 200 to, and what the gate says of the rows that come after."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gateway_rig import gate, make_model
from vllm_server import vllm  # type: ignore[import-not-found,unused-ignore]

from polar.chat import Sampling
from polar.engines.base import TokensRequest
from polar.engines.vllm import VllmEngine
from polar.errors import EngineUnavailable, NotTrainable
from polar.train.export import export_model, untie
from polar.train.gate import Facts, Report
from polar.train.policy import Policy
from polar.trajectory import Span, Trace

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]
PROCESSED = ("--logprobs-mode", "processed_logprobs")


async def rows(engine: VllmEngine, version: str, count: int = 4) -> list[Trace]:
    """Rows of one turn each."""
    found = []
    for number in range(count):
        prompt = np.arange(40 + number, 80, dtype=np.int32)
        (answer,) = await engine.generate(TokensRequest("tiny", prompt, Sampling(max_tokens=40, temperature=1.0)))
        assert answer.token_ids is not None
        assert answer.logprobs is not None
        start, end = len(prompt), len(prompt) + len(answer.token_ids)
        logprobs = np.zeros(end, np.float32)
        logprobs[start:] = answer.logprobs
        span = Span(0, start, end, policy_version=version, sampling={"temperature": 1.0})
        ids = np.concatenate([prompt, answer.token_ids])
        found.append(Trace(f"s{number}", ids, np.arange(end) >= start, logprobs, (span,), metadata={"harness": "none"}))
    return found


async def checked(policy: Policy, engine: VllmEngine, version: str) -> Report:
    return gate(policy, await rows(engine, version), Facts(version))


def trained(folder: Path, seed: int) -> Policy:
    """The policy after a step: other weights of the same shapes, still tied if it was."""
    policy = Policy.load(str(folder))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


async def test_tied_embeddings_are_corrupted_silently_and_the_gate_says_so(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", tied=True)
    policy = trained(base, 1)
    policy.model.save_pretrained(tmp_path / "new")
    with vllm(base, "tiny", *PROCESSED) as url:
        engine = VllmEngine(url, timeout_s=300)
        (await checked(Policy.load(str(base)), engine, "0")).check()
        await engine.update_weights(str(tmp_path / "new"), "1")  # as far as vLLM is concerned all went well
        assert await engine.weight_version() == "1"
        report = await checked(policy, engine, "1")
        assert not report.open
        assert report.whole.mean > 0.1
        assert [name for name, _ in report.suspects] == ["weights"]
        with pytest.raises(NotTrainable, match="the engine's weights are not the trainer's"):
            report.check()
        assert not (await checked(Policy.load(str(base)), engine, "1")).open  # they are not the old ones either
        await engine.aclose()


async def test_untied_exports_reach_vllm_exactly_and_a_folder_that_it_cannot_see_ends_it(tmp_path: Path) -> None:
    base = make_model(tmp_path / "base", tied=True)
    served = untie(base, tmp_path / "served")
    with vllm(served, "tiny", *PROCESSED) as url:
        engine = VllmEngine(url, timeout_s=300)
        assert await engine.weight_version() is None
        for version in (1, 2):
            policy = trained(base, version)
            folder = export_model(policy, tmp_path / f"v{version}")
            assert await engine.pause(abort=True, timeout_s=60)
            await engine.update_weights(str(folder), str(version))
            await engine.resume()
            assert await engine.weight_version() == str(version)
            report = await checked(policy, engine, str(version))
            report.check()
            assert report.whole.largest < 1e-3
        with pytest.raises(EngineUnavailable, match=r"/nowhere.*does the path /nowhere exist on its machine.*Restart it"):
            await engine.update_weights("/nowhere", "3")
        await engine.aclose()
