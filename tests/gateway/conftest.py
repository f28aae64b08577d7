"""A gateway in process around a scripted engine with the real Qwen3 tokenizer; one per test, its store in the test's folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from gateway_listener import Listener, listening

from polar.testing.engine import Script
from polar.testing.gateway import ScriptedGateway, scripted_gateway

Open = Callable[..., AbstractAsyncContextManager[ScriptedGateway]]


@pytest.fixture
def gateway(tmp_path: Path, qwen3_tokenizer_dir: Path) -> Open:
    """`async with gateway(script, **settings) as gw`. The engine is not checked unless `check=True`: a check uses up a script."""

    def build(script: Script, **settings: Any) -> AbstractAsyncContextManager[ScriptedGateway]:
        options = {"check": False, **settings}
        return scripted_gateway(script, options.pop("folder", tmp_path), tokenizer_dir=qwen3_tokenizer_dir, **options)

    return build


@pytest.fixture(scope="module")
def listener(qwen3_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listener]:
    """One gateway on a real socket for a module; each test makes a session of its own."""
    with listening(qwen3_tokenizer_dir, str(tmp_path_factory.mktemp("listener") / "polar.db")) as found:
        yield found
