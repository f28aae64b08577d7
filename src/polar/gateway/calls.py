"""One model call, from a canonical request to durable completions. Knows no dialect's bytes and no sockets.

A call is a task of its own that its client only watches: a client that leaves starts a grace period, in which a byte-equal
request of the same session adopts the call; after it the generation is cancelled. Two live clients never share a call.

The order is fixed: match, assemble, generate, read, append (synced), and only then the `FinishDelta` (law 4).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import numpy as np

from polar.chat import Answer, ChatDelta, Message, deltas
from polar.engines.arrays import settle
from polar.engines.base import Chunk, Engine, Generation
from polar.errors import CallError, ContextOverflow, EngineOverloaded, EngineUnavailable
from polar.gateway.asking import messages_request, tokens_request
from polar.gateway.config import GatewayConfig
from polar.gateway.gate import Gate
from polar.gateway.metrics import Metrics
from polar.gateway.planning import plan_prompt
from polar.gateway.recorded import Incoming, completion_of
from polar.gateway.sampling import Sampled, settle_sampling
from polar.gateway.served import Served
from polar.gateway.sessions import SessionState
from polar.gateway.turnstile import Turnstile
from polar.records import Completion
from polar.store.base import Store
from polar.tokens import pointers
from polar.tokens.live import LiveReader
from polar.tokens.plan import Plan, Reading

log = logging.getLogger("polar.gateway")


@dataclass(slots=True)
class Context:
    """What every call of this gateway shares."""

    config: GatewayConfig
    store: Store
    gate: Gate
    metrics: Metrics
    renderer: Executor
    """One thread: several would fight the event loop for the interpreter lock, and renders are CPU only."""
    turnstile: Turnstile = field(default_factory=Turnstile)
    clock: Callable[[], float] = time.time


def _end(generation: Generation, last: Chunk, tokens: int) -> None:
    """What a stream's last chunk says of the whole."""
    generation.finish = "abort" if last.finish is None else last.finish
    generation.stop = last.stop
    generation.prompt_tokens = last.prompt_tokens or generation.prompt_tokens
    generation.cached_tokens = last.cached_tokens or 0
    generation.policy_version = last.policy_version
    generation.completion_tokens = tokens if last.completion_tokens is None else last.completion_tokens


def _nobody() -> None:
    """The bell of a call without a client."""


class Call:
    """A running or finished call. `attach` a bell, then look: `more` gives its deltas as they come, `answers` its result."""

    def __init__(self, context: Context, state: SessionState, served: Served, incoming: Incoming) -> None:
        self._context = context
        self._state = state
        self._served = served
        self.incoming = incoming
        self.number = state.take_numbers(incoming.request.n)
        self.ref = pointers.mint(state.record.secret, self.number)
        self.started = context.clock()
        self.prompt_tokens = 0
        self.clients = 1
        self.finished = False
        self.counted = False
        """Whether it is among its session's turns already."""
        self.recorded: list[int] = []
        """The numbers of its durable completions, one per choice."""
        self._settling = False
        """Whether it is complete, or being cancelled: from here on it ends by itself, and must not be cut in what it records."""
        self._deltas: list[ChatDelta] = []
        self._ring: Callable[[], object] = _nobody
        self._grace: asyncio.TimerHandle | None = None
        self._cancelled: CallError = CallError("the client left")
        state.calls.setdefault(incoming.digest, []).append(self)
        self._task = asyncio.create_task(self._run(), name=f"call {state.record.id}/{self.number}")
        self._task.add_done_callback(self._done)

    # --- its clients -------------------------------------------------------------------------------------------

    def done(self) -> bool:
        """Whether it has ended: with `answers`, or a `failure`."""
        return self._task.done()

    def failure(self) -> BaseException | None:
        """What ended a call that is done, if it did not end well; a cancellation as the error that a client can be told."""
        return self._cancelled if self._task.cancelled() else self._task.exception()

    def answers(self) -> list[Answer]:
        """The durable answers of a call that is done, one per choice. Raises its `failure`."""
        failure = self.failure()
        if failure is not None:
            raise failure
        return self._task.result()

    def more(self, seen: int) -> list[ChatDelta]:
        """All deltas after the first `seen` that have come."""
        return self._deltas[seen:]

    def attach(self, ring: Callable[[], object]) -> None:
        """`ring`, which must not raise, is called at the end, and whenever deltas have come, in that very turn of the event loop."""
        self._ring = ring

    def adopt(self) -> bool:
        """Takes over a call whose client has left; False if it has one, or is past its grace."""
        if self.clients or self._grace is None:
            return False
        self._grace.cancel()
        self._grace = None
        self.clients = 1
        self._context.metrics.adopted.inc()
        return True

    def leave(self, *, delivered: bool) -> None:
        """The client is gone, with the whole answer or without."""
        self.clients = 0
        self._ring = _nobody
        if delivered:
            self._forget()
            return
        self._grace = asyncio.get_running_loop().call_later(self._context.config.grace_s, self._expire)

    def cancel(self, why: CallError) -> None:
        """Ends the generation; what was sampled is recorded as aborted. A client that still waits gets `why`. A generation that is
        complete is recorded as such, whoever has left."""
        if self._settling:
            return
        self._settling = True
        self._cancelled = why
        self._task.cancel()

    @property
    def context(self) -> int | None:
        """The model's length in tokens, prompt and answer."""
        return self._served.context

    async def settled(self) -> None:
        """Waits for the end of the call, whatever it is."""
        await asyncio.wait([self._task])

    def _expire(self) -> None:
        self._grace = None
        if self._task.done():
            self._forget()
        else:  # its session's until it has ended: whoever ends that waits for what is still recorded
            self.cancel(CallError("the client left"))

    def _forget(self) -> None:
        calls = self._state.calls.get(self.incoming.digest)
        if calls and self in calls:
            calls.remove(self)
            if not calls:
                del self._state.calls[self.incoming.digest]

    def _done(self, task: asyncio.Task[list[Answer]]) -> None:
        self.finished = True
        self._ring()
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._state.refusals.add(error)
        elif not task.cancelled():
            self._state.refusals.last = None
        if task.cancelled() or error is not None or not (self.clients or self._grace):
            self._forget()

    # --- the way through ---------------------------------------------------------------------------------------

    async def _run(self) -> list[Answer]:
        state, served, request = self._state, self._served, self.incoming.request
        plan = await plan_prompt(request, state, served, self._context.store, self._context.renderer, self._context.turnstile)
        sampled = settle_sampling(plan, request, state.record, self._context.config, served.context, state.tokens_left)
        if plan.prompt_ids is not None:
            self.prompt_tokens = len(plan.prompt_ids)
        generations, reader, version = await self._context.gate.through(lambda: self._sample(plan, sampled))
        self._settling = True
        readings = await self._record(plan, sampled, generations, version)
        for choice, reading in enumerate(readings):
            self._deltas.extend(deltas(reading.answer, choice) if reader is None else reader.finish(reading))
        return [reading.answer for reading in readings]

    async def _sample(self, plan: Plan, sampled: Sampled) -> tuple[list[Generation], LiveReader | None, str | None]:
        """What the engine gave, the reader that the client has seen it through where it is live, and the policy version as it was when the
        generation began."""
        version = self._context.gate.policy_version
        began = time.perf_counter()
        reader: LiveReader | None = None
        request = self.incoming.request
        if self.incoming.live and plan.mode == "tokens" and request.n == 1 and not request.top_logprobs:
            reader = self._served.path.live(plan)
            generations = [await self._stream(plan, sampled, reader, version)]
        else:
            generations = await self._generate(plan, sampled, version)
        self._context.metrics.engine_seconds.observe(time.perf_counter() - began)
        return generations, reader, version

    async def _generate(self, plan: Plan, sampled: Sampled, version: str | None) -> list[Generation]:
        """One unstreamed generation, on another engine if the session's own one is dead or says 503. A cancelled one has returned no ids;
        one that was interrupted for new weights begins again, and is this call's only generation."""
        tried: list[Engine] = []
        while True:
            engine = self._served.pool.pick(self._state.record.id, avoid=tried)
            sampled.engine = engine.url
            try:
                await self._served.pool.confirm(engine)
                generations = await self._ask(engine, plan, sampled)
            except (EngineUnavailable, EngineOverloaded) as error:
                if not self._leave(engine, error, tried):
                    raise
                continue
            except asyncio.CancelledError as error:
                if not self._context.gate.interrupting():
                    await self._record_aborted(plan, sampled, Generation(None, None, None, "abort"), error, version)
                raise
            self._served.pool.succeeded(engine)
            self._check_answered(engine, generations, plan)
            if any(generation.finish == "abort" for generation in generations):
                cut = EngineUnavailable("the engine aborted the generation before its end")
                for choice, generation in enumerate(generations):
                    await self._record_aborted(plan, sampled, generation, cut, version, choice)
                raise cut
            return generations

    def _leave(self, engine: Engine, error: EngineUnavailable | EngineOverloaded, tried: list[Engine]) -> bool:
        """Whether another engine is to be tried in place of one that did not serve this call. One that is alone and says 503 is there."""
        pool = self._served.pool
        if len(pool) > 1 or isinstance(error, EngineUnavailable):
            pool.failed(engine, error)
        tried.append(engine)
        return len(tried) < len(pool)

    def _check_answered(self, engine: Engine, generations: list[Generation], plan: Plan) -> None:
        """Raises `EngineUnavailable` for an answer that can be neither recorded nor shown: more choices than have numbers, or text that
        is nowhere, since mode `tokens` reads it from the ids."""
        wanted = self.incoming.request.n
        if len(generations) > wanted:
            raise EngineUnavailable(f"{engine.url} gave {len(generations)} choices where {wanted} were asked for")
        if plan.mode == "tokens" and any(generation.token_ids is None for generation in generations):
            raise EngineUnavailable(f"{engine.url} returned no ids of what it sampled; without them there is no answer in mode tokens")

    async def _ask(self, engine: Engine, plan: Plan, sampled: Sampled) -> list[Generation]:
        if plan.mode == "tokens":
            return await engine.generate(tokens_request(plan, sampled.sampling, self._served, self._state.record.id))
        try:
            return await self._chat(engine, plan, sampled)
        except ContextOverflow as error:
            room = error.limit - error.prompt_tokens if error.limit and error.prompt_tokens else 0
            asked = sampled.sampling.max_tokens
            at_least = "at least" in str(error)  # vLLM counts no further than it must: it alone knows the room that is left
            if asked is None or room < 1 or (room >= asked and not at_least):
                raise
            sampled.sampling = replace(sampled.sampling, max_tokens=None if at_least else room)
            sampled.tags.add("clamped")
            return await self._chat(engine, plan, sampled)

    async def _chat(self, engine: Engine, plan: Plan, sampled: Sampled) -> list[Generation]:
        generations = await engine.chat(messages_request(plan, sampled.sampling, self._served, self._state.record.id))
        if generations and generations[0].max_tokens is not None:
            sampled.sampling = replace(sampled.sampling, max_tokens=generations[0].max_tokens)
            sampled.tags.add("clamped")
        return generations

    async def _stream(self, plan: Plan, sampled: Sampled, reader: LiveReader, version: str | None) -> Generation:
        """A live generation, on another engine if the session's own one is dead, or says 503, before its first token."""
        tried: list[Engine] = []
        ids: list[int] = []
        while True:
            engine = self._served.pool.pick(self._state.record.id, avoid=tried)
            sampled.engine = engine.url
            try:
                await self._served.pool.confirm(engine)
                return await self._stream_from(engine, plan, sampled, reader, ids, version)
            except (EngineUnavailable, EngineOverloaded) as error:
                answering = bool(ids) and isinstance(error, EngineOverloaded)  # interrupted for new weights, say
                if answering or not self._leave(engine, error, tried) or ids:
                    raise

    async def _stream_from(
        self, engine: Engine, plan: Plan, sampled: Sampled, reader: LiveReader, ids: list[int], version: str | None
    ) -> Generation:
        """Deltas go to the watchers as `ids` grow. Whatever ends it early, the ids that came are kept as aborted."""
        logprobs: list[float] = []
        generation = Generation(plan.prompt_ids, None, None, "abort", prompt_tokens=self.prompt_tokens)

        def take(chunks: Sequence[Chunk]) -> None:
            """In the engine's own turn of the event loop: what is certain is with the client before that is over."""
            known = len(ids)
            for chunk in chunks:
                ids.extend(chunk.token_ids)
                logprobs.extend(chunk.logprobs)
                if chunk.finish is not None:
                    _end(generation, chunk, len(ids))
            fresh = reader.feed(ids[known:])
            if fresh:
                self._deltas.extend(fresh)
                self._ring()

        try:
            await engine.stream_into(tokens_request(plan, sampled.sampling, self._served, self._state.record.id), take)
            self._served.pool.succeeded(engine)
        except (asyncio.CancelledError, Exception) as error:
            generation.finish = "abort"
            self._fill(generation, ids, logprobs)
            interrupted = isinstance(error, asyncio.CancelledError) and self._context.gate.interrupting()
            if interrupted and ids:  # the client has seen some of it: it cannot begin anew
                error = EngineOverloaded("the model's weights were changed in the middle of this answer; try again", retry_after="1")
            if ids or (isinstance(error, asyncio.CancelledError) and not interrupted):
                await self._record_aborted(plan, sampled, generation, error, version)
            raise error
        self._fill(generation, ids, logprobs)
        settle([generation], generation.completion_tokens, sent=plan.prompt_ids)
        if generation.finish == "abort":
            cut = EngineUnavailable("the engine's stream ended before its last event")
            if ids:
                await self._record_aborted(plan, sampled, generation, cut, version)
            raise cut
        return generation

    @staticmethod
    def _fill(generation: Generation, ids: list[int], logprobs: list[float]) -> None:
        generation.token_ids = np.asarray(ids, np.int32)
        generation.logprobs = np.asarray(logprobs, np.float32) if len(logprobs) == len(ids) else None

    # --- recording ---------------------------------------------------------------------------------------------

    async def _record(self, plan: Plan, sampled: Sampled, generations: list[Generation], version: str | None) -> list[Reading]:
        state, served = self._state, self._served
        path = served.path
        readings: list[Reading] = []
        completions: list[Completion] = []
        try:
            for choice, generation in enumerate(generations):
                if plan.mode == "messages" and choice == 0:
                    parent = None if plan.parent is None else await self._context.store.completion(state.record.id, plan.parent)
                    plan.broken = path.settle(plan, generation, parent)
                    self.prompt_tokens = generation.prompt_tokens or self.prompt_tokens
                ref = self.ref if choice == 0 else pointers.mint(state.record.secret, self.number + choice)
                reading = path.read(plan, generation, ref)
                readings.append(reading)
                completions.append(self._completion(plan, sampled, generation, reading, choice, version))
        except Exception as error:
            # sampled tokens are never lost (law 3), not even to a fault of a parser
            for choice, generation in enumerate(generations):
                await self._record_aborted(plan, sampled, generation, error, version, choice)
            raise
        await self._commit(completions)
        self.recorded = [completion.number for completion in completions]
        return readings

    async def _commit(self, completions: list[Completion]) -> None:
        began = time.perf_counter()
        await self._context.store.append(completions)
        self._context.metrics.commit_seconds.observe(time.perf_counter() - began)
        self.counted = True
        for completion in completions:
            self._state.recorded(completion)
            self._context.metrics.recorded(completion)

    async def _record_aborted(
        self, plan: Plan, sampled: Sampled, generation: Generation, error: BaseException, version: str | None, choice: int = 0
    ) -> None:
        """Keeps what an unfinished generation had sampled; its tokens go to the ledger, never to a row."""
        why = str(self._cancelled if isinstance(error, asyncio.CancelledError) else error)
        reading = Reading(Answer(Message("assistant"), "stop"), Message("assistant"), turn=b"", loose=b"", tags=frozenset())
        if generation.token_ids is not None and len(generation.token_ids) and isinstance(error, asyncio.CancelledError | CallError):
            # what the client has seen of it may come back in a history: then the cause is a retry
            reading = self._served.path.read(plan, generation, pointers.mint(self._state.record.secret, self.number + choice))
        completion = self._completion(plan, sampled, generation, reading, choice, version)
        completion.status = "aborted"
        completion.tags |= {"aborted"}
        completion.untrainable = f"aborted: {why}"
        try:
            await asyncio.shield(self._commit([completion]))
        except CallError as failure:
            log.warning("an aborted completion could not be kept", extra={"why": str(failure)})

    def _completion(
        self, plan: Plan, sampled: Sampled, generation: Generation, reading: Reading, choice: int, version: str | None
    ) -> Completion:
        return completion_of(
            plan,
            sampled,
            generation,
            reading,
            incoming=self.incoming,
            served=self._served,
            session=self._state.record.id,
            number=self.number + choice,
            choice=choice,
            version=version,
            started=self.started,
            ended=self._context.clock(),
        )
