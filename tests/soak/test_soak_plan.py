"""A plan is a pure function of its seed, and says for every session how it must end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from soak_plan import CODES, make


@given(seed=st.integers(0, 2**32), sessions=st.integers(60, 300))
@settings(max_examples=30)
def test_a_seed_gives_one_plan(seed: int, sessions: int) -> None:
    plan = make(seed, sessions, faults=len(CODES) // 2, kinds=tuple(CODES))
    assert plan == make(seed, sessions, faults=len(CODES) // 2, kinds=tuple(CODES))
    assert plan != make(seed + 1, sessions, faults=len(CODES) // 2, kinds=tuple(CODES))
    assert plan.sessions == sessions == len(plan.table())


@given(seed=st.integers(0, 2**32))
@settings(max_examples=30)
def test_every_fault_strikes_at_a_call_that_is_made(seed: int) -> None:
    plan = make(seed, 200, faults=len(CODES), kinds=tuple(CODES))
    assert {fault.kind for fault in plan.faults} == set(CODES)
    for fault in plan.faults:
        agent = plan.tasks[fault.task].agent
        assert 1 <= fault.call <= agent.turns + fault.always
