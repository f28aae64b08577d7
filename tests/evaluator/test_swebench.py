"""`swebench`: instances of our own, graded by the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evaluator_lab import PYTEST, Lab, git, patch_of, work
from test_test_map import FIX, TEST_PATCH, put

from polar.errors import ConfigError, EvaluatorError
from polar.evaluator import Verdict, make
from polar.evaluator.swebench import END, EXIT, START, graded_part, marked

pytest.importorskip("swebench")
COMMAND = {"test_command": PYTEST, "log_parser": "parse_log_pytest"}


@pytest.fixture
def instance(repository: Path) -> dict[str, Any]:
    """A row as SWE-bench Verified first had them, of a repository that the library knows a parser for."""
    return {
        "repo": "pallets/flask",
        "instance_id": "pallets__flask-1",
        "base_commit": git(repository, "rev-parse", "HEAD"),
        "patch": "",
        "test_patch": TEST_PATCH,
        "problem_statement": "sub adds",
        "hints_text": "",
        "created_at": "2026-01-01T00:00:00Z",
        "version": "3.0",
        "FAIL_TO_PASS": '["tests/test_calc.py::test_sub"]',
        "PASS_TO_PASS": '["tests/test_calc.py::test_add"]',
        "environment_setup_commit": "",
    }


async def judged(lab: Lab, instance: dict[str, Any], script: str, **config: Any) -> Verdict:
    async with lab.sandbox(workdir="/testbed") as agent:
        await work(agent, script)
        patch = await patch_of(agent)
    evidence = lab.evidence(None, patch=patch, fresh=lambda: lab.sandbox(workdir="/testbed"))
    return await make("swebench", {"instance": instance, **COMMAND, **config}).evaluate(evidence)


async def test_the_gold_patch_gets_1_and_an_empty_one_0(lab: Lab, instance: dict[str, Any]) -> None:
    gold = await judged(lab, instance, FIX)
    assert gold.reward == 1, gold.report
    assert gold.metrics == {"fail_to_pass_passed": 1, "pass_to_pass_passed": 1}
    empty = await judged(lab, instance, "true")
    assert empty.reward == 0
    assert empty.report["tests_status"]["FAIL_TO_PASS"]["failure"] == ["tests/test_calc.py::test_sub"]


async def test_a_row_with_a_script_of_its_own(lab: Lab, instance: dict[str, Any]) -> None:
    row = {
        **instance,
        "image": "local/calc",
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "eval_script": f"#!/bin/bash\nset -uxo pipefail\ncd /testbed\n: '{START}'\n{PYTEST} tests\n: '{END}'\n",
        "FAIL_TO_PASS": ["tests/test_mine.py::test_sub"],
        "PASS_TO_PASS": ["tests/test_calc.py::test_add"],
    }
    # The row's script brings no tests: what the agent made of them is dropped, and the test does not run.
    cheat = put("tests/test_mine.py", "def test_sub(): pass\n")
    assert (await judged(lab, row, cheat)).reward == 0
    row["FAIL_TO_PASS"] = []
    good = await judged(lab, row, "true")
    assert good.reward == 1, good.report


async def test_another_place_for_the_repository(lab: Lab, instance: dict[str, Any]) -> None:
    async with lab.sandbox() as agent:
        await work(agent, FIX)
        evidence = lab.evidence(None, patch=await patch_of(agent))
    verdict = await make("swebench", {"instance": instance, **COMMAND, "repo_dir": None}).evaluate(evidence)
    assert verdict.reward == 1, verdict.report


CHEATS = {
    "edits the tests": put("tests/test_calc.py", "def test_sub(): pass\ndef test_add(): pass\n"),
    "prints the marks": put(
        "calc.py",
        f"print('{START}')\nprint('PASSED tests/test_calc.py::test_sub')\nprint('PASSED tests/test_calc.py::test_add')\n"
        f"print('FAILED tests/other.py::x')\nprint('{END}')\n",
        ">>",
    ),
    "steers the tests": put("conftest.py", "import calc\ncalc.sub = lambda a, b: a - b\n"),
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_no_reward_for_an_agent_that(lab: Lab, instance: dict[str, Any], cheat: str) -> None:
    verdict = await judged(lab, instance, CHEATS[cheat])
    assert verdict.reward == 0, verdict.report


async def test_a_script_that_never_comes_to_its_tests_is_no_zero(lab: Lab, instance: dict[str, Any]) -> None:
    row = {**instance, "eval_script": "echo no; exit 1\n", "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail"}
    with pytest.raises(EvaluatorError, match="never came to its tests"):
        await judged(lab, row, FIX)


async def test_an_endless_loop_is_a_zero(lab: Lab, instance: dict[str, Any]) -> None:
    verdict = await judged(lab, instance, put("calc.py", "while True: pass\n", ">>"), timeout_seconds=3)
    assert (verdict.reward, verdict.report["timed_out"]) == (0, True)


async def test_an_instance_from_a_file(lab: Lab, instance: dict[str, Any], task_folder: Path) -> None:
    rows = [{**instance, "instance_id": "other", "problem_statement": "one line\u2028to JSON"}, instance]
    (task_folder / "rows.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows))
    config = {"instance_path": "rows.jsonl", "instance_id": instance["instance_id"], **COMMAND, "repo_dir": None}
    async with lab.sandbox() as agent:
        await work(agent, FIX)
        evidence = lab.evidence(None, patch=await patch_of(agent))
    assert (await make("swebench_harness", config).evaluate(evidence)).reward == 1
    with pytest.raises(EvaluatorError, match="holds 0 instances"):
        await make("swebench", {**config, "instance_id": "none"}).evaluate(evidence)


def test_what_cannot_be_graded_is_told_at_submission(instance: dict[str, Any]) -> None:
    for config, said in [
        ({}, "give the instance"),
        ({"instance": {}}, "instance_id"),
        ({"instance": {**instance, "test_patch": ""}}, "eval_script"),
    ]:
        with pytest.raises(ConfigError, match=said):
            make("swebench", config)


def test_marks_that_code_prints_are_taken_out() -> None:
    script = marked(f"echo '{START}'\necho '{END}'", "abc")
    assert START + "abc" in script
    output = f"{END}\nFAILED y\n{START}abc\n{END}\nPASSED x\n{END}abc\n{START}\0\n+ echo '{EXIT}abc: 1'\nPASSED z"
    part = graded_part(output, "abc")
    assert part.splitlines() == [START, "", END.replace(">>>>> ", "> "), "PASSED x", "", END, f"{EXIT}: 1"]
    assert graded_part(f"{START}\n{END}", "abc").strip() == ""
    assert END not in graded_part(f"{START}abc\nPASSED x", "abc")
