"""What the store costs: bytes on disk, CPU a call, memory."""

from __future__ import annotations

import asyncio
import tracemalloc
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from store_samples import agent_session, raw_json, same, session

from polar.store import open_store


async def test_a_long_session_takes_a_fiftieth_of_its_raw_json(tmp_path: Path, record_property) -> None:
    """100 turns, 60,000 tokens: the raw JSON repeats every prompt as text and as ids at each turn."""
    chain = agent_session(turns=100, total=60_000)
    path = tmp_path / "store.db"
    store = open_store(path)
    await store.create_session(session())
    for completion in chain:
        await store.append([completion])
    await store.aclose()
    size, raw = path.stat().st_size, sum(map(raw_json, chain))
    record_property("ratio", raw / size)
    print(f"raw JSON {raw:,} bytes, store {size:,} bytes: 1/{raw / size:.0f}")
    assert size * 50 <= raw
    store = open_store(path)
    last = await store.completion("s", 99)
    assert last is not None
    assert same(last, chain[99])
    await store.aclose()


async def test_the_parent_is_in_memory(tmp_path: Path) -> None:
    """The next turn's lookup reads nothing, and the texts of a conversation are held once."""
    chain = agent_session(turns=10, total=5_000)
    store = open_store(tmp_path / "store.db")
    await store.create_session(session())
    for completion in chain:
        await store.append([replace(completion, messages=tuple(replace(message) for message in completion.messages))])
    store._load = None  # type: ignore[attr-defined]
    last, before = await store.completion("s", 9), await store.completion("s", 8)
    assert last is not None
    assert before is not None
    assert all(a is b for a, b in zip(last.messages, before.messages, strict=False))
    await store.aclose()


async def test_prompts_that_start_alike_share_their_start(tmp_path: Path) -> None:
    """Twenty sessions of one harness: system prompt, tools and the leading ids are on disk once."""
    chain = agent_session(turns=100, total=60_000)[:1]
    path = tmp_path / "store.db"
    store = open_store(path)
    for i in range(20):
        await store.create_session(session(f"s{i}"))
        await store.append([replace(chain[0], session=f"s{i}")])
    await store.aclose()
    alone = tmp_path / "alone.db"
    store = open_store(alone)
    await store.create_session(session("s0"))
    await store.append([replace(chain[0], session="s0")])
    await store.aclose()
    assert alone.stat().st_size > 40_000
    assert (path.stat().st_size - alone.stat().st_size) / 19 < 6_000


async def test_streaming_a_session_holds_one_branch(tmp_path: Path) -> None:
    """Three conversations side by side: their full completions add up to 45 MB, a tip of each is held at a time."""
    store = open_store(tmp_path / "store.db", cache_bytes=0)
    await store.create_session(session())
    chains = [agent_session(turns=60, total=40_000, seed=seed) for seed in range(3)]
    for turn in range(60):
        for place, chain in enumerate(chains):
            parent = None if turn == 0 else (turn - 1) * 3 + place
            await store.append([replace(chain[turn], number=turn * 3 + place, parent=parent)])
    tracemalloc.start()
    try:
        count = 0
        async for completion in store.completions("s"):
            assert completion.prompt_ids is not None
            count += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert count == 180
    assert peak < 5 << 20
    await store.aclose()


@pytest.mark.real
async def test_memory_is_flat_over_10000_appends(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db", cache_bytes=8 << 20)
    process = psutil.Process()
    chain = agent_session(turns=50, total=10_000, name="x")

    async def one(name: str) -> None:
        await store.create_session(session(name))
        for completion in chain:
            await store.append([replace(completion, session=name)])
            await store.mark_delivered(name, completion.number)

    after = []
    for round_ in range(10):
        await asyncio.gather(*(one(f"{round_}-{i}") for i in range(20)))
        after.append(process.memory_info().rss)
    assert max(after[5:]) - after[4] < 12 << 20, [f"{rss >> 20} MiB" for rss in after]
    await store.aclose()


@pytest.mark.real
async def test_5000_open_sessions(tmp_path: Path) -> None:
    store = open_store(tmp_path / "store.db", cache_bytes=64 << 20)
    process = psutil.Process()
    first = agent_session(turns=2, total=8_000)[0]
    before = process.memory_info().rss
    for start in range(0, 5_000, 100):
        names = [f"s{i}" for i in range(start, start + 100)]
        await asyncio.gather(*(store.create_session(session(name, created=float(start))) for name in names))
        await asyncio.gather(*(store.append([replace(first, session=name)]) for name in names))
    assert process.memory_info().rss - before < 160 << 20
    for i in range(0, 5_000, 50):
        found = await store.session_by_key(session(f"s{i}").key_hash)
        assert found is not None
        assert len(await store.heads(found.id)) == 1
    assert len(await store.sessions(limit=100)) == 100
    await store.aclose()
