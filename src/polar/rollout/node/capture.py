"""An attempt's session at the gateway: opened before the agent starts, watched while it runs, closed when it has ended.

Everything that the outcome needs to know of the model calls is asked here. Knows no sandbox and no stage.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from polar.chat import JsonObject
from polar.errors import CallError, ConfigError, PolarError, StoreError
from polar.gateway.gateway import Gateway
from polar.gateway.served import Served
from polar.gateway.sessions import Refusal, SessionState
from polar.records import Completion, Session
from polar.rollout.models import SessionDispatchRequest

ENGINE_ANSWERS_S = 10.0
"""How long an engine may take to say that it lives, when it is asked at the end of a failed run."""


@dataclass(slots=True)
class Capture:
    """One capture session, named as the attempt is. The key lives here and in the sandbox only."""

    gateway: Gateway
    session: Session
    key: str
    served: Served
    closed: bool = False
    refusal: Refusal | None = None
    """Set by `close`: why the last call was refused."""
    refused: dict[str, int] = field(default_factory=dict)
    """Set by `close`: refused calls by boundary."""
    _last: SessionState | None = None
    """The state that the session ended with."""

    @classmethod
    async def open(cls, gateway: Gateway, request: SessionDispatchRequest, harness: str) -> Capture:
        """Raises `ConfigError` for settings that the gateway refuses, `StoreError` where the session cannot be kept or its name was had."""
        served = gateway.models.find(request.agent.model_name or "")
        budgets = {
            name: value
            for name, value in (("max_turns", request.budget.max_turns), ("max_tokens", request.budget.max_tokens))
            if value is not None
        }
        settings: JsonObject = {}
        if budgets:
            settings["budgets"] = budgets
        if request.sampling:
            settings["sampling"] = request.sampling
        metadata = {
            "group_id": request.task_id,
            "rollout_id": request.session_id,
            **request.metadata,
            "task_id": request.task_id,
            "session_id": request.session_id,
            "attempt": request.attempt,
            "sample": request.sample,
            "harness": harness,
        }
        if request.sample and "rollout_id" in request.metadata:  # the task's, for all samples: as one rollout they would count once
            metadata["rollout_id"] = f"{request.metadata['rollout_id']}/{request.sample}"
        try:
            session, key = await gateway.sessions.create(
                kind=request.kind, settings=settings, metadata=metadata, session_id=request.attempt_id
            )
        except ValueError as error:
            raise StoreError(f"the attempt {request.attempt_id} has run at this gateway before: {error}") from error
        except StoreError:
            raise
        except CallError as error:
            raise ConfigError(f"the session's settings: {error}") from error
        return cls(gateway, session, key, served)

    @property
    def model(self) -> str:
        return self.served.model

    @property
    def _state(self) -> SessionState | None:
        return self._last or self.gateway.sessions.loaded_state(self.key)

    @property
    def turns(self) -> int:
        """Model calls that were answered and recorded so far."""
        state = self._state
        return 0 if state is None else state.turns

    @property
    def first_call(self) -> float | None:
        """When the first call came: Unix seconds of the gateway's clock."""
        state = self._state
        return None if state is None else state.first_call

    async def engine_down(self) -> str | None:
        """What is wrong with the session's engine; `None` if it answers and has its weights. Asked at the end of a failed run: an engine
        that stalls refuses nothing, and its silence must not become a zero; nor must calls that one without its weights was not given."""
        pool = self.served.pool
        try:
            async with asyncio.timeout(ENGINE_ANSWERS_S):
                await pool.check(pool.pick(self.session.id))
        except TimeoutError:
            return f"it was silent for {ENGINE_ANSWERS_S:g} s"
        except PolarError as error:
            return str(error)
        return None

    async def close(self) -> None:
        """Ends the session: its key stops working, calls in flight are cancelled and what they sampled is recorded as aborted. What
        the last call came to is noted before. Raises `StoreError`."""
        if self.closed:
            return
        state = self._state
        if state is not None:
            self.refusal, self.refused = state.refusals.last, dict(state.refusals.counts)
        self._last = state
        await self.gateway.close_session(self.session)
        self.closed = True

    async def completions(self) -> list[Completion]:
        """All that was recorded, in order of number. Raises `StoreError`."""
        return [completion async for completion in self.gateway.store.completions(self.session.id)]
