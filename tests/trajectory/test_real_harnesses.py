"""Rows of real CLIs, with a sub-agent where they have one and a compaction: laws 2 and 3, and what `bench/harness_rows.py` shows."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.real
BENCH = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "harness_rows.py"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BENCH["NAMES"])
def test_a_conversation_is_one_row_up_to_its_compaction_and_every_break_has_a_name(name: str, tmp_path: Path) -> None:
    asyncio.run(BENCH["record"]([name], tmp_path, all_dialects=False))
    runs = BENCH["collect"](tmp_path)
    assert {run.mode for run in runs} == {"tokens", "messages"}
    assert [problem for run in runs for problem in run.problems] == []
    tokens = next(run for run in runs if run.mode == "tokens")
    messages = next(run for run in runs if run.mode == "messages")
    assert len(tokens.trajectory.traces) < len(messages.trajectory.traces)
    assert tokens.trajectory.in_rows + tokens.trajectory.ledger.tokens == tokens.trajectory.sampled
