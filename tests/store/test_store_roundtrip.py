"""What is appended comes back equal, whatever it is, from SQLite and PostgreSQL, from memory and from disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import agent_session, differences, forests, same, session

from polar.records import Completion, Head
from polar.store import Store, open_store
from polar.store import delta as delta_module

LAW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


async def check(store: Store, expected: list[Completion], order: list[int]) -> None:
    by_number = {completion.number: completion for completion in expected}
    for number in order:
        found = await store.completion("s", number)
        assert found is not None
        assert same(found, by_number[number]), differences(found, by_number[number])
    streamed = [completion async for completion in store.completions("s")]
    assert [c.number for c in streamed] == sorted(by_number)
    for found in streamed:
        assert same(found, by_number[found.number]), differences(found, by_number[found.number])
    assert await store.heads("s") == [
        Head(
            c.number, c.root, c.turn, c.loose, c.thinking_hash, c.parent, c.status, c.delivered, c.choice,
            0 if c.sampled_ids is None else len(c.sampled_ids),
        )
        for c in expected
    ]  # fmt: skip


@LAW
@given(forest=forests(), seed=st.integers(0, 99), cache_bytes=st.sampled_from([0, 4000, 1 << 26]), data=st.data())
def test_what_is_appended_comes_back(new_place: Callable[[], str], forest: list[Completion], seed: int, cache_bytes: int, data) -> None:
    place = new_place()
    together = data.draw(st.booleans())

    async def run() -> None:
        order = [completion.number for completion in forest]
        random.Random(seed).shuffle(order)
        store = open_store(place, cache_bytes=cache_bytes)
        await store.create_session(session())
        if together:
            await store.append(forest)
        else:
            for completion in forest:
                await store.append([completion])
        await check(store, forest, order)
        await store.aclose()
        store = open_store(place, cache_bytes=cache_bytes)
        await check(store, forest, order)
        await store.aclose()

    asyncio.run(run())


@LAW
@given(forest=forests(), seed=st.integers(0, 99))
def test_any_order_of_arrival(new_place: Callable[[], str], forest: list[Completion], seed: int) -> None:
    """A child may be recorded before its parent: calls end in another order than they began."""
    place = new_place()

    async def run() -> None:
        shuffled = list(forest)
        random.Random(seed).shuffle(shuffled)
        store = open_store(place)
        await store.create_session(session())
        await asyncio.gather(*(store.append([completion]) for completion in shuffled))
        await store.aclose()
        store = open_store(place)
        await check(store, forest, [completion.number for completion in forest])
        await store.aclose()

    asyncio.run(run())


def test_every_field_of_a_completion_is_kept() -> None:
    """A field that is added to `Completion` must be added to the codec, or it would be lost without a word."""
    elsewhere = {"messages", "answer", "tools", "prompt_ids", "sampled_ids", "logprobs", "request_digest", "tags", "broken"}
    assert {f.name for f in fields(Completion)} == elsewhere | set(delta_module._FIELDS) | set(delta_module._COLUMNS)


async def test_a_chain_longer_than_the_depth_limit(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.store.sql.MAX_DEPTH", 5)
    chain = agent_session(turns=23, total=2300)
    store = open_store(place)
    await store.create_session(session())
    for completion in chain:
        await store.append([completion])
    await store.aclose()
    store = open_store(place, cache_bytes=0)
    await check(store, chain, [22, 0, 5, 6, 11])
    await store.aclose()


async def test_a_parent_that_was_never_recorded(place: str) -> None:
    orphan = replace(agent_session(turns=3, total=600)[2], parent=1)
    store = open_store(place)
    await store.create_session(session())
    await store.append([orphan])
    await check(store, [orphan], [2])
    await store.aclose()


async def test_edits_in_the_middle_of_a_long_history_cost_little(tmp_path: Path) -> None:
    """A volatile header at the front of every prompt breaks the prefix at once; the rest is still found again."""
    chain = agent_session(turns=20, total=20_000)
    for completion in chain:
        assert completion.prompt_ids is not None
        completion.prompt_ids = completion.prompt_ids.copy()
        completion.prompt_ids[3] = completion.number
        completion.messages = (replace(completion.messages[0], content=f"at {completion.number}"), *completion.messages[1:])
    path = tmp_path / "store.db"
    store = open_store(path)
    await store.create_session(session())
    for completion in chain:
        await store.append([completion])
    await check(store, chain, [19])
    await store.aclose()
    store = open_store(path, cache_bytes=0)
    await check(store, chain, [19, 4])
    await store.aclose()
    assert path.stat().st_size < 400_000  # the ids alone of 20 prompts, each in full: over 1 MB


async def test_b93_no_ids_are_not_an_empty_prompt(place: str) -> None:
    """Half a record stays half a record: missing is never read back as empty, nor empty as missing."""
    first, second = agent_session(turns=2, total=400)
    empty = np.empty(0, dtype=np.int32)
    halves = [replace(first, prompt_ids=None), replace(second, prompt_ids=empty, sampled_ids=None, logprobs=None)]
    store = open_store(place)
    await store.create_session(session())
    await store.append(halves)
    await store.aclose()
    store = open_store(place)
    await check(store, halves, [1, 0])
    found = await store.completion("s", 1)
    assert found is not None
    assert found.prompt_ids is not None
    assert found.sampled_ids is None
    await store.aclose()


async def test_b95_missing_and_infinite_logprobs_are_kept_as_bits(place: str) -> None:
    odd = np.array([np.nan, -np.inf, -9999.0, -0.0, -1e-45], dtype=np.float32)
    given_one = replace(agent_session(turns=1, total=300)[0], logprobs=odd, sampled_ids=np.arange(5, dtype=np.int32))
    store = open_store(place)
    await store.create_session(session())
    await store.append([given_one])
    await store.aclose()
    store = open_store(place)
    await check(store, [given_one], [0])
    await store.aclose()
