"""A gateway over real engines of its own, all in this process, and what the trainer makes of its sessions: for tests of sync and gate."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from polar.engine import Server
from polar.engine.text import load_text
from polar.engine.worker import TransformersBackend
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.records import Completion, Session
from polar.testing import serve_app
from polar.testing.gateway import SessionClient
from polar.testing.sglang import SglangServer
from polar.train.gate import Facts, Report, compare
from polar.train.gateways import Control
from polar.train.policy import Policy
from polar.train.rows import row_of
from polar.trajectory import Trace
from polar.trajectory.builders import build

sys.path.insert(0, str(Path(__file__).parent.parent / "engines"))
import tiny  # type: ignore[import-not-found,unused-ignore]

torch.set_num_threads(1)
make_model: Callable[..., Path] = tiny.make
"""A random little Qwen3 in the folder given; `seed`, `tied`, `layers`, `hidden`."""


@dataclass
class Rig:
    gateway: Gateway
    control: Control
    urls: list[str]

    async def session(self, **options: Any) -> tuple[Session, SessionClient]:
        record, key = await self.gateway.sessions.create(**options)
        return record, SessionClient(self.gateway.api, key)

    async def completions(self, session: Session) -> list[Completion]:
        return [completion async for completion in self.gateway.store.completions(session.id)]

    async def conversation(self, texts: Sequence[str] = ("List the files.", "And now?", "Thank you."), max_tokens: int = 40) -> Session:
        """A session of some turns, each answer echoed as it came."""
        session, client = await self.session(metadata={"harness": "pi"})
        messages: list[dict[str, Any]] = []
        for text in texts:
            messages.append({"role": "user", "content": text})
            answer = await client.post("/v1/messages", {"model": "any", "max_tokens": max_tokens, "messages": messages})
            assert answer.status == 200, answer.body
            messages.append({"role": "assistant", "content": answer.json()["content"] or [{"type": "text", "text": "."}]})
        return session

    async def rows(self, session: Session) -> list[Trace]:
        return list(build(session, await self.completions(session)).traces)


@asynccontextmanager
async def rig(
    folder: Path,
    model: Path,
    *,
    kind: str = "vllm",
    engines: int = 1,
    endless: bool = False,
    engine: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """`endless`: answers end at their length only. `engine`, `settings`: of the `EngineConfig` and the `GatewayConfig`."""
    tokenizer, template = load_text(model)
    async with AsyncExitStack() as stack:
        urls = []
        for _ in range(engines):
            backend = TransformersBackend(model, name="tiny", eos_ids=() if endless else tokenizer.eos_ids, max_sequences=4)
            server = (SglangServer if kind == "sglang" else Server)(backend, tokenizer, template)
            urls.append(stack.enter_context(serve_app(server.app)).url)
        served = EngineConfig(urls=urls, kind=kind, **(engine or {}))
        gateway = Gateway(GatewayConfig(engines={"default": served}, store=str(folder / "polar.db"), **settings))
        await stack.enter_async_context(gateway)
        control = Control("http://gateway", gateway.admin_token, transport=httpx.ASGITransport(app=gateway.admin))
        yield Rig(gateway, control, urls)


@lru_cache
def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def distance(folder: Path, completion: Completion) -> float:
    """Between what was recorded and what the model in `folder` says of it."""
    assert completion.prompt_ids is not None
    assert completion.sampled_ids is not None
    assert completion.logprobs is not None
    ids = torch.from_numpy(np.concatenate([completion.prompt_ids, completion.sampled_ids]).astype(np.int64))[None]
    start = len(completion.prompt_ids)
    with torch.no_grad():
        logprobs = loaded(folder)(ids).logits[0, start - 1 : -1].log_softmax(-1)
    return float(np.abs(logprobs.gather(1, ids[0, start:, None])[:, 0].numpy() - completion.logprobs).max())


def gate(policy: Policy, rows: Sequence[Trace], facts: Facts, provenance: Sequence[dict[str, Any]] = ()) -> Report:
    """As the trainer does it before a step."""
    with torch.no_grad():
        found = policy.logprobs([row_of(row) for row in rows])
    return compare(rows, [values.float().numpy() for values in found], facts, provenance=provenance)


def changed_model(source: Path, target: Path, *, seed: int = 0, by: float = 0.05) -> Path:
    """A model's folder with other weights."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(seed)
    for file in target.glob("*.safetensors"):
        weights = load_file(file)
        for name, value in weights.items():
            noise = torch.randn(value.shape, generator=generator) * float(value.float().std()) * by
            weights[name] = (value.float() + noise).to(value.dtype)
        save_file(weights, file, metadata={"format": "pt"})
    return target


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - it is polled, whatever it is
            await asyncio.sleep(0.01)
