"""Waiting for inference servers that are still loading their model: minutes, for a large one. Knows no gateway that runs.

What cannot get better by waiting (a URL without a server of that kind, a wrong key) is not waited for, and nothing is raised: the check at
the gateway's start says what is wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

from polar.engines.base import Engine
from polar.errors import EngineBusy, EngineError, EngineOverloaded, EngineTimeout, EngineUnavailable
from polar.gateway.config import EngineConfig
from polar.gateway.served import Served

T = TypeVar("T")

LOOK_S = 1.0
"""Between two looks at a server."""
ANSWER_S = 10.0
"""For one look: a server that loads may take a connection and say nothing."""
AGAIN_S = 30.0
"""Between two lines that say that it is still waited for."""

_LOADING = (EngineUnavailable, EngineOverloaded, EngineBusy, EngineTimeout)


async def engines_up(engines: Mapping[str, EngineConfig], wait_s: float, progress: Callable[[str], object]) -> None:
    """Until a server of each model answers, or it is plain that none will, for `wait_s` at most (0: not at all). `progress` is told at once
    of each that does not answer, and why. Raises `ConfigError` for settings that make no engine."""
    if wait_s > 0:
        await asyncio.gather(*(_up(name, config, wait_s, progress) for name, config in engines.items()))


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Whether the work was done before `stop` was set; it is cancelled then. Raises what it raises."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            return False
        working.result()
        return True
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def entered(stack: AsyncExitStack, context: AbstractAsyncContextManager[T], stop: asyncio.Event) -> T | None:
    """What `context` gives, entered on `stack`; `None` where `stop` is set before that: what had begun of it has ended then. Raises what
    entering raises. An engine that takes a call and never answers would be waited for half an hour otherwise."""
    found: list[T] = []

    async def enter() -> None:
        found.append(await stack.enter_async_context(context))

    return found[0] if await unless(stop, enter()) else None


async def _up(name: str, config: EngineConfig, wait_s: float, progress: Callable[[str], object]) -> None:
    served = Served(name, config)
    began = time.monotonic()
    told_s = -AGAIN_S
    try:
        while True:
            problem = await _problem(served.pool.engines)
            waited_s = time.monotonic() - began
            if problem is None or waited_s >= wait_s:
                if problem is None and told_s >= 0:
                    progress(f"engine {name} answers")
                return
            if waited_s - told_s >= AGAIN_S:
                told_s = waited_s
                progress(f"engine {name}: {problem}; waiting for it, {wait_s - waited_s:.0f} s at most (--engine-wait)")
            await asyncio.sleep(min(LOOK_S, wait_s - waited_s))
    finally:
        await served.aclose()


async def _problem(engines: list[Engine]) -> str | None:
    """Why none of these servers answers yet; `None` where one does, or where waiting will not help."""
    words = []
    for engine in engines:
        try:
            async with asyncio.timeout(ANSWER_S):
                await engine.info()
            return None
        except (*_LOADING, TimeoutError) as error:
            said = str(error) or "no answer"
            words.append(said if engine.url in said else f"{engine.url}: {said}")
        except EngineError:  # it is up, and not what was expected
            return None
    return "; ".join(words)
