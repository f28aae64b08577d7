"""Sessions in memory: which key is whose, what a session has used up, and its history. Knows no HTTP and no engine.

The store is the truth; this is its cache. A session's state is built from the store's heads when its first request comes, and
dropped again when it has been idle and others need the room.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pydantic import ValidationError

from polar.chat import JsonObject
from polar.errors import (
    BudgetExceeded,
    CallError,
    ContextOverflow,
    EngineError,
    EngineRejected,
    InvalidRequest,
    SessionClosed,
    StoreError,
    Unauthenticated,
)
from polar.gateway.config import Budgets, GatewayConfig, problems
from polar.gateway.sampling import forced
from polar.records import Completion, Head, Session, SessionKind
from polar.store.base import Store
from polar.tokens.history import History

if TYPE_CHECKING:
    from polar.gateway.calls import Call

KEY_PREFIX = "sk-polar-"
IDLE_STATES = 20_000


def hash_key(key: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a call was refused: `boundary` is `engine`, `store`, `context_overflow`, `budget`, or the error's own kind."""

    boundary: str
    code: str | None
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Refusal:
        if not isinstance(error, CallError):
            return cls("internal", None, f"{type(error).__name__} inside the gateway")
        boundary: str = error.kind
        if isinstance(error, EngineError) and not isinstance(error, EngineRejected):  # a 4xx is the request's fault
            boundary = "engine"
        elif isinstance(error, StoreError):
            boundary = "store"
        elif isinstance(error, ContextOverflow):
            boundary = "context_overflow"
        return cls(boundary, error.code, error.message)


@dataclass(slots=True)
class Refusals:
    """A session's refused calls since it was loaded: the gateway's evidence of what ended a harness (law 5). A client that left, and the
    session's own end, refuse nothing."""

    counts: dict[str, int] = field(default_factory=dict)
    """By boundary."""
    last: Refusal | None = None
    """Of the call that ended last; `None` where it was answered."""

    def add(self, error: BaseException) -> None:
        if isinstance(error, SessionClosed):
            return
        self.last = Refusal.of(error)
        self.counts[self.last.boundary] = self.counts.get(self.last.boundary, 0) + 1


class SessionState:
    """One open session: its record, its history, its counters and the calls in flight. `first_call` is when its first one began (Unix
    seconds), if it has made any."""

    def __init__(self, record: Session, heads: list[Head], budgets: Budgets, first_call: float | None = None) -> None:
        self.record = record
        self.history = History(heads)
        self.budgets = budgets
        self.next_number = max((head.number for head in heads), default=-1) + 1
        self.turns = sum(1 for head in heads if head.choice == 0)
        self.tokens = sum(head.sampled for head in heads)
        self.first_call = first_call
        self.calls: dict[bytes, list[Call]] = {}
        self.refusals = Refusals()
        self.closed = False

    def take_numbers(self, count: int) -> int:
        """Reserves `count` completion numbers and returns the first."""
        first = self.next_number
        self.next_number += count
        return first

    def check_open(self) -> None:
        """Raises `SessionClosed`. To be asked again after each wait: a session may end while a request's body is still coming."""
        if self.closed or self.record.closed is not None:
            raise SessionClosed("this session is closed; nothing was recorded")

    def check_budget(self, now: float) -> None:
        """Raises `BudgetExceeded`, naming the stop, if the next call may not be made. Calls in flight are turns already."""
        try:
            self._check_budget(now)
        except BudgetExceeded as error:
            self.refusals.add(error)
            raise

    def _check_budget(self, now: float) -> None:
        budgets = self.budgets
        running = sum(not (call.finished or call.counted) for calls in self.calls.values() for call in calls)
        if budgets.max_turns is not None and self.turns + running >= budgets.max_turns:
            raise BudgetExceeded(f"this session may make {budgets.max_turns} model calls and has made them (max_turns)", code="max_turns")
        if budgets.max_tokens is not None and self.tokens >= budgets.max_tokens:
            raise BudgetExceeded(
                f"this session may sample {budgets.max_tokens} tokens and has sampled {self.tokens} (max_tokens)", code="max_tokens"
            )
        if self.first_call is None:
            self.first_call = now
        elif budgets.max_seconds is not None and now - self.first_call > budgets.max_seconds:
            raise BudgetExceeded(f"this session's {budgets.max_seconds:g} seconds are over (max_seconds)", code="max_seconds")

    @property
    def tokens_left(self) -> int | None:
        """What the budget lets the next call sample; `None` without one. At least one: whether a call may be made is `check_budget`'s."""
        return None if self.budgets.max_tokens is None else max(1, self.budgets.max_tokens - self.tokens)

    def recorded(self, completion: Completion) -> None:
        """Takes a durable completion into the history and the counters."""
        sampled = 0 if completion.sampled_ids is None else len(completion.sampled_ids)
        self.history.add(head_of(completion, sampled))
        self.turns += completion.choice == 0
        self.tokens += sampled

    @property
    def busy(self) -> bool:
        return bool(self.calls)


def head_of(completion: Completion, sampled: int) -> Head:
    return Head(
        number=completion.number,
        root=completion.root,
        turn=completion.turn,
        loose=completion.loose,
        thinking_hash=completion.thinking_hash,
        parent=completion.parent,
        status=completion.status,
        delivered=completion.delivered,
        choice=completion.choice,
        sampled=sampled,
    )


class Sessions:
    """All sessions of this process, by key."""

    def __init__(self, store: Store, config: GatewayConfig, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._config = config
        self._clock = clock
        self._states: OrderedDict[bytes, SessionState] = OrderedDict()
        self._loading: dict[bytes, asyncio.Task[SessionState]] = {}
        self._ending: set[bytes] = set()

    async def create(
        self,
        *,
        kind: SessionKind = "train",
        settings: JsonObject | None = None,
        metadata: JsonObject | None = None,
        session_id: str | None = None,
    ) -> tuple[Session, str]:
        """A new session and its key, which is shown this once and stored only hashed."""
        settings = dict(settings or {})
        _budgets(settings, self._config.budgets)
        forced(settings, self._config.train_sampling)
        if settings.get("stream", "replay") not in ("replay", "live"):
            raise InvalidRequest("settings.stream must be 'replay' or 'live'", param="settings.stream")
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        record = Session(
            id=session_id or "ses_" + secrets.token_hex(12),
            key_hash=hash_key(key),
            secret=secrets.token_bytes(32),
            kind=kind,
            created=self._clock(),
            settings=settings,
            metadata=dict(metadata or {}),
        )
        await self._store.create_session(record)
        return record, key

    async def get(self, key: str | None) -> SessionState:
        """The session that this key opens. Raises `Unauthenticated` or `SessionClosed`; nothing is ever guessed (law 6)."""
        if not key:
            raise Unauthenticated("no session key: put it in the base URL (/s/KEY/...) or give it as the API key")
        hashed = hash_key(key)
        state = self._states.get(hashed)
        if state is None:
            if hashed in self._ending:
                raise SessionClosed("this session is closed; nothing was recorded")
            state = await self._load(hashed)
            state.check_open()
            state = self._states.setdefault(hashed, state)  # another load may have dropped it before this one was woken
        else:
            self._states.move_to_end(hashed)
        state.check_open()
        return state

    async def close(self, session_id: str) -> bool:
        """Ends a session: its key stops working and its calls in flight are cancelled. False if it is not open."""
        record = await self._store.session(session_id)
        if record is None or record.closed is not None:
            return False
        self._ending.add(record.key_hash)
        try:
            return await self._close(record)
        finally:
            self._ending.discard(record.key_hash)

    async def _close(self, record: Session) -> bool:
        loading = self._loading.get(record.key_hash)
        if loading is not None:  # it read the record while that was open: what it makes must hear of the end
            await asyncio.wait([loading])
        now = self._clock()
        state = self._states.get(record.key_hash)
        if state is not None:
            state.closed = True
            running = [call for calls in state.calls.values() for call in calls if not call.finished]
            for call in running:
                call.cancel(SessionClosed("this session was closed while the call was running"))
            await asyncio.gather(*(call.settled() for call in running))
        closed = await self._store.close_session(record.id, now)
        if state is not None:
            state.record.closed = now
            self._states.pop(record.key_hash, None)
        return closed

    def cancel_all(self, why: CallError) -> None:
        """Cancels every call in flight; what was sampled is recorded as aborted."""
        for call in self._running():
            call.cancel(why)

    async def settled(self) -> None:
        """Waits until no call's task is running."""
        await asyncio.gather(*(call.settled() for call in self._running()))

    def _running(self) -> list[Call]:
        return [call for state in self._states.values() for calls in state.calls.values() for call in calls if not call.finished]

    @property
    def loaded(self) -> int:
        return len(self._states)

    def loaded_state(self, key: str) -> SessionState | None:
        """The state of the session that this key opens, if it has made a call and was not dropped from memory since."""
        return self._states.get(hash_key(key))

    async def _load(self, hashed: bytes) -> SessionState:
        """One load for all who ask at once: two states of one session would give out the same numbers."""
        task = self._loading.get(hashed)
        if task is None:
            task = self._loading[hashed] = asyncio.create_task(self._read(hashed))
            task.add_done_callback(lambda done: self._loaded(hashed, done))
        return await asyncio.shield(task)

    def _loaded(self, hashed: bytes, task: asyncio.Task[SessionState]) -> None:
        del self._loading[hashed]
        if not task.cancelled():
            task.exception()  # whoever still waits gets it; nobody needs to

    async def _read(self, hashed: bytes) -> SessionState:
        record = await self._store.session_by_key(hashed)
        if record is None:
            raise Unauthenticated("unknown session key: it was mistyped, or issued by another gateway's store")
        if record.closed is not None:
            raise SessionClosed("this session is closed; nothing was recorded")
        heads = await self._store.heads(record.id)
        first = await self._store.completion(record.id, heads[0].number) if heads else None
        budgets = _budgets(record.settings, self._config.budgets)
        state = SessionState(record, heads, budgets, None if first is None else first.started)
        state = self._states.setdefault(hashed, state)  # one that was dropped may be back, for a request that had it already
        self._evict(hashed)
        return state

    def _evict(self, loaded: bytes) -> None:
        """Drops the longest idle states over the cap; one with a call in flight stays, and the one that was just loaded for a call."""
        if len(self._states) <= IDLE_STATES:
            return
        for hashed, state in list(self._states.items()):
            if not state.busy and hashed != loaded:
                del self._states[hashed]
                if len(self._states) <= IDLE_STATES:
                    return


def _budgets(settings: JsonObject, default: Budgets) -> Budgets:
    wanted = settings.get("budgets")
    if wanted is None:
        return default
    if not isinstance(wanted, dict):
        raise InvalidRequest("budgets must be an object with max_turns, max_tokens, max_seconds", param="settings.budgets")
    try:
        return Budgets.model_validate({**default.model_dump(), **wanted})
    except ValidationError as error:
        raise InvalidRequest(f"settings.budgets: {problems(error)}", param="settings.budgets") from error
