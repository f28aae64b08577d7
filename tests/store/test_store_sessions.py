"""Sessions, keys, marks and forgetting, on SQLite and PostgreSQL."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from store_samples import agent_session, session

from polar.errors import StoreError
from polar.store import open_store


async def test_a_session_comes_back(place: str) -> None:
    given = session("one", kind="eval", closed=3.5, settings={"stream": "live", "budget": None, "x": [1.0]}, metadata={"who": "\ud800 me"})
    store = open_store(place)
    await store.create_session(given)
    assert await store.session("one") == given
    assert await store.session_by_key(given.key_hash) == given
    assert await store.session("two") is None
    assert await store.session_by_key(b"nobody") is None
    await store.aclose()


@pytest.mark.parametrize("second", [session("one", key_hash=b"other"), replace(session("two"), key_hash=session("one").key_hash)])
async def test_an_id_and_a_key_are_given_once(place: str, second) -> None:
    store = open_store(place)
    await store.create_session(session("one"))
    with pytest.raises(ValueError, match="exists already"):
        await store.create_session(second)
    assert len(await store.sessions()) == 1
    assert store.healthy is None  # the caller's fault, not the store's
    await store.aclose()


async def test_a_duplicate_does_not_hurt_its_batch(place: str) -> None:
    store = open_store(place)
    await store.create_session(session("one"))
    outcomes = await asyncio.gather(
        *(store.create_session(session(name)) for name in ("two", "one", "three", "two", "four")), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [type(None), ValueError, type(None), ValueError, type(None)]
    assert {found.id for found in await store.sessions()} == {"one", "two", "three", "four"}
    await store.aclose()


async def test_sessions_are_paged_newest_first(place: str) -> None:
    store = open_store(place)
    for i in range(10):
        await store.create_session(session(f"s{i}", created=float(i)))
    await store.close_session("s8", 99.0)
    assert [s.id for s in await store.sessions(limit=3)] == ["s9", "s8", "s7"]
    assert [s.id for s in await store.sessions(limit=3, before=7.0)] == ["s6", "s5", "s4"]
    assert [s.id for s in await store.sessions(limit=2, open_only=True)] == ["s9", "s7"]
    await store.aclose()


async def test_paging_loses_no_session_of_the_same_time(place: str) -> None:
    store = open_store(place)
    for i in range(9):
        await store.create_session(session(f"s{i}", created=float(i // 4)))
    found: list[str] = []
    before = None
    while page := await store.sessions(limit=3, before=before):
        found += [s.id for s in page]
        before = page[-1].created
    assert sorted(found) == [f"s{i}" for i in range(9)]
    await store.aclose()


async def test_a_session_closes_once(place: str) -> None:
    store = open_store(place)
    await store.create_session(session("one"))
    assert await store.close_session("one", 5.0)
    assert not await store.close_session("one", 6.0)
    assert not await store.close_session("none", 6.0)
    found = await store.session_by_key(session("one").key_hash)
    assert found is not None
    assert found.closed == 5.0
    await store.aclose()


async def test_delivery_is_seen_at_once_and_kept(place: str) -> None:
    first, second = agent_session(turns=2, total=400)
    store = open_store(place)
    await store.create_session(session())
    await store.append([first])
    await store.append([second])
    await store.mark_delivered("s", 1)
    for _ in range(2):
        assert [head.delivered for head in await store.heads("s")] == [False, True]
        found = await store.completion("s", 1)
        assert found is not None
        assert found.delivered
        assert [c.delivered async for c in store.completions("s")] == [False, True]
        await store.aclose()
        store = open_store(place)
    await store.aclose()


async def test_a_forgotten_response_stays_captured(place: str) -> None:
    kept = replace(agent_session(turns=1, total=300)[0], stored=True)
    store = open_store(place)
    await store.create_session(session())
    await store.append([kept])
    assert await store.forget_response("s", 0)
    assert not await store.forget_response("s", 0)
    assert not await store.forget_response("s", 7)
    for _ in range(2):
        found = await store.completion("s", 0)
        assert found is not None
        assert not found.stored
        assert found.answer == kept.answer
        await store.aclose()
        store = open_store(place)
    await store.aclose()


async def test_an_append_is_all_or_nothing(place: str) -> None:
    first, second, third = agent_session(turns=3, total=600)
    store = open_store(place)
    await store.create_session(session())
    await store.append([first])
    with pytest.raises(StoreError, match="exists already"):
        await store.append([second, third, first])
    assert [head.number for head in await store.heads("s")] == [0]
    assert await store.completion("s", 1) is None
    await store.append([second, third])
    assert [head.number for head in await store.heads("s")] == [0, 1, 2]
    await store.aclose()


async def test_no_session_no_append(place: str) -> None:
    store = open_store(place)
    with pytest.raises(StoreError, match="session does not"):
        await store.append(agent_session(turns=1, total=300))
    await store.append([])
    await store.aclose()


async def test_what_cannot_be_kept_without_loss_is_refused(place: str) -> None:
    good = agent_session(turns=1, total=300)[0]
    store = open_store(place)
    await store.create_session(session())
    for changes in ({"sampling": {"x": object()}}, {"sampling": {1: 2}}, {"logprobs": good.sampled_ids / 3.0}, {"sampled_ids": [2**40]}):
        with pytest.raises(StoreError, match="without loss"):
            await store.append([replace(good, **changes)])
    await store.append([good])
    await store.aclose()


async def test_concurrent_appends_share_a_commit(place: str) -> None:
    store = open_store(place)
    commits = 0
    inner = store._writer._prepare  # type: ignore[attr-defined]

    def count(connection, works) -> None:
        nonlocal commits
        commits += 1
        inner(connection, works)

    store._writer._prepare = count  # type: ignore[attr-defined]
    chains = [agent_session(turns=3, total=300, name=f"s{i}") for i in range(40)]
    await asyncio.gather(*(store.create_session(session(f"s{i}")) for i in range(40)))
    for turn in range(3):
        await asyncio.gather(*(store.append([chain[turn]]) for chain in chains))
    assert commits <= 3 + 3 * 4
    await store.aclose()


async def test_a_cancelled_caller_does_not_undo_its_write(place: str) -> None:
    store = open_store(place)
    await store.create_session(session())
    append = asyncio.create_task(store.append(agent_session(turns=1, total=300)))
    await asyncio.sleep(0)
    append.cancel()
    with pytest.raises(asyncio.CancelledError):
        await append
    await store.aclose()
    store = open_store(place)
    assert len(await store.heads("s")) == 1
    await store.aclose()


async def test_a_closed_store_refuses(place: str) -> None:
    store = open_store(place)
    await store.create_session(session())
    await store.aclose()
    await store.aclose()
    with pytest.raises(StoreError, match="closed"):
        await store.append(agent_session(turns=1, total=300))


async def test_a_caller_cannot_change_what_the_store_remembers(place: str) -> None:
    given = agent_session(turns=1, total=300)[0]
    store = open_store(place)
    await store.create_session(session())
    await store.append([given])
    given.finish = "changed"
    found = await store.completion("s", 0)
    assert found is not None
    found.finish = "changed"
    again = await store.completion("s", 0)
    assert again is not None
    assert again.finish == "tool_calls"
    await store.aclose()
