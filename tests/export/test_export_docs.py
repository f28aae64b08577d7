"""docs/data.md: its Python example runs, and its tables are complete."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from export_samples import fill, solved

from polar.export import label_line
from polar.export.columns import COLUMNS
from polar.export.facts import KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "runs" / "first"
    first.mkdir(parents=True)

    async def prepare() -> None:
        await (await fill(first / "polar.db", [solved("a")])).aclose()

    asyncio.run(prepare())
    (first / "rewards.jsonl").write_bytes(label_line("a", reward=1.0))
    example = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "asyncio.run" in block)
    exec(compile(example, "data.md", "exec"), {})
    assert capsys.readouterr().out == "1\n"
    assert (tmp_path / "out" / "data" / "train-00000.parquet").is_file()


def test_every_fact_and_every_column_is_explained() -> None:
    names = {*KEYS, *(column.name for columns in COLUMNS.values() for column in columns)} - {"prompt_messages", "response_messages"}
    assert [name for name in sorted(names) if f"`{name}`" not in PAGE] == []
