"""Classes that a task names as `module:Class`: what their module does when it is imported ends one task at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.evaluator.composition import resolve
from polar.harness.agent_options import harness_of
from polar.harness.spec import AgentSpec
from polar.runtime import backend_of
from polar.runtime.spec import RuntimeSpec

LOADERS: dict[str, Callable[[str], object]] = {
    "agent": lambda place: harness_of(AgentSpec(import_path=place)),
    "runtime": lambda place: backend_of(RuntimeSpec(import_path=place)),
    "evaluator": lambda place: resolve(place, {}, {}),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    ("text", "said"),
    [("import sys; sys.exit('usage: mine')", "usage: mine"), ("def broken(:", "SyntaxError"), ("1 / 0", "ZeroDivisionError")],
    ids=["exits", "no Python", "raises"],
)
async def test_a_module_that_cannot_be_imported_is_a_wrong_setting(
    loader: str, text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_to_import.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)

    async def load() -> object:
        return LOADERS[loader]("mine_to_import:Mine")

    with pytest.raises(ConfigError, match=f"mine_to_import:Mine.*{said}"):
        await asyncio.create_task(load())
