"""The summary's numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.rollout.models import SessionResult, TaskResult, Timing
from polar.rollout.summary import exit_code, summarise, wilson


def result(session: str, outcome: str, reward: float | None, **more: object) -> SessionResult:
    return SessionResult.model_validate(
        {"session_id": session, "task_id": "t", "status": "COMPLETED", "outcome": outcome, "reward": reward, **more}
    )


def test_means_are_over_what_is_there_and_a_missing_reward_is_no_zero() -> None:
    results = [result("a", "graded", 1.0, turns=4), result("b", "policy", 0.0, turns=2), result("c", "infrastructure", None)]
    (line,) = summarise([TaskResult(task_id="t", status="completed", results=results)], by=lambda one: one.task_id)
    assert line.reward == 0.5
    assert (line.sessions, line.passed, line.infrastructure) == (3, 1, 1)


def test_lines_come_by_the_key_and_stages_in_seconds() -> None:
    timing = Timing(init_ms=500, run_ms=2000)
    groups = [TaskResult(task_id="t", status="completed", results=[result("a", "graded", 1.0, metadata={"h": "pi"}, timing=timing)])]
    (line,) = summarise(groups, by=lambda one: one.metadata["h"])
    assert line.name == "pi"
    assert line.stage_s["init_ms"] == 0.5
    assert line.stage_s["run_ms"] == 2.0


@pytest.mark.parametrize(
    ("outcomes", "expected", "code"),
    [(["graded", "policy"], 2, 0), (["graded", "infrastructure"], 2, 1), (["graded"], 2, 1), (["cancelled"], 1, 1)],
)
def test_the_exit_code_tells_the_policys_failures_from_ours(outcomes: list[str], expected: int, code: int) -> None:
    results = [result(str(index), outcome, None) for index, outcome in enumerate(outcomes)]
    assert exit_code([TaskResult(task_id="t", status="completed", results=results)], expected) == code


def test_no_trials_have_no_interval() -> None:
    assert all(math.isnan(bound) for bound in wilson(0, 0))


@given(st.integers(0, 500), st.integers(1, 500))
def test_the_interval_holds_the_rate_and_stays_inside(successes: int, trials: int) -> None:
    successes = min(successes, trials)
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials + 1e-12
    assert successes / trials - 1e-12 <= high <= 1
