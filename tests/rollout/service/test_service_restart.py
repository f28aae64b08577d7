"""Restarts: what was acknowledged is there, what was open goes on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from service_parts import ended, http, submit, until

from polar.errors import ConfigError
from polar.rollout.config import RolloutConfig
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.rollout.service import Service
from polar.sockets import free_port
from polar.testing.node import StubNode, broken, graded
from polar.testing.rollout import TOKEN, listening, running_service

CHILD = """
import asyncio, sys
from pathlib import Path
from polar.gateway.serve import bind, run_server, server_of
from polar.rollout.config import RolloutConfig
from polar.rollout.service import Service

async def main():
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    config = RolloutConfig(store=str(folder / "r.db"), save_dir=str(folder / "saved"), dispatch_poll_interval_seconds=0.05,
                           callback_retry={"first_seconds": 0.05, "longest_seconds": 0.2})
    service = Service(config, "service-token")
    await service.start()
    await run_server(server_of(service.app), bind("127.0.0.1", port))

asyncio.run(main())
"""


async def test_an_attempt_goes_on_while_the_service_is_away(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async def play(request: SessionDispatchRequest) -> SessionResult:
        await gate.wait()
        return graded(request)

    node = StubNode(play=play, max_run_workers=4)
    async with listening(node.app) as own:
        async with running_service(tmp_path, lease_seconds=1.0) as (_, url), http(url) as client:
            await node.join(url, TOKEN, own)
            await submit(client, samples=3)
            await until(lambda: len(node.running) == 3)
        await asyncio.sleep(1.2)  # longer than the leases
        async with running_service(tmp_path, lease_seconds=1.0) as (_, url), http(url) as client:
            node.service_url = url
            gate.set()
            status = await ended(client)
        await node.leave()
    assert status["counts"] == {"graded": 3, "open": 0}
    assert {one["attempt"] for one in status["results"]} == {0}
    assert len(node.dispatched) == 3


async def test_what_was_submitted_without_a_node_is_run_after_a_restart(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (_, url), http(url) as client:
        await submit(client, samples=2)
    node = StubNode()
    async with running_service(tmp_path) as (_, url), http(url) as client, listening(node.app) as own:
        await node.join(url, TOKEN, own)
        assert (await ended(client))["counts"]["graded"] == 2
        await node.leave()


async def test_a_second_service_on_the_same_database_is_refused(tmp_path: Path) -> None:
    async with running_service(tmp_path) as (service, _):
        with pytest.raises(ConfigError, match="another rollout service"):
            Service(service.config, TOKEN)
    again = Service(RolloutConfig(store=str(tmp_path / "rollout.db")), TOKEN)
    await again.database.close()


async def test_the_database_is_for_its_owner_only(tmp_path: Path) -> None:
    async with running_service(tmp_path):
        names = [name for name in os.listdir(tmp_path) if name.startswith("rollout.db")]
        assert {os.stat(tmp_path / name).st_mode & 0o077 for name in names} == {0}


@pytest.mark.real
async def test_kill_dash_nine_loses_nothing_and_doubles_nothing(tmp_path: Path) -> None:
    """The service is killed again and again while sessions run; a third of the attempts fail."""
    rng = random.Random(7)

    async def play(request: SessionDispatchRequest) -> SessionResult:
        await asyncio.sleep(rng.uniform(0, 0.3))
        return broken(request) if rng.random() < 0.3 else graded(request, reward=float(request.sample))

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    script = tmp_path / "child.py"
    script.write_text(CHILD)

    def spawn() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, str(script), str(tmp_path), str(port)], start_new_session=True)

    async def alive() -> bool:
        try:
            return (await client.get("/health")).status_code == 200
        except httpx.HTTPError:
            return False

    nodes = [StubNode(f"n{number}", play=play, max_run_workers=8, interval_s=0.3) for number in range(2)]
    process = spawn()
    try:
        async with http(url) as client, listening(nodes[0].app) as first, listening(nodes[1].app) as second:
            await until(alive, 60)
            for node, own in zip(nodes, (first, second), strict=True):
                await node.join(url, TOKEN, own)
            await submit(client, samples=200, max_attempts=20)
            for _ in range(5):
                await asyncio.sleep(rng.uniform(0.2, 0.8))
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                process = spawn()
                await until(alive, 60)
            status = await ended(client, timeout_s=120)
            seqs = []
            async with client.stream("GET", "/events?after=0") as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("id: "):
                        seqs.append(int(line[4:]))
                    if '"task.finished"' in line:
                        break
            for node in nodes:
                await node.leave()
    finally:
        process.kill()
        process.wait()
    assert status["counts"] == {"graded": 200, "open": 0}
    assert [one["reward"] for one in status["results"]] == [float(number) for number in range(200)]
    assert seqs == list(range(1, len(seqs) + 1))
    taken = [attempt for node in nodes for attempt, code in node.answers if code == 200]
    assert {attempt.split(".")[0] for attempt in taken} <= {one["session_id"] for one in status["results"]}  # some answers were cut off
