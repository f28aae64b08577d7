"""The examples of docs/extending.md are run as they stand there."""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import polar
from polar.dialects import base as dialects
from polar.engines import base as engines
from polar.errors import ConfigError
from polar.evaluator import base as evaluators
from polar.harness import base as harnesses
from polar.runtime import Place, RuntimeSpec, create
from polar.runtime import base as runtimes
from polar.runtime.container_config import body
from polar.testing import fake_logprob, serve_app
from polar.tokens.tokenizer import load_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
TINY = Path(polar.__file__).parent / "assets" / "tiny-qwen3"
Example = Callable[[str], types.ModuleType]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Example]:
    """Runs one file of the page as a module; what it registers is forgotten afterwards."""
    for room in (dialects, engines, evaluators, harnesses, runtimes):
        monkeypatch.setattr(room, "_REGISTRY", dict(room._REGISTRY))
    blocks = {name: text for text, name in re.findall(r"```python\n(# (\S+\.py)\n.*?)```", PAGE.read_text(), re.DOTALL)}

    def load(name: str) -> types.ModuleType:
        module = types.ModuleType(Path(name).stem)
        exec(compile(blocks[name], name, "exec"), module.__dict__)
        return module

    return load


async def test_the_dialect_speaks_through_a_whole_gateway(example: Example, tmp_path: Path) -> None:
    example("src/polar/dialects/ollama.py")
    await example("try_ollama.py").try_ollama(tmp_path, TINY)


async def test_the_dialect_answers_errors_in_its_own_shape(example: Example, tmp_path: Path) -> None:
    from polar.testing.gateway import scripted_gateway

    example("src/polar/dialects/ollama.py")
    async with scripted_gateway([], tmp_path, tokenizer_dir=TINY, check=False) as gateway:
        answer = await gateway.client.post("/api/chat", {"model": "any", "messages": []})
        assert (answer.status, set(answer.json())) == (401, {"error"})
        _, client = await gateway.session()
        answer = await client.post("/api/chat", {"model": "any", "messages": 7})
        assert (answer.status, answer.json()) == (400, {"error": "messages: must be an array, not a number"})


async def test_the_engine_is_checked_and_called_trainable(example: Example, tmp_path: Path) -> None:
    module = example("src/polar/engines/acme.py")
    script = example("try_acme.py")
    script.__dict__.update(AcmeEngine=module.AcmeEngine)
    with serve_app(acme_server()) as server:
        await script.try_acme(server.url, tmp_path, TINY)


async def test_the_harness_runs_and_its_call_is_recorded(example: Example, tmp_path: Path) -> None:
    example("src/polar/harness/one_shot.py")
    await example("try_one_shot.py").try_one_shot(tmp_path, TINY)


async def test_the_runtime_is_found_by_its_name_and_asks_for_its_kernel(example: Example, tmp_path: Path) -> None:
    example("src/polar/runtime/gvisor.py")
    place = Place("one", "owner", tmp_path)
    runtime = create(RuntimeSpec(backend="gvisor", image="debian"), place)
    assert body(runtime.spec, place, image="debian", workdir="/workspace", podman=None)["HostConfig"]["Runtime"] == "runsc"
    assert "runsc" in (await type(runtime).unavailable() or "runsc")
    with pytest.raises(ConfigError):
        create(RuntimeSpec(backend="gvisor", kwargs={"nonsense": 1}), place)


async def test_the_evaluator_judges_a_real_sandbox(example: Example, tmp_path: Path) -> None:
    os.chmod(tmp_path, 0o755)  # its user is another one, where root runs this
    example("src/polar/evaluator/prints.py")
    await example("try_prints.py").try_prints(tmp_path)


def acme_server() -> Starlette:
    """The imaginary server: it always says `Hello.`"""
    tokenizer = load_tokenizer(TINY)
    ids = [*tokenizer.encode("Hello.", add_special_tokens=False), tokenizer.eos_token_id]

    async def info(request: Request) -> JSONResponse:
        return JSONResponse({"model": "acme-1", "context": 4096, "version": "1.0"})

    async def sample(request: Request) -> JSONResponse:
        body: dict[str, Any] = await request.json()
        cut = ids[: body["max_tokens"]]
        logprobs = [fake_logprob(token, at) for at, token in enumerate(cut)]
        return JSONResponse({"ids": cut, "logprobs": logprobs, "ended": len(cut) == len(ids), "count": len(cut), "weights": "7"})

    return Starlette(routes=[Route("/info", info), Route("/sample", sample, methods=["POST"])])
