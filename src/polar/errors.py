"""Every error that Polar raises on purpose, by the boundary that it comes from.

PolarError
├── ConfigError                 a setting is wrong; says which and what to write
├── CallError                   a model call is refused; each dialect has its own shape for it
│   ├── InvalidRequest          the body or a parameter is wrong                       400
│   ├── Unauthenticated         no key, or an unknown one                              401
│   ├── NotFound                no such path, model or stored response                 404
│   ├── SessionClosed           the key was right, its session has ended               410
│   ├── TooLarge                the body is over the size cap                          413
│   ├── BudgetExceeded          the session has used up its turns, tokens or time      400
│   ├── ContextOverflow         the prompt cannot fit the model's context              400
│   ├── StoreError              the completion could not be made durable               503
│   └── EngineError             the engine refused or failed
│       ├── EngineRejected      it said 4xx: the request is at fault                   as it said
│       ├── EngineBusy          it said 429                                            429
│       ├── EngineOverloaded    it said 503 or 529, or the gateway is paused           503
│       ├── EngineUnavailable   no connection, or it went away in the middle           502
│       └── EngineTimeout       no answer in time                                      504
├── HarnessError                a CLI could not be installed, configured or run
├── SandboxError                a runtime could not be started, or stopped answering: infrastructure
├── UnsafePath                  an archive or a path would leave its folder; what an agent left there, not a fault of the runtime
├── EvaluatorError              the evaluator itself failed: no reward, which is not a reward of zero: infrastructure
├── RolloutError                the rollout service refuses a request, or its client could not reach it
├── SaveFailed                  a checkpoint, weights, metrics or an evaluation could not be written: a full disk; names the folder
├── OutOfMemory                 a step of training did not fit the device's memory; says what takes less
├── SyncFailed                  new weights did not reach every engine; says which, why, and what is left paused
└── NotTrainable                ids or log-probabilities are missing or wrong; says where
"""

from __future__ import annotations

from typing import ClassVar, Literal

Kind = Literal[
    "invalid_request",
    "authentication",
    "not_found",
    "closed",
    "too_large",
    "budget",
    "context_overflow",
    "rate_limit",
    "overloaded",
    "unavailable",
    "timeout",
    "internal",
]


class PolarError(Exception):
    """The root. `str(error)` is for the user: what was wrong, where, and what to do."""


class ConfigError(PolarError):
    pass


class HarnessError(PolarError):
    pass


class SandboxError(PolarError):
    pass


class UnsafePath(PolarError):
    pass


class EvaluatorError(PolarError):
    """There is no reward, which is not the same as a reward of zero."""


class RolloutError(PolarError):
    """`code` is stable, for programs; `status` the HTTP status it travels with (0: the service could not be reached)."""

    def __init__(self, message: str, *, code: str, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status


class SaveFailed(PolarError):
    pass


class OutOfMemory(PolarError):
    pass


class SyncFailed(PolarError):
    """`paused`: engines may have changed, and gateways or engines stay paused until weights were synced again. Otherwise nothing has
    changed, and everything goes on with the weights that it had."""

    def __init__(self, message: str, *, paused: bool = False) -> None:
        super().__init__(message)
        self.paused = paused


class NotTrainable(PolarError):
    pass


class CallError(PolarError):
    """A refused model call. `kind` picks the provider's shape, `status` is the HTTP status where the shape is free."""

    kind: ClassVar[Kind] = "internal"
    default_status: ClassVar[int] = 500

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str | None = None,
        param: str | None = None,
        retry_after: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status or self.default_status
        self.code = code
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(CallError):
    kind = "invalid_request"
    default_status = 400


class Unauthenticated(CallError):
    kind = "authentication"
    default_status = 401


class NotFound(CallError):
    kind = "not_found"
    default_status = 404


class SessionClosed(CallError):
    kind = "closed"
    default_status = 410


class TooLarge(CallError):
    kind = "too_large"
    default_status = 413


class BudgetExceeded(CallError):
    """`code` names the stop: `max_turns`, `max_tokens` or `max_seconds`."""

    kind = "budget"
    default_status = 400


class ContextOverflow(CallError):
    """The prompt has `prompt_tokens` (`None` where the engine did not say), the model takes `limit`."""

    kind = "context_overflow"
    default_status = 400

    def __init__(self, message: str, *, prompt_tokens: int | None, limit: int | None) -> None:
        super().__init__(message, code="context_length_exceeded")
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class StoreError(CallError):
    kind = "overloaded"
    default_status = 503


class EngineError(CallError):
    pass


class EngineRejected(EngineError):
    kind = "invalid_request"
    default_status = 400


class EngineBusy(EngineError):
    kind = "rate_limit"
    default_status = 429


class EngineOverloaded(EngineError):
    kind = "overloaded"
    default_status = 503


class EngineUnavailable(EngineError):
    kind = "unavailable"
    default_status = 502


class EngineTimeout(EngineError):
    kind = "timeout"
    default_status = 504
