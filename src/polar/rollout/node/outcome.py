"""Whose failure it was (law 5), as a pure function of what the boundaries said. Knows no sandbox, no gateway and no clock.

The order is the law's. A caller's cancellation is nobody's failure. Infrastructure needs positive evidence: a boundary's own error, or a
harness that ended before its first completion. All else after a first completion is the policy's.

One line needs a reading. The engine or the store ended a run if they refused the session's last call, whatever the harness made of it: a
CLI that swallows a 502 and exits with 0 has not finished its work, and grading that would make a zero out of a dead engine. A harness
that got over a refusal has had its next call answered, and then nothing is held against anyone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from polar.errors import ConfigError, EvaluatorError, HarnessError, PolarError, SandboxError, StoreError
from polar.gateway.sessions import Refusal
from polar.rollout.models import Outcome, SessionStatus

Part = Literal["init", "run", "collect", "build", "evaluate"]

_BOUNDARIES: tuple[tuple[type[BaseException], str], ...] = (
    (SandboxError, "sandbox"),
    (StoreError, "store"),
    (EvaluatorError, "evaluator"),
    (HarnessError, "harness_setup"),
    (ConfigError, "config"),
    (OSError, "node"),
)
_BUDGETS: Mapping[str, str] = {"max_turns": "max_turns", "max_tokens": "max_tokens", "max_seconds": "agent_timeout"}


@dataclass(frozen=True, slots=True)
class Fault:
    """A part of an attempt raised `error`; `late`: its own budget was over."""

    part: Part
    error: BaseException
    late: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of an attempt once its agent has ended, or could not start."""

    completions: int = 0
    """Complete model calls; aborted ones are none."""
    fault: Fault | None = None
    cancelled: str | None = None
    """Why a caller ended it."""
    shut_down: bool = False
    """The node ended it, to end itself."""
    ran: bool = False
    """Whether the harness was started."""
    exit_code: int | None = None
    problem: str | None = None
    """The harness's own truth about its run; `None`: it succeeded."""
    timed_out: bool = False
    out_of_memory: bool = False
    """The sandbox's memory limit ended the harness, as its runtime knows."""
    refusal: Refusal | None = None
    """Why the session's last call was refused; `None` where it was answered, or there was none."""
    engine_down: str | None = None
    """What was wrong with the engine when it was asked at the end of a failed run; `None` where it answered."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`code` is stable, for programs (`SessionResult.error_code`); `None` where nothing failed."""

    outcome: Outcome
    code: str | None = None
    why: str | None = None

    @property
    def failed(self) -> bool:
        return self.outcome != "graded"

    def status(self, *, timed_out: bool) -> SessionStatus:
        """For the reference's clients, whose statuses know no outcome."""
        if self.outcome in ("infrastructure", "cancelled"):
            return "ERROR"
        return "TIMEOUT" if timed_out else "COMPLETED"


def judge(facts: Facts) -> Judgement:
    """The outcome of an attempt, before any evaluator has seen it: `graded` stands for "to be graded"."""
    if facts.cancelled is not None:
        return Judgement("cancelled", "cancelled", facts.cancelled)
    if facts.shut_down:
        return Judgement("infrastructure", "node_shutdown", "the node was shut down while it ran")
    if facts.fault is not None:
        return of_fault(facts.fault)
    cut = _cut_by_infrastructure(facts)
    if cut is not None:
        return cut
    if facts.completions == 0:
        return Judgement("infrastructure", "harness_no_call", _without_call(facts))
    if facts.refusal is not None and facts.refusal.boundary == "budget":
        code = _BUDGETS.get(facts.refusal.code or "", "budget")
        return Judgement("policy", code, facts.refusal.message)
    if facts.timed_out:
        return Judgement("policy", "agent_timeout", "the agent's time was over")
    if facts.refusal is not None and facts.refusal.boundary == "context_overflow":
        return Judgement("policy", "context_overflow", facts.refusal.message)
    if facts.problem is not None and facts.out_of_memory:
        return Judgement("policy", "out_of_memory", f"the sandbox's memory limit ended the agent ({facts.problem})")
    if facts.problem is not None:
        return Judgement("policy", "harness_exit", facts.problem)
    return Judgement("graded")


def of_fault(fault: Fault) -> Judgement:
    """A boundary's own error is infrastructure, and so is a fault of Polar's that nobody foresaw: it is never the policy's."""
    error = fault.error
    if fault.late:
        code = "init_timeout" if fault.part == "init" else "evaluator" if fault.part == "evaluate" else "node"
        return Judgement("infrastructure", code, str(error))
    for kind, code in _BOUNDARIES:
        if isinstance(error, kind):
            return Judgement("infrastructure", code, str(error) or type(error).__name__)
    said = str(error) if isinstance(error, PolarError) else f"{type(error).__name__}: {error}"
    return Judgement("infrastructure", "evaluator" if fault.part == "evaluate" else "internal", f"{fault.part}: {said}")


def _cut_by_infrastructure(facts: Facts) -> Judgement | None:
    refusal = facts.refusal
    if refusal is not None and refusal.boundary in ("engine", "store", "internal"):
        code = "gateway" if refusal.boundary == "internal" else refusal.boundary
        return Judgement("infrastructure", code, f"the last model call was refused: {refusal.message}")
    if facts.engine_down is not None:
        return Judgement("infrastructure", "engine", f"the run failed, and the engine does not answer: {facts.engine_down}")
    return None


def _without_call(facts: Facts) -> str:
    if not facts.ran:
        return "the harness was never started"
    ended = "its time was over" if facts.timed_out else facts.problem or f"exit code {facts.exit_code}"
    if facts.refusal is not None:
        return f"the harness ended before its first completion ({ended}); its last call was refused: {facts.refusal.message}"
    return f"the harness ended without a completed model call ({ended})"
