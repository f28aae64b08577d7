"""Fixtures of the sandboxes' tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sandboxes import SPECS, Sandboxes, sandboxes_of


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.real) if name == "docker" else name for name in SPECS])
async def sandboxes(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Sandboxes]:
    """Of every backend that is usable here."""
    async with sandboxes_of(request.param, tmp_path / "sandboxes", monkeypatch) as made:
        yield made
