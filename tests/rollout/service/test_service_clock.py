"""Clocks that are set, and services that stand still."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from service_parts import ended, http, receiving, submit, until
from sqlalchemy import select, update

from polar.rollout import service as services
from polar.rollout.config import Retry
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.rollout.tables import deliveries
from polar.testing.node import StubNode
from polar.testing.rollout import TOKEN, listening, stub_rollouts


async def never(request: SessionDispatchRequest) -> SessionResult | None:
    return None


async def test_a_service_that_stands_still_again_and_again_takes_dead_nodes_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "AWAY_S", 0.1)
    dead, well = StubNode("dead", play=never, interval_s=0.6), StubNode("well", interval_s=20.0)
    async with stub_rollouts(tmp_path, [dead]) as (_, url), http(url) as client, listening(well.app) as own:
        await submit(client)
        await until(lambda: dead.running)
        await dead.leave()
        await well.join(url, TOKEN, own)
        for _ in range(30):
            if well.dispatched:
                break
            time.sleep(0.7)  # noqa: ASYNC251 - the whole process is to stand still, in each of the service's pauses
            await asyncio.sleep(0.1)
        assert well.dispatched
        assert (await ended(client))["results"][0]["attempt"] == 1
        await well.leave()


async def test_what_a_receiver_did_not_take_is_tried_again_by_the_clock_as_it_is_now(tmp_path: Path) -> None:
    """Also what had been due for longer than the clock was set back by."""
    retry = Retry(first_seconds=3600.0, longest_seconds=3600.0)
    async with (
        receiving(fail_first=1) as (receiver, callback),
        stub_rollouts(tmp_path, callback_retry=retry) as (service, url),
        http(url) as client,
    ):
        await submit(client, callback_url=callback)
        await until(lambda: service.database.read(lambda connection: connection.execute(select(deliveries.c.tries)).scalar()))
        await service.database.write(lambda tx: tx.connection.execute(update(deliveries).values(created=deliveries.c.created - 7200)))
        service.database.clock = lambda: time.time() - 3600
        await until(lambda: len(receiver.bodies) == 2)
