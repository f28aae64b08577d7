"""Clocks that are set, and services that stand still."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from pathlib import Path

import pytest
from service_parts import ended, http, receiving, submit, until
from sqlalchemy import select, update

from polar.errors import StoreError
from polar.rollout import service as services
from polar.rollout.config import Retry
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.rollout.tables import attempts, deliveries
from polar.testing.node import StubNode, graded
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


async def test_a_database_that_took_no_heartbeats_takes_no_session_for_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        await gate.wait()
        return graded(request)

    async def full(change: object) -> None:
        raise StoreError("the disk is full")

    async with stub_rollouts(tmp_path, [StubNode(play=play, interval_s=600.0)]) as (service, url), http(url) as client:
        await submit(client, max_attempts=1)
        await until(lambda: service.database.read(lambda connection: connection.execute(select(attempts.c.accepted)).scalar()))
        with monkeypatch.context() as patch:
            with sqlite3.connect(tmp_path / "rollout.db") as other:
                patch.setattr(service.database, "write", full)
                other.execute("UPDATE attempts SET lease_until = 1")
            await until(lambda: "leases" in {getattr(record, "loop", None) for record in caplog.records})
        await until(lambda: service.database.read(lambda connection: connection.execute(select(attempts.c.lease_until)).scalar() > 1))
        gate.set()
        assert (await ended(client))["counts"]["graded"] == 1
