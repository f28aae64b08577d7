"""A full disk and a locked store: an overload error in the caller's shape, a red light, and nothing that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
from crash_parts import GatewayProcess, Harness, Refused, check_bridge, check_ids, gateway_process, health, http, recorded, sampled, until

from polar.store import open_store
from polar.testing.engine import Reply, ScriptedServer, serve_scripted

pytestmark = pytest.mark.real

KINDS = [("anthropic", True, True), ("anthropic", True, False), ("anthropic", False, False), ("openai_chat", True, False)]
LOCK = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None); c.execute('BEGIN IMMEDIATE'); print('locked', flush=True); sys.stdin.read()"  # noqa: E501


@pytest.fixture(scope="module")
def engine(qwen3_tokenizer_dir: Path) -> Iterator[ScriptedServer]:
    with serve_scripted(lambda call: Reply(ids=sampled(call.prompt_ids, call.tokenizer)), tokenizer_dir=qwen3_tokenizer_dir) as server:
        yield server


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with http() as client:
        yield client


def check_refusal(harness: Harness, refused: Refused) -> None:
    if harness.dialect == "anthropic":
        assert refused.body["type"] == "error"
        assert refused.body["error"]["type"] == "overloaded_error"
        assert refused.status == (200 if harness.stream and refused.status == 200 else 529)
    else:
        assert refused.status == 503
        assert refused.body["error"]["type"] == "server_error"
    assert "store" in refused.body["error"]["message"]


async def fill(harness: Harness, gateway: GatewayProcess, turns: int) -> None:
    for _ in range(turns):
        await harness.turn(gateway, "Tell me more. " * 50)


async def check_failure_and_recovery(
    gateway: GatewayProcess,
    client: aiohttp.ClientSession,
    path: Path,
    engine: ScriptedServer,
    *,
    harm: Callable[[], None],
    heal: Callable[[], None],
) -> None:
    harnesses = [await Harness.open(client, gateway, dialect, stream=stream, live=live) for dialect, stream, live in KINDS]
    for harness in harnesses:
        await harness.turn(gateway, "Hello.")
    assert await health(client, gateway) == (200, 200)
    harm()
    try:
        for harness in harnesses:
            with pytest.raises(Refused) as refused:
                await fill(harness, gateway, 200)
            check_refusal(harness, refused.value)
        assert await health(client, gateway) == (503, 503)
    finally:
        heal()

    async def green() -> bool:
        return await health(client, gateway) == (200, 200)

    await until(green)
    store = open_store(path, cache_bytes=0)
    try:
        for harness in harnesses:
            told = [await recorded(store, harness, one) for one in harness.told]
            # the refused turn is asked again, and goes on from the last one that was acknowledged
            after = await recorded(store, harness, await harness.turn(gateway, "Go on."))
            check_bridge(told[-1], after)
            for completion in [*told, after]:
                check_ids(completion, engine.backend.tokenizer)
    finally:
        await store.aclose()


async def test_a_store_that_may_not_grow(
    tmp_path: Path, engine: ScriptedServer, qwen3_tokenizer_dir: Path, client: aiohttp.ClientSession
) -> None:
    path = tmp_path / "polar.db"
    with gateway_process(engine.url, qwen3_tokenizer_dir, path) as gateway:
        endless = resource.RLIM_INFINITY

        def harm() -> None:
            size = path.with_name("polar.db-wal").stat().st_size
            resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (size, endless))

        def heal() -> None:
            resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (endless, endless))

        await check_failure_and_recovery(gateway, client, path, engine, harm=harm, heal=heal)


async def test_a_full_disk(tmp_path: Path, engine: ScriptedServer, qwen3_tokenizer_dir: Path, client: aiohttp.ClientSession) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = await asyncio.to_thread(
        subprocess.run, ["mount", "-t", "tmpfs", "-o", "size=6m", "none", disk], capture_output=True, check=False, timeout=20
    )
    if mounted.returncode != 0:
        pytest.skip("may not mount a file system of its own; the store that may not grow is tested")
    ballast = disk / "ballast"

    def harm() -> None:
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                return

    try:
        with gateway_process(engine.url, qwen3_tokenizer_dir, disk / "polar.db") as gateway:
            await check_failure_and_recovery(gateway, client, disk / "polar.db", engine, harm=harm, heal=ballast.unlink)
    finally:
        await asyncio.to_thread(subprocess.run, ["umount", "-l", disk], check=True, timeout=20)


async def test_a_store_that_another_process_has_locked(
    tmp_path: Path, engine: ScriptedServer, qwen3_tokenizer_dir: Path, client: aiohttp.ClientSession
) -> None:
    path = tmp_path / "polar.db"
    with gateway_process(engine.url, qwen3_tokenizer_dir, path) as gateway:
        lockers: list[subprocess.Popen[bytes]] = []

        def harm() -> None:
            other = subprocess.Popen([sys.executable, "-c", LOCK, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            lockers.append(other)
            assert other.stdout is not None
            assert other.stdout.readline() == b"locked\n"

        def heal() -> None:
            lockers[0].communicate(timeout=20)

        await check_failure_and_recovery(gateway, client, path, engine, harm=harm, heal=heal)
