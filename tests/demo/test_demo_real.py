"""`polar demo --quick` as it is: real engine, real gateway, real Pi, and one step of GRPO through the real Codex."""

from __future__ import annotations

import asyncio
from pathlib import Path

import orjson
import pytest

from polar.demo import PLOT, SUMMARY, Choice, run
from polar.errors import ConfigError
from polar.store import open_store

pytestmark = pytest.mark.real


async def stored_sessions(store_file: Path) -> dict[str, int]:
    """Sampled tokens by task."""
    store = open_store(str(store_file))
    try:
        sessions = await store.sessions()
        return {str(one.metadata["task"]): sum(head.sampled for head in await store.heads(one.id)) for one in sessions}
    finally:
        await store.aclose()


@pytest.mark.timeout(600)
def test_the_quick_demo_shows_sessions_and_takes_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "demo"
    assert run(Choice(quick=True, sessions=2, output=output, seed=1)) == 0
    text = capsys.readouterr().out
    assert "in the ledger = " in text
    sampled = asyncio.run(stored_sessions(output / "polar.db"))
    assert len(sampled) == 2
    assert all(tokens > 0 for tokens in sampled.values())
    summary = orjson.loads((output / SUMMARY).read_bytes())
    tokens = summary["tokens"]
    assert summary["steps"] == 1
    assert tokens["sampled"] == tokens["in_rows"] + tokens["ledger"] > 0
    assert tokens["in_rows"] == tokens["stepped"] + tokens["stale"] + tokens["dropped"]
    assert summary["gate_largest"] < 1e-3
    assert (output / "run" / "checkpoints" / "latest").is_file()


@pytest.mark.accept
@pytest.mark.timeout(1800)
def test_the_demo_learns_the_protocol_that_it_hardly_knew_and_keeps_the_other(tmp_path: Path) -> None:
    assert run(Choice(output=tmp_path / "demo", seed=0)) == 0
    summary = orjson.loads((tmp_path / "demo" / SUMMARY).read_bytes())
    learned, known = summary["sides"]["codex"], summary["sides"]["pi"]
    assert learned["before"]["samples"] >= 64
    assert learned["change"]["mean"] >= 0.2
    assert learned["change"]["low"] > 0
    assert known["change"]["high"] >= 0
    assert summary["gate_largest"] < 1e-3
    assert (tmp_path / "demo" / PLOT).read_text().startswith("<svg")


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not an empty folder"):
        run(Choice(quick=True, sessions=1, output=tmp_path))
    assert (tmp_path / "mine.txt").read_text() == "keep"
