from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from export_samples import Talk, Write, fill

from polar.chat import JsonObject
from polar.export import About, Spec, export


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`await write(talks, **options)`: an export of these sessions, as its manifest and its folder."""
    count = 0

    async def run(talks: Sequence[Talk], **options: Any) -> tuple[JsonObject, Path]:
        nonlocal count
        count += 1
        store = await fill(tmp_path / f"{count}.db", talks)
        try:
            folder = tmp_path / f"out{count}"
            return await export(store, "a store", folder, Spec(**{"file_format": "jsonl", **options}), about=About("Test")), folder
        finally:
            await store.aclose()

    return run
