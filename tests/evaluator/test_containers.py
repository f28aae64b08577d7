"""The same in containers of Podman or Docker: absolute paths of the evaluator's own, users, an image's /testbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluator_lab import PYTEST, Lab, git, patch_of, work
from test_test_map import FIX, TEST_PATCH, put

from polar.evaluator import hide_history, make
from polar.runtime.docker import DockerRuntime

pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
async def box(lab: Lab) -> Lab:
    problem = await DockerRuntime.unavailable()
    if problem is not None:
        pytest.skip(problem)
    lab.defaults["backend"] = "docker"
    return lab


@pytest.mark.parametrize("user", [None, "65534"])
async def test_harbor_finds_its_own_paths(lab: Lab, task_folder: Path, user: str | None) -> None:
    (task_folder / "tests").mkdir()
    (task_folder / "tests" / "expected.txt").write_text("42\n")
    judges = "if cmp answer.txt /tests/expected.txt; then reward=1; else reward=0; fi; echo $reward > /logs/verifier/reward.txt\n"
    (task_folder / "tests" / "test.sh").write_text(judges)
    lab.defaults["user"] = user
    async with lab.sandbox() as agent:
        await work(agent, "ln -s /tests/expected.txt answer.txt")
        assert (await make("harbor", {}).evaluate(lab.evidence(agent))).reward == 0
        await work(agent, "rm answer.txt; echo 42 > answer.txt; ln -s /bin/sh shell")
        verdict = await make("harbor", {}).evaluate(lab.evidence(agent))
        assert verdict.reward == 1, verdict.report
        assert (await make("harbor", {"in_place": True}).evaluate(lab.evidence(agent))).reward == 1


async def test_an_instance_is_solved_and_cheating_at_it_is_worth_nothing(lab: Lab, repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD")
    (repository / "calc.py").write_text(
        (repository / "calc.py").read_text().replace("sub(a, b):\n    return a + b", "sub(a, b):\n    return a - b")
    )
    git(repository, "commit", "-qam", "the fix")
    git(repository, "branch", "upstream")
    git(repository, "reset", "-q", "--hard", base)
    lab.defaults["workdir"] = "/testbed"
    instance: dict[str, Any] = {
        "repo": "pallets/flask",
        "instance_id": "pallets__flask-1",
        "base_commit": base,
        "version": "3.0",
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": ["tests/test_calc.py::test_sub"],
        "PASS_TO_PASS": ["tests/test_calc.py::test_add"],
    }
    evaluator = make("swebench", {"instance": instance, "test_command": PYTEST})
    for script, reward in (
        (FIX, 1),
        ("true", 0),
        ("git checkout upstream -- . || git log --all -p --reflog | grep 'a - b' && exit 1; true", 0),
        (put("tests/test_calc.py", "def test_sub(): pass\ndef test_add(): pass\n"), 0),
        (put("conftest.py", "import calc\ncalc.sub = lambda a, b: a - b\n"), 0),
    ):
        async with lab.sandbox() as agent:
            await hide_history(agent, "/testbed", base)
            await work(agent, script)
            evidence = lab.evidence(agent, patch=await patch_of(agent))
            verdict = await evaluator.evaluate(evidence)
        assert verdict.reward == reward, (script, verdict.report)
