"""`polar run` as its users run it: real CLIs, the bundled model on the CPU engine, each kind of sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polar.runtime.reaper import listing
from polar.trajectory import Trajectory

POLAR = [sys.executable, "-m", "polar.cli"]


def polar_run(folder: Path, *options: str, timeout_s: float = 900) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*POLAR, "run", "--json", "-o", str(folder), *options], capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.stdout.strip(), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout)


def check(folder: Path, summary: dict[str, Any], *, harnesses: int, samples: int) -> None:
    """Every group is whole and graded, every session has rows that add up, and nothing of a sandbox is left."""
    assert len(summary["groups"]) == harnesses
    for group in summary["groups"]:
        assert group["sessions"] == samples, group
        assert set(group["outcomes"]) <= {"graded", "policy"}, group
        assert group["rows"] >= samples, group
        assert group["turns"] >= 1, group
        assert all(seconds >= 0 for seconds in group["stage_s"].values())
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert len(results) == harnesses * samples
    for result in results:
        trajectory = Trajectory.from_json(result["trajectory"])
        assert trajectory.in_rows + trajectory.ledger.tokens == trajectory.sampled == result["sampled_tokens"]
        assert all(trace.faithful and trace.reward == result["reward"] for trace in trajectory.traces if trace.role == "main")


async def nothing_left(folder: Path) -> bool:
    return await listing(folder / "node" / "work" / "sandboxes") == []


@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["local", "bubblewrap", "docker"])
async def test_three_real_clis_give_graded_groups_in_every_sandbox(backend: str, tmp_path: Path) -> None:
    harnesses = "pi,codex,claude-code"
    code, summary = polar_run(
        tmp_path / "run", "--tasks", "demo", "--limit", "1", "--harness", harnesses, "--samples", "2", "--runtime", backend
    )
    assert code == 0
    check(tmp_path / "run", summary, harnesses=3, samples=2)
    assert await nothing_left(tmp_path / "run")
    assert next(one for one in summary["harnesses"] if one["name"] == "pi")["passed"] > 0


@pytest.mark.real
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["bubblewrap", "docker"])
async def test_the_swe_tasks_are_solved_by_the_oracle_through_the_whole_path(backend: str, tmp_path: Path) -> None:
    code, summary = polar_run(tmp_path / "run", "--tasks", "swe", "--harness", "oracle,noop", "--samples", "1", "--runtime", backend)
    assert code == 0, summary
    rewards = {group["name"]: group["reward"] for group in summary["groups"]}
    assert len(rewards) >= 6
    assert {reward for name, reward in rewards.items() if name.endswith("oracle")} == {1.0}
    assert {reward for name, reward in rewards.items() if name.endswith("noop")} == {0.0}
    assert await nothing_left(tmp_path / "run")


@pytest.mark.accept
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("backend", ["local", "bubblewrap", "docker"])
async def test_four_samples_of_every_demo_task(backend: str, tmp_path: Path) -> None:
    code, summary = polar_run(
        tmp_path / "run", "--tasks", "demo", "--harness", "pi,codex,claude-code", "--samples", "4", "--runtime", backend, timeout_s=7000
    )
    assert code == 0
    check(tmp_path / "run", summary, harnesses=3 * 14, samples=4)
    assert await nothing_left(tmp_path / "run")
