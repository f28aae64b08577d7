"""Each kind of fault alone, with a handful of sessions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from soak_parts import may_mount
from soak_plan import CODES, DISKS, Agent, Fault, FaultKind, of
from soak_run import carry_out

from polar.runtime.docker import DockerRuntime

pytestmark = [pytest.mark.real, pytest.mark.timeout(240)]

AGENTS = (
    Agent("works", 3, 3, "openai", stream=True),
    Agent("works", 4, 4, "anthropic", stream=True),
    Agent("gives_up", 3, 3),
    Agent("swallows", 3, 3),
    Agent("exits", 2, 3),
    Agent("works", 3, 3),
)


async def test_without_any_fault_every_kind_of_agent_ends_as_it_must(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    kinds = (Agent("hangs", 1, 2), Agent("goes_on", 2, 4), Agent("is_killed", 1, 3), Agent("dies", 0, 2), Agent("says_nothing", 0, 2))
    plan = of((*AGENTS, *kinds), backends=("local", "bubblewrap"))
    report = await carry_out(plan, tmp_path, qwen3_tokenizer_dir, timeout_s=150)
    assert report.table == plan.table()
    assert set(report.codes) == {"harness_no_call"}


@pytest.mark.parametrize("kind", list(CODES))
async def test_alone(kind: FaultKind, tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    if kind in DISKS and not may_mount():
        pytest.skip("a small disk of one's own needs root")
    plan = of(AGENTS, Fault(kind, 0, 1 if kind == "harness_killed" else 2), backends=("local", "bubblewrap"))
    report = await carry_out(plan, tmp_path, qwen3_tokenizer_dir, timeout_s=150)
    assert report.table == plan.table()
    assert report.struck == {kind: 1}


@pytest.mark.parametrize("kind", ["node_killed", "harness_killed", "sandbox_killed", "service_killed"])
async def test_alone_with_containers(kind: FaultKind, tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    problem = await DockerRuntime.unavailable()
    if problem is not None:
        pytest.skip(problem)
    agents = (AGENTS[0], AGENTS[4], Agent("is_killed", 1, 3), Agent("dies", 0, 2))
    plan = of(agents, Fault(kind, 0, 1 if kind == "harness_killed" else 2), backends=("docker",))
    report = await carry_out(plan, tmp_path, qwen3_tokenizer_dir, timeout_s=180)
    assert report.table == plan.table()
    others = report.struck - Counter({kind: 1})
    assert others["harness_killed"] >= 1, "the agent that is killed in every attempt"
    again = 1 if kind in ("node_killed", "service_killed") else 0  # an attempt that was lost with its node is made, and killed, again
    assert others <= Counter(harness_killed=1 + again)
