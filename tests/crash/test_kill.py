"""Issue 2, acceptance 6: `kill -9` of the gateway under load loses nothing that a client was told to the end."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from crash_parts import GatewayProcess, Harness, Refused, check_bridge, check_ids, gateway_process, http, recorded, slowly

from polar.store import open_store
from polar.testing.engine import ScriptedServer, serve_scripted

WAYS = [(True, True), (True, False), (False, False)]
KINDS = [(dialect, stream, live) for dialect in ("anthropic", "openai_chat") for stream, live in WAYS]
"""Dialect, streamed, live."""


@pytest.fixture(scope="module")
def engine(qwen3_tokenizer_dir: Path) -> Iterator[ScriptedServer]:
    with serve_scripted(slowly, tokenizer_dir=qwen3_tokenizer_dir, tokens_per_chunk=3) as server:
        yield server


async def talk_on(harness: Harness, gateway: GatewayProcess) -> None:
    """Turn after turn until the gateway is gone."""
    while True:
        try:
            await harness.turn(gateway, f"And then? {len(harness.told)}")
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            return


async def load_and_kill(client: aiohttp.ClientSession, gateway: GatewayProcess, after_s: float) -> list[Harness]:
    harnesses = [await Harness.open(client, gateway, dialect, stream=stream, live=live) for dialect, stream, live in KINDS]
    talks = [asyncio.create_task(talk_on(harness, gateway)) for harness in harnesses]
    await asyncio.sleep(after_s)
    gateway.kill()
    await asyncio.wait_for(asyncio.gather(*talks), 60)
    return harnesses


async def check_and_go_on(harnesses: list[Harness], gateway: GatewayProcess, path: Path, engine: ScriptedServer) -> int:
    """Everything told is on disk, and each conversation goes on from there. Returns how many answers had been told."""
    told = 0
    store = open_store(path, cache_bytes=0)
    try:
        for harness in harnesses:
            completions = [await recorded(store, harness, one) for one in harness.told]
            for completion in completions:
                check_ids(completion, engine.backend.tokenizer)
            told += len(completions)
            # the turn that was cut off is asked again, word for word; a client would do the same
            after = await recorded(store, harness, await harness.turn(gateway, "Go on, please."))
            check_ids(after, engine.backend.tokenizer)
            if completions:
                check_bridge(completions[-1], after)
    finally:
        await store.aclose()
    return told


@pytest.mark.parametrize(
    "kills", [pytest.param(5, marks=pytest.mark.real), pytest.param(50, marks=[pytest.mark.accept, pytest.mark.timeout(1800)])]
)
async def test_nothing_told_to_the_end_is_lost_by_kill_9(
    kills: int, tmp_path: Path, engine: ScriptedServer, qwen3_tokenizer_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "polar.db"
    chance = random.Random(9)
    told = 0
    gateway = GatewayProcess(engine.url, qwen3_tokenizer_dir, path, first_ping_s=0.2, ping_s=0.2)
    try:
        for _ in range(kills):
            async with http() as client:
                harnesses = await load_and_kill(client, gateway, chance.uniform(0.2, 1.5))
                gateway.stop()
                gateway = GatewayProcess(engine.url, qwen3_tokenizer_dir, path, first_ping_s=0.2, ping_s=0.2)
                told += await check_and_go_on(harnesses, gateway, path, engine)
    finally:
        gateway.stop()
    with sqlite3.connect(path) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    with capsys.disabled():
        print(f"\n{kills} kills, {told} acknowledged answers, all on disk")
    assert told > 5 * kills


@pytest.mark.real
async def test_a_graceful_stop_answers_what_is_in_flight(tmp_path: Path, engine: ScriptedServer, qwen3_tokenizer_dir: Path) -> None:
    with gateway_process(engine.url, qwen3_tokenizer_dir, tmp_path / "polar.db") as gateway:
        async with http() as client:
            harnesses = [await Harness.open(client, gateway, dialect, stream=stream, live=live) for dialect, stream, live in KINDS]
            turns = [asyncio.create_task(harness.turn(gateway, "Hello.")) for harness in harnesses]
            await asyncio.sleep(0.1)
            await asyncio.to_thread(gateway.stop)
            outcomes = await asyncio.gather(*turns, return_exceptions=True)
    assert gateway.process.returncode == 0
    store = open_store(tmp_path / "polar.db")
    for harness, outcome in zip(harnesses, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            assert isinstance(outcome, Refused | aiohttp.ClientError), outcome
        else:
            check_ids(await recorded(store, harness, outcome), engine.backend.tokenizer)
    await store.aclose()
    assert any(not isinstance(outcome, BaseException) for outcome in outcomes)
