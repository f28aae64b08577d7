"""Law 5, line by line: whose failure an attempt was, from what the boundaries said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import (
    BudgetExceeded,
    ConfigError,
    ContextOverflow,
    EngineBusy,
    EngineOverloaded,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    EvaluatorError,
    HarnessError,
    SandboxError,
    StoreError,
)
from polar.gateway.sessions import Refusal
from polar.rollout.node.outcome import Facts, Fault, judge

ENGINE = Refusal.of(EngineUnavailable("it went away"))
STORE = Refusal.of(StoreError("disk full"))
TURNS = Refusal.of(BudgetExceeded("no more", code="max_turns"))
TOKENS = Refusal.of(BudgetExceeded("no more", code="max_tokens"))
OVERFLOW = Refusal.of(ContextOverflow("too long", prompt_tokens=9, limit=8))
REJECTED = Refusal.of(EngineRejected("the body is odd"))


def ran(completions: int = 3, **facts: object) -> Facts:
    return Facts(completions=completions, ran=True, **{"exit_code": 0, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "outcome", "code"),
    [
        (ran(), "graded", None),
        (ran(exit_code=1), "graded", None),  # the harness says itself whether it failed
        (ran(exit_code=1, problem="exit code 1"), "policy", "harness_exit"),
        (ran(exit_code=0, problem="it gave up"), "policy", "harness_exit"),
        (ran(exit_code=139, problem="signal 11"), "policy", "harness_exit"),
        (ran(exit_code=137, problem="exit code 137", out_of_memory=True), "policy", "out_of_memory"),
        (ran(exit_code=0, out_of_memory=True), "graded", None),
        (ran(0, exit_code=137, problem="exit code 137", out_of_memory=True), "infrastructure", "harness_no_call"),
        (ran(exit_code=124, timed_out=True, problem="still running"), "policy", "agent_timeout"),
        (ran(refusal=TURNS, problem="exit code 1"), "policy", "max_turns"),
        (ran(refusal=TURNS), "policy", "max_turns"),
        (ran(refusal=TOKENS, timed_out=True, problem="still running"), "policy", "max_tokens"),
        (ran(refusal=OVERFLOW, problem="exit code 1"), "policy", "context_overflow"),
        (ran(refusal=OVERFLOW), "policy", "context_overflow"),
        (ran(refusal=REJECTED, problem="exit code 1"), "policy", "harness_exit"),
        (ran(refusal=REJECTED), "graded", None),
        # the engine or the store ended it
        (ran(refusal=ENGINE, problem="exit code 1"), "infrastructure", "engine"),
        (ran(refusal=ENGINE), "infrastructure", "engine"),  # a CLI that swallows a 502
        (ran(refusal=ENGINE, timed_out=True, problem="still running"), "infrastructure", "engine"),
        (ran(refusal=STORE, problem="exit code 1"), "infrastructure", "store"),
        (ran(timed_out=True, problem="still running", engine_down="silent"), "infrastructure", "engine"),
        (ran(refusal=Refusal("internal", None, "a bug"), problem="exit code 1"), "infrastructure", "gateway"),
        # before the first completion
        (ran(0), "infrastructure", "harness_no_call"),
        (ran(0, exit_code=1, problem="exit code 1"), "infrastructure", "harness_no_call"),
        (ran(0, timed_out=True, problem="still running"), "infrastructure", "harness_no_call"),
        (ran(0, refusal=OVERFLOW, problem="exit code 1"), "infrastructure", "harness_no_call"),
        (ran(0, refusal=ENGINE, problem="exit code 1"), "infrastructure", "engine"),
        (ran(0, refusal=STORE), "infrastructure", "store"),
        # boundaries' own errors, wherever they came
        (Facts(fault=Fault("init", SandboxError("no room"))), "infrastructure", "sandbox"),
        (Facts(fault=Fault("init", SandboxError("300 s"), late=True)), "infrastructure", "init_timeout"),
        (Facts(fault=Fault("init", HarnessError("needs glibc"))), "infrastructure", "harness_setup"),
        (Facts(fault=Fault("init", ConfigError("no such backend"))), "infrastructure", "config"),
        (Facts(fault=Fault("init", StoreError("disk full"))), "infrastructure", "store"),
        (ran(fault=Fault("run", SandboxError("the container is gone"))), "infrastructure", "sandbox"),
        (ran(fault=Fault("run", OSError(28, "No space left on device"))), "infrastructure", "node"),
        (ran(fault=Fault("evaluate", EvaluatorError("no report"))), "infrastructure", "evaluator"),
        (ran(fault=Fault("evaluate", SandboxError("no room"))), "infrastructure", "sandbox"),
        (ran(fault=Fault("evaluate", RuntimeError("a bug"))), "infrastructure", "evaluator"),
        (ran(fault=Fault("build", RuntimeError("a bug"))), "infrastructure", "internal"),
        (ran(problem="exit code 1", fault=Fault("collect", SandboxError("gone"))), "infrastructure", "sandbox"),
        # neither
        (ran(cancelled="early stop"), "cancelled", "cancelled"),
        (ran(0, cancelled="by its user", fault=Fault("run", SandboxError("killed"))), "cancelled", "cancelled"),
        (ran(shut_down=True), "infrastructure", "node_shutdown"),
    ],
)
def test_law_5(facts: Facts, outcome: str, code: str | None) -> None:
    judgement = judge(facts)
    assert (judgement.outcome, judgement.code) == (outcome, code)
    assert (judgement.why is None) == (code is None)


@pytest.mark.parametrize("error", [EngineBusy("429"), EngineOverloaded("503"), EngineUnavailable("502"), EngineTimeout("504")])
def test_every_engine_failure_is_told_from_a_rejected_request(error: Exception) -> None:
    assert Refusal.of(error).boundary == "engine"
    assert Refusal.of(EngineRejected("400")).boundary != "engine"


@pytest.mark.parametrize(
    ("facts", "status"),
    [
        (ran(), "COMPLETED"),
        (ran(problem="exit code 1"), "COMPLETED"),
        (ran(timed_out=True, problem="still running"), "TIMEOUT"),
        (ran(timed_out=True, refusal=ENGINE), "ERROR"),
        (ran(cancelled="x"), "ERROR"),
        (ran(0), "ERROR"),
    ],
)
def test_statuses_of_the_reference(facts: Facts, status: str) -> None:
    assert judge(facts).status(timed_out=facts.timed_out) == status


refusals = st.sampled_from([None, ENGINE, STORE, TURNS, TOKENS, OVERFLOW, REJECTED])
faults = st.none() | st.builds(
    Fault,
    st.sampled_from(["init", "run", "collect", "build", "evaluate"]),
    st.sampled_from([SandboxError("x"), StoreError("x"), EvaluatorError("x"), RuntimeError("x"), OSError("x")]),
    st.booleans(),
)


@given(
    facts=st.builds(
        Facts,
        completions=st.integers(0, 5),
        fault=faults,
        cancelled=st.none() | st.just("x"),
        shut_down=st.booleans(),
        ran=st.booleans(),
        exit_code=st.none() | st.integers(0, 255),
        problem=st.none() | st.just("bad"),
        timed_out=st.booleans(),
        refusal=refusals,
        engine_down=st.none() | st.just("silent"),
    )
)
def test_infrastructure_needs_positive_evidence_and_policy_a_completion(facts: Facts) -> None:
    outcome = judge(facts).outcome
    evidence = (
        facts.fault is not None
        or facts.shut_down
        or facts.engine_down is not None
        or (facts.refusal is not None and facts.refusal.boundary in ("engine", "store", "internal"))
        or facts.completions == 0
    )
    if facts.cancelled is not None:
        assert outcome == "cancelled"
    elif evidence:
        assert outcome == "infrastructure"
    else:
        assert outcome in ("graded", "policy")
