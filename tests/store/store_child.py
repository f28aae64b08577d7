"""Processes of their own for the durability tests: each line on stdout is what has just happened, written at once.

load PATH ROUND [TURNS]     four sessions append at once until they are killed, or TURNS times: `ack SESSION NUMBER`
steps PATH COUNT            one append after the other: `begin NUMBER`, `ack NUMBER`
sick PATH FLAG              appends until one fails with FLAG in place, removes it, and waits for recovery
full PATH BYTES             the same against a limit on the size of any file, lifted afterwards
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from store_samples import agent_session, session

from polar.errors import StoreError
from polar.records import Completion
from polar.store import Store, open_store

SESSIONS = 4


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def endless(name: str) -> Iterator[Completion]:
    """The same completions for the same name: chains of 40 turns, one after the other."""
    start = 0
    while True:
        for completion in agent_session(turns=40, total=4_000, name=name, seed=sum(name.encode()) + start):
            yield replace(
                completion,
                number=completion.number + start,
                parent=None if completion.parent is None else completion.parent + start,
            )
        start += 40


async def load(path: str, round_: str, turns: int | None) -> None:
    store = open_store(path)

    async def one(name: str) -> None:
        await store.create_session(session(name))
        for completion in endless(name):
            if completion.number == turns:
                return
            await store.append([completion])
            say("ack", name, completion.number)

    await asyncio.gather(*(one(f"{round_}-{i}") for i in range(SESSIONS)))
    await store.aclose()


async def steps(path: str, count: int) -> None:
    store = open_store(path)
    await store.create_session(session("steps"))
    for completion in endless("steps"):
        if completion.number == count:
            break
        say("begin", completion.number)
        await store.append([completion])
        say("ack", completion.number)
    await store.aclose()


def put(flag: str) -> None:
    Path(flag).touch()


def take_away(flag: str) -> None:
    Path(flag).unlink()


async def recovery(store: Store) -> None:
    """Waits, and does nothing else, until the store is well again; ten seconds at most."""
    for _ in range(100):
        if store.healthy is None:
            return
        await asyncio.sleep(0.1)


async def until_it_fails(store: Store, name: str, cure: Callable[[], None]) -> None:
    await store.create_session(session(name))
    failed = False
    for completion in endless(name):
        try:
            await store.append([completion])
        except StoreError as error:
            assert not failed, "it failed again after its recovery"
            failed = True
            say("failed", completion.number, error)
            say("healthy", store.healthy)
            cure()
            await recovery(store)
            say("healthy", store.healthy)
            await store.append([completion])
            say("ack", completion.number)
            break
        say("ack", completion.number)
    await store.aclose()


async def sick(path: str, flag: str) -> None:
    store = open_store(path)
    await store.create_session(session("before"))
    put(flag)
    try:
        await store.create_session(session("unsynced"))
    except StoreError as error:
        say("failed", error)
    say("healthy", store.healthy)
    take_away(flag)
    await recovery(store)
    await until_count(store, "sick", 5)
    await store.aclose()


async def until_count(store: Store, name: str, count: int) -> None:
    await store.create_session(session(name))
    for completion in endless(name):
        if completion.number == count:
            return
        await store.append([completion])
        say("ack", completion.number)


async def full(path: str, limit: int) -> None:
    store = open_store(path)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    await until_it_fails(store, "full", lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard)))


async def crowded(path: str, ballast: str) -> None:
    """On a file system of its own, filled up by a file that is then removed."""
    store = open_store(path)
    await until_it_fails(store, "crowded", lambda: take_away(ballast))


def main(mode: str, path: str, *rest: str) -> None:
    if mode == "load":
        asyncio.run(load(path, rest[0], int(rest[1]) if len(rest) > 1 else None))
    elif mode == "steps":
        asyncio.run(steps(path, int(rest[0])))
    elif mode == "sick":
        asyncio.run(sick(path, rest[0]))
    elif mode == "full":
        asyncio.run(full(path, int(rest[0])))
    else:
        asyncio.run(crowded(path, rest[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
