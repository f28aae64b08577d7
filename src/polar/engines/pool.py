"""Several engines of one model: a session stays with its engine, a dead one is left, load is spread.

Knows nothing of requests. A session is given the engine with the fewest sessions when it is first seen (ties by rendezvous hash),
and keeps it while that lives, for the sake of its prefix cache. An engine that failed is left alone for a time that doubles with
each failure; then it is probed (`Engine.info`) in the background, when a call or a look at health comes by, and taken back when it
answers. A look at health also asks engines that were not heard of for a while. If all are dead the session's own one is tried
nevertheless: the caller finds out at once when it is back. An engine that dies and one that comes back are both logged.

One that comes back may have been started anew, with the weights that it began with. Where engines tell their version, such a one stays out
until it has been given the present weights: what it samples would carry a version that it is not of.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from polar.chat import JsonObject
from polar.engines.base import Engine
from polar.errors import CallError, ConfigError, EngineUnavailable

log = logging.getLogger("polar.engines")

FIRST_BACKOFF_S = 1.0
LAST_BACKOFF_S = 60.0
FRESH_S = 10.0
"""How long an engine that answered is believed to be alive before a look at health asks it again."""
VERSION_S = 10.0
"""How long an engine may take to say its version."""
MAX_SESSIONS = 100_000
"""How many sessions are remembered; the longest unseen is forgotten first, and finds a new engine if it comes back."""


@dataclass(slots=True)
class _Member:
    engine: Engine
    sessions: int = 0
    failures: int = 0
    retry_at: float = 0.0
    heard_at: float = 0.0
    last_error: str | None = None
    policy_version: str | None = None
    probe: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self.failures == 0


class EnginePool:
    """Not thread-safe: one event loop owns it. `clock` is monotonic, in seconds."""

    def __init__(self, engines: Sequence[Engine], *, clock: Callable[[], float] = time.monotonic) -> None:
        if not engines:
            raise ConfigError("a model needs at least one engine URL")
        self._members = [_Member(engine, heard_at=clock()) for engine in engines]
        self._by_session: OrderedDict[str, _Member] = OrderedDict()
        self._clock = clock

    def __len__(self) -> int:
        return len(self._members)

    @property
    def engines(self) -> list[Engine]:
        return [member.engine for member in self._members]

    def pick(self, session: str, avoid: Collection[Engine] = ()) -> Engine:
        """The session's engine; another one for good if its own is dead or in `avoid`. Raises `EngineUnavailable` if all are in `avoid`."""
        if len(self._members) > 1:  # one alone is tried by the call itself
            for member in self._members:
                if not member.alive:
                    self._maybe_probe(member, member.retry_at)
        usable = [member for member in self._members if member.engine not in avoid]
        if not usable:
            raise EngineUnavailable(
                "every engine of this model has failed: " + "; ".join(str(member.last_error) for member in self._members)
            )
        mine = self._by_session.get(session)
        if mine is not None and mine in usable and (mine.alive or not any(member.alive for member in usable)):
            self._by_session.move_to_end(session)
            return mine.engine
        alive = [member for member in usable if member.alive] or usable
        chosen = min(alive, key=lambda member: (member.sessions, _rank(session, member.engine.url)))
        self._assign(session, mine, chosen)
        return chosen.engine

    def _assign(self, session: str, old: _Member | None, new: _Member) -> None:
        if old is not None:
            old.sessions -= 1
        new.sessions += 1
        self._by_session[session] = new
        self._by_session.move_to_end(session)
        if len(self._by_session) > MAX_SESSIONS:
            _, forgotten = self._by_session.popitem(last=False)
            forgotten.sessions -= 1

    def release(self, session: str) -> None:
        """Forgets a session that has ended, so that its engine counts as less loaded."""
        member = self._by_session.pop(session, None)
        if member is not None:
            member.sessions -= 1

    def failed(self, engine: Engine, error: CallError) -> None:
        """Notes that `engine` did not answer as it should; it is left alone for a while."""
        member = self._member(engine)
        if member.alive:
            log.warning("an engine does not answer as it should", extra={"url": engine.url, "why": str(error)})
        member.last_error = str(error)
        backoff = min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2**member.failures)
        member.failures = min(member.failures + 1, 30)
        member.retry_at = self._clock() + backoff

    def succeeded(self, engine: Engine) -> None:
        """Notes an answer: the engine is alive."""
        member = self._member(engine)
        if not member.alive:
            log.warning("an engine is back", extra={"url": engine.url, "failures": member.failures})
        member.failures = 0
        member.heard_at = self._clock()
        member.last_error = None

    async def note_versions(self) -> None:
        """New weights are in place: notes the version that each engine tells. One that cannot be asked has the version that it told
        before: if it was started anew meanwhile, it is still known to have forgotten one."""

        async def note(member: _Member) -> None:
            try:
                async with asyncio.timeout(VERSION_S):
                    member.policy_version = await member.engine.weight_version()
            except (CallError, TimeoutError) as error:
                why = str(error) or f"no answer in {VERSION_S:g} s"
                log.warning("an engine does not say which weights it has", extra={"url": member.engine.url, "why": why})

        await asyncio.gather(*map(note, self._members))

    async def confirm(self, engine: Engine) -> None:
        """To be asked before a call of `engine`. Raises `EngineUnavailable` for one that has failed and was then started anew."""
        member = self._member(engine)
        if not member.alive:
            await self._check_version(member)

    async def check(self, engine: Engine) -> None:
        """Asks it now, whatever was heard of it before. Raises a `CallError` for one that does not answer, or was started anew."""
        await engine.info()
        await self._check_version(self._member(engine))

    async def _check_version(self, member: _Member) -> None:
        """An engine that had a version and now tells none has forgotten it."""
        if member.policy_version is not None and await member.engine.weight_version() is None:
            had = f"the weights of version {member.policy_version}"
            raise EngineUnavailable(f"{member.engine.url} was started anew and has not {had}; the next weight sync mends that")

    def health(self) -> list[JsonObject]:
        """One entry per engine, for `/health`. `policy_version`: the last one that it told."""
        return [
            {
                "url": member.engine.url,
                "alive": member.alive,
                "failures": member.failures,
                "last_error": member.last_error,
                "sessions": member.sessions,
                "policy_version": member.policy_version,
            }
            for member in self._members
        ]

    @property
    def alive(self) -> bool:
        """Whether some engine answered when it was last asked."""
        return any(member.alive for member in self._members)

    def _member(self, engine: Engine) -> _Member:
        return next(member for member in self._members if member.engine is engine)

    def probe(self) -> None:
        """For a look at health: starts to ask every dead engine whose time has come whether it is back, and every other one that has not
        been heard of for `FRESH_S` whether it is still there. Returns at once; needs a running event loop."""
        for member in self._members:
            self._maybe_probe(member, member.heard_at + FRESH_S if member.alive else member.retry_at)

    def _maybe_probe(self, member: _Member, due: float) -> None:
        if self._clock() >= due and (member.probe is None or member.probe.done()):
            member.probe = asyncio.get_running_loop().create_task(self._probe(member.engine))

    async def _probe(self, engine: Engine) -> None:
        try:
            await self.check(engine)
        except CallError as error:
            if not self._member(engine).alive or isinstance(error, EngineUnavailable):  # a busy one is still there
                self.failed(engine, error)
        else:
            self.succeeded(engine)

    async def aclose(self) -> None:
        """Ends probes and closes every engine."""
        probes = [member.probe for member in self._members if member.probe is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for member in self._members:
            await member.engine.aclose()


def _rank(session: str, url: str) -> bytes:
    return hashlib.blake2b(f"{session}\0{url}".encode(), digest_size=8).digest()
