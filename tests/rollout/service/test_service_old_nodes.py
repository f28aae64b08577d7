"""Nodes that are lost for good, and a token that was never written."""

from __future__ import annotations

from pathlib import Path

import pytest
from service_parts import http, submit, until
from sqlalchemy import update

from polar.rollout import retention
from polar.rollout.config import PolarConfig
from polar.rollout.database import Transaction
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.rollout.stack import service_token, token_file
from polar.rollout.tables import nodes
from polar.testing.node import StubNode
from polar.testing.rollout import stub_rollouts


async def never(request: SessionDispatchRequest) -> SessionResult | None:
    return None


async def test_a_node_that_is_lost_for_long_is_forgotten_and_no_other(tmp_path: Path) -> None:
    stubs = [StubNode(name, play=never, interval_s=60.0, max_run_workers=8) for name in ("busy", "old", "young")]
    async with stub_rollouts(tmp_path, stubs) as (service, url), http(url) as client:

        async def names() -> list[str]:
            return [one["node_id"] for one in (await client.get("/nodes")).json()["nodes"]]

        async def all_there() -> bool:
            return len(await names()) == 3

        await until(all_there)
        for name in ("old", "young"):
            await client.delete(f"/nodes/{name}")  # drained: what is submitted goes to the other
        await submit(client)
        await until(lambda: stubs[0].dispatched)

        def lose(tx: Transaction) -> None:
            tx.connection.execute(update(nodes).values(state="lost", last_seen=0.0))
            tx.connection.execute(update(nodes).where(nodes.c.id == "young").values(last_seen=tx.now))

        await service.database.write(lose)
        await service.database.write(lambda tx: retention.forget(tx, [], 1000.0))
        assert await names() == ["busy", "young"]


def test_an_empty_file_is_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk takes a name, and no content. What was kept so would refuse every caller, whatever is in the file later."""
    monkeypatch.setenv("POLAR_HOME", str(tmp_path))
    token_file().write_text("")
    made = service_token(PolarConfig())
    assert len(made) > 20
    assert service_token(PolarConfig()) == made == token_file().read_text()
