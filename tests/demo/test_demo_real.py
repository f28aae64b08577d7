"""`polar demo` as it is: real engine, real gateway, real Pi."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.demo import run
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


@pytest.mark.timeout(300)
def test_the_demo_runs_and_everything_is_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import asyncio

    output = tmp_path / "demo"
    assert run(sessions=2, output=output, seed=1) == 0
    text = capsys.readouterr().out
    assert "in the ledger =" in text
    sampled = asyncio.run(stored_sessions(output / "polar.db"))
    assert len(sampled) == 2
    assert all(tokens > 0 for tokens in sampled.values())


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not an empty folder"):
        run(sessions=1, output=tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "keep"
