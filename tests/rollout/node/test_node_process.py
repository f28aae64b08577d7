"""A node as a process: killed, restarted over what it left, and asked to end. Sandboxes, engine wire and disk are real."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from node_world import Receiver, until

from polar.rollout.config import PolarConfig
from polar.runtime.reaper import listing
from polar.store import open_store
from polar.testing.engine import ScriptedServer, serve_scripted

pytestmark = pytest.mark.real

MAIN = """
import asyncio, sys
from polar.rollout.config import PolarConfig
from polar.rollout.node.serve import run_node
config = PolarConfig.model_validate_json(open(sys.argv[1]).read())
asyncio.run(run_node(config, ready=lambda line: print(line, flush=True), with_service=config.gateway.rollout_server_url is not None))
"""
ONE_CALL = """curl -sSf "$OPENAI_BASE_URL/chat/completions" -H "authorization: Bearer $OPENAI_API_KEY" \
-H 'content-type: application/json' -d '{"model":"m","messages":[{"role":"user","content":"Work."}],"max_tokens":8}' -o /dev/null"""


@pytest.fixture
def engine(qwen3_tokenizer_dir: Path) -> Iterator[ScriptedServer]:
    with serve_scripted(lambda call: "Hi.", tokenizer_dir=qwen3_tokenizer_dir) as server:
        yield server


@dataclass
class Process:
    """A running node."""

    process: asyncio.subprocess.Process
    control: str
    token: str

    async def dispatch(self, session: str, command: str, **fields: Any) -> int:
        body = {
            "session_id": session,
            "task_id": "task",
            "instruction": "x",
            "remaining_timeout_seconds": 60,
            "runtime": {"backend": "local"},
            "agent": {"custom_shell": command},
            **fields,
        }
        async with self.http() as http, http.post("/sessions", json=body) as answer:
            return answer.status

    async def sessions(self) -> list[Any]:
        async with self.http() as http, http.get("/sessions") as answer:
            return list((await answer.json())["sessions"])

    async def get(self, path: str) -> Any:
        async with self.http() as http, http.get(path) as answer:
            return await answer.json()

    def http(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(self.control, headers={"authorization": f"Bearer {self.token}"})

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@dataclass
class Place:
    folder: Path
    engine: ScriptedServer
    tokenizer_dir: Path
    service: str | None = None
    said: list[str] = field(default_factory=list)
    shutdown_s: float = 0.5

    @asynccontextmanager
    async def node(self) -> AsyncIterator[Process]:
        config = PolarConfig.model_validate(
            {
                "rollout": {"token": "service-token", "callback_retry": {"first_seconds": 0.1, "longest_seconds": 0.3}},
                "gateway": {
                    "heartbeat_interval_seconds": 0.2,
                    "rollout_server_url": self.service,
                    "nodes": [
                        {
                            "id": "node-1",
                            "port": 0,
                            "token": "node-token",
                            "work_dir": str(self.folder / "work"),
                            "artifacts_dir": str(self.folder / "artifacts"),
                            "engines": {"default": {"urls": [self.engine.url], "tokenizer": str(self.tokenizer_dir), "renderer": "qwen3"}},
                            "gateway": {"store": str(self.folder / "polar.db"), "render_process": False, "shutdown_s": self.shutdown_s},
                        }
                    ],
                },
            }
        )
        file = self.folder / "polar.json"
        file.write_text(config.model_dump_json())
        env = {**os.environ, "POLAR_HOME": str(self.folder / "state")}
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", MAIN, str(file), stdout=asyncio.subprocess.PIPE, env=env)
        assert process.stdout is not None
        try:
            async with asyncio.timeout(60):
                line = b""
                while b"control API" not in line:
                    line = await process.stdout.readline()
                    assert line, "the node ended at its start"
                    self.said.append(line.decode())
            yield Process(process, line.decode().split("control API ")[1].strip(), "node-token")
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def told_by_ps(self) -> list[Any]:
        env = {**os.environ, "POLAR_HOME": str(self.folder / "state")}
        command = (sys.executable, "-m", "polar.cli", "ps", "--json")
        asked = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=env)
        output, _ = await asked.communicate()
        return list(json.loads(output))

    async def left(self) -> list[Any]:
        return await listing(self.folder / "work" / "sandboxes")


@pytest.fixture
def place(tmp_path: Path, engine: ScriptedServer, qwen3_tokenizer_dir: Path) -> Place:
    tmp_path.chmod(0o755)
    return Place(tmp_path, engine, qwen3_tokenizer_dir)


async def running(node: Process, session: str, turns: int) -> None:
    async with asyncio.timeout(30):
        while not any(one["session_id"] == session and one["turns"] >= turns for one in await node.sessions()):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_after_kill_9_nothing_is_left_and_nothing_is_forgotten(place: Place) -> None:
    async with place.node() as node:
        assert await node.dispatch("ses_1", f"{ONE_CALL} && (setsid sleep 1000 &) && sleep 1000") == 201
        await running(node, "ses_1", 1)
        assert {one["alive"] for one in await place.told_by_ps()} == {True}
        await node.kill()
    assert {one["kind"] for one in await place.told_by_ps() if not one["alive"]} >= {"folder"}
    async with place.node() as node:
        await asyncio.sleep(0.2)
        assert [one for one in await place.left() if one.kind == "process"] == []
        assert await node.sessions() == []
        shown = await node.get("/sessions/ses_1")
        assert (shown["result"]["outcome"], shown["result"]["error_code"]) == ("infrastructure", "node_lost")
        assert await node.dispatch("ses_1", "true", attempt=1) == 201
    store = open_store(str(place.folder / "polar.db"))
    record = await store.session("ses_1.0")
    assert record is not None
    assert record.closed is not None
    assert len(await store.heads("ses_1.0")) == 1  # what was acknowledged is there
    await store.aclose()


async def test_a_result_that_kill_9_kept_from_its_receiver_comes_later(place: Place, receiver: Receiver) -> None:
    place.service = receiver.url
    receiver.answer = lambda result: 503
    async with place.node() as node:
        await node.dispatch("ses_1", ONE_CALL)
        await until(lambda: receiver.results, 30)
        await node.kill()
    receiver.posts.clear()
    receiver.answer = lambda result: 200
    async with place.node():
        [result] = await until(lambda: receiver.results, 30)
    assert (result["session_id"], result["outcome"], result["turns"]) == ("ses_1", "graded", 1)


async def test_a_lost_attempt_is_missing_under_the_new_instance(place: Place, receiver: Receiver) -> None:
    """How the service learns of the loss: it is in no heartbeat of the node's next life."""
    place.service = receiver.url
    async with place.node() as node:
        await node.dispatch("ses_1", "sleep 1000")
        await until(lambda: any(beat["attempts"] == ["ses_1.0"] for beat in receiver.of("/nodes/node-1/heartbeat")), 30)
        await node.kill()
    first = receiver.of("/nodes/register")[0]["instance"]
    receiver.posts.clear()
    async with place.node():
        [beat, *_] = await until(lambda: receiver.of("/nodes/node-1/heartbeat"), 30)
    assert beat["instance"] != first
    assert beat["attempts"] == []
    assert receiver.results == []


async def test_sigterm_ends_it_with_everything_told_and_removed(place: Place, receiver: Receiver) -> None:
    place.service = receiver.url
    async with place.node() as node:
        await node.dispatch("ses_1", f"{ONE_CALL} && (setsid sleep 1000 &) && sleep 1000")
        await running(node, "ses_1", 1)
        node.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await node.process.wait() == 0
    [result] = receiver.results
    assert (result["outcome"], result["error_code"]) == ("infrastructure", "node_shutdown")
    assert list((place.folder / "state" / "roots").iterdir()) == []
    assert receiver.of("/nodes/node-1/heartbeat")[-1]["draining"] is True
    assert await place.left() == []
    assert os.listdir(place.folder / "work" / "sandboxes") == []


async def test_a_new_process_of_a_node_waits_for_the_one_that_still_ends(place: Place) -> None:
    """After kill -9 of `polar serve` its node ends by itself, which takes as long as its sessions may: the next one is not refused."""
    async with place.node() as first, contextlib.AsyncExitStack() as stack:
        coming = asyncio.create_task(stack.enter_async_context(place.node()))
        await until(lambda: any("waiting for an earlier process" in line for line in place.said), 30)
        assert not coming.done()
        first.process.send_signal(signal.SIGTERM)
        second = await coming
        assert first.process.returncode is not None or await first.process.wait() == 0
        assert await second.sessions() == []


async def test_what_runs_gets_the_shutdown_time_once(place: Place) -> None:
    place.shutdown_s = 5.0
    async with place.node() as node:
        await node.dispatch("ses_1", f"{ONE_CALL} && sleep 1000")
        await running(node, "ses_1", 1)
        began = time.monotonic()
        node.process.send_signal(signal.SIGTERM)
        assert await node.process.wait() == 0
        assert 5.0 <= time.monotonic() - began < 9.0
