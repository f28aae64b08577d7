"""Where an evaluator works: a fresh sandbox, the agent's own, or one with an image of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace

from polar.chat import JsonObject
from polar.errors import EvaluatorError
from polar.evaluator.base import Evidence
from polar.runtime.base import Runtime


@asynccontextmanager
async def sandbox(evidence: Evidence, *, in_place: bool = False, changes: JsonObject | None = None) -> AsyncIterator[Runtime]:
    """A started sandbox to grade in. `changes` are fields of the task's `RuntimeSpec`. Raises `EvaluatorError` where there is none."""
    if in_place:
        if evidence.agent is None:
            raise EvaluatorError("the agent's sandbox is gone, and the evaluator is to grade in it")
        yield evidence.agent
    elif changes:
        if evidence.other is None:
            raise EvaluatorError("this node cannot make a sandbox that differs from the task's for the evaluator")
        async with evidence.other(changes) as runtime:
            yield runtime
    else:
        async with evidence.fresh() as runtime:
            yield runtime


def pausing(evidence: Evidence, paused: Callable[[], AbstractContextManager[None]]) -> Evidence:
    """The same evidence; `paused` is held while a sandbox of it is being made."""

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Runtime]:
        async with AsyncExitStack() as stack:
            with paused():
                runtime = await stack.enter_async_context(evidence.fresh())
            yield runtime

    @asynccontextmanager
    async def other(changes: JsonObject) -> AsyncIterator[Runtime]:
        assert evidence.other is not None
        async with AsyncExitStack() as stack:
            with paused():
                runtime = await stack.enter_async_context(evidence.other(changes))
            yield runtime

    return replace(evidence, fresh=fresh, other=None if evidence.other is None else other)


def agents_own(evidence: Evidence) -> Evidence:
    """The same evidence, for grading in the agent's sandbox: its fresh one is the agent's (`refresh_runtime: false`)."""

    @asynccontextmanager
    async def fresh() -> AsyncIterator[Runtime]:
        async with sandbox(evidence, in_place=True) as runtime:
            yield runtime

    return replace(evidence, fresh=fresh)
