"""From a canonical request to its prompt: match, assemble, and count. Knows no engine call and no client.

A count is the length of the very prompt that a generation of the same body would send, restored history included.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from functools import partial

from polar.chat import ChatRequest, Message
from polar.errors import ContextOverflow
from polar.gateway.served import Served
from polar.gateway.sessions import SessionState
from polar.gateway.turnstile import Turnstile
from polar.store.base import Store
from polar.tokens import fingerprint
from polar.tokens.plan import Keys, Known, Plan

LONG_RENDER_CHARS = 16_000
"""Requests whose unmatched part is longer than this, arguments and tools included, are rendered off the event loop."""


async def plan_prompt(
    request: ChatRequest, state: SessionState, served: Served, store: Store, renderer: Executor, turnstile: Turnstile
) -> Plan:
    """What a call of `request` sends to the engine. Changes nothing. Raises `ContextOverflow` where the prompt alone is too long."""
    path = served.path
    request = path.normalise(request, state.record.secret)
    mode = await served.mode_for(request)
    size = sum(map(_size, request.messages))
    await turnstile.step(size)
    keys = _keys(request, state, served, size)
    match = state.history.match(keys, request, secret=state.record.secret)
    parent = None
    if match.parent is not None:
        parent = await store.completion(state.record.id, match.parent)
    afresh = parent is None or match.cause is not None
    size = sum(map(_size, request.messages if afresh else request.messages[match.shared :]))
    if afresh:
        size += sum(len(tool.description or "") + len(fingerprint.canonical_value(tool.parameters)) for tool in request.tools)
    if size > LONG_RENDER_CHARS:
        if served.renders is not None:
            plan = await served.renders.assemble(request, keys, match, parent, mode)
            if plan is not None:
                return plan
        render = partial(path.assemble, request, keys, match, parent, mode=mode)
        return await asyncio.get_running_loop().run_in_executor(renderer, render)
    return path.assemble(request, keys, match, parent, mode=mode)


def _keys(request: ChatRequest, state: SessionState, served: Served, size: int) -> Keys:
    """The request's fingerprints, from where it goes beyond the last request of its conversation. Which that is is a guess by the length
    of its opening: a wrong one costs a comparison, never another result."""
    opening = _size(request.messages[0]) if request.messages else 0
    place = (state.record.id, opening)
    keys = served.path.keys(request, served.known.get(place))
    served.known.put(place, Known(request.messages, keys), 2 * size)
    return keys


def _size(message: Message) -> int:
    """Characters of a message that a renderer writes."""
    return len(message.text) + len(message.reasoning) + sum(len(call.arguments) for call in message.tool_calls)


async def count_prompt(
    request: ChatRequest, state: SessionState, served: Served, store: Store, renderer: Executor, turnstile: Turnstile
) -> int:
    """Prompt tokens of a request, never a generation. A prompt over the context has a count like any other."""
    try:
        plan = await plan_prompt(request, state, served, store, renderer, turnstile)
    except ContextOverflow as error:
        if error.prompt_tokens is None:
            raise
        return error.prompt_tokens
    if plan.prompt_ids is not None:
        return len(plan.prompt_ids)
    return await served.count(plan.request)
