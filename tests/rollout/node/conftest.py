"""A node per test, in the test's folder."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from node_world import Receiver, TestVerdict, World, receiving

from polar.testing.engine import Call, Reply


def says_hi(call: Call) -> Reply | str:
    return "Hi."


@pytest.fixture
def world(tmp_path: Path, qwen3_tokenizer_dir: Path) -> Callable[..., World]:
    """`world(script, **settings)`; `async with world.node()` starts it."""

    def build(script: Any = says_hi, **settings: Any) -> World:
        TestVerdict.seen.clear()
        return World(tmp_path, qwen3_tokenizer_dir, script, settings)

    return build


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found
