"""An export of nothing does not stand in the way of the next."""

from __future__ import annotations

import asyncio
from pathlib import Path

from typer.testing import CliRunner

from polar.cli.commands import app
from polar.store import open_store


async def _empty(path: Path) -> None:
    store = open_store(path)
    await store.aclose()


def test_the_folder_of_an_export_of_nothing_is_taken_away(tmp_path: Path) -> None:
    asyncio.run(_empty(tmp_path / "polar.db"))
    folder = tmp_path / "data"
    outcome = CliRunner().invoke(app, ["export", str(folder), "--store", str(tmp_path / "polar.db")])
    assert outcome.exit_code != 0
    assert "no session that was asked for" in str(outcome.exception)
    assert not folder.exists()
