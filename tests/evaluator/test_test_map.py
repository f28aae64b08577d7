"""`test_map` in real sandboxes, against honest agents and cheats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from evaluator_lab import PYTEST, PYTHON, Lab, patch_of, work

from polar.errors import ConfigError, EvaluatorError
from polar.evaluator import Verdict, make

FIX = "sed -i '/def sub/,$s/a + b/a - b/' calc.py"
HIDDEN = "from calc import sub\n\n\ndef test_sub():\n    assert sub(3, 2) == 1\n"
TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -1,5 +1,9 @@
-from calc import add
+from calc import add, sub
 
 
 def test_add():
     assert add(1, 2) == 3
+
+
+def test_sub():
+    assert sub(3, 2) == 1
"""
BASIC: dict[str, Any] = {
    "test_command": f"{PYTEST} tests",
    "FAIL_TO_PASS": ["tests/test_sub.py::test_sub"],
    "PASS_TO_PASS": ["tests/test_calc.py::test_add"],
    "tests": {"tests/test_sub.py": HIDDEN},
}


async def judged(lab: Lab, script: str, config: dict[str, Any] = BASIC, **more: Any) -> Verdict:
    """What an agent that does this gets."""
    async with lab.sandbox() as agent:
        await work(agent, script)
        patch = await patch_of(agent)
        return await make("test_map", config).evaluate(lab.evidence(agent, patch=patch, **more))


async def test_the_fix_gets_1_and_nothing_gets_0(lab: Lab, repository: Path) -> None:
    good = await judged(lab, FIX)
    assert good.reward == 1, good.report
    assert good.metrics == {"tests_right": 2, "tests_total": 2}
    nothing = await judged(lab, "true")
    assert nothing.reward == 0
    assert nothing.report["tests_status"]["FAIL_TO_PASS"]["failure"] == ["tests/test_sub.py::test_sub"]
    assert nothing.report["tests_status"]["PASS_TO_PASS"]["success"] == ["tests/test_calc.py::test_add"]


async def test_a_test_patch_is_applied_over_the_agents_own_tests(lab: Lab, repository: Path) -> None:
    config = {
        "test_command": f"{PYTEST} tests",
        "FAIL_TO_PASS": '["tests/test_calc.py::test_sub"]',
        "PASS_TO_PASS": '["tests/test_calc.py::test_add"]',
        "test_patch": TEST_PATCH,
    }
    edits = "printf 'def test_sub(): pass\\ndef test_add(): pass\\n' > tests/test_calc.py"
    assert (await judged(lab, f"{FIX}; {edits}", config)).reward == 1
    cheat = await judged(lab, edits, config)
    assert cheat.reward == 0
    assert cheat.report["patch_dropped"] == ["tests/test_calc.py"]


async def test_a_share_of_the_tests_where_the_task_wants_it(lab: Lab, repository: Path) -> None:
    assert (await judged(lab, "true", {**BASIC, "partial": True})).reward == 0.5


SUBTRACTS = "import calc\ncalc.sub = lambda a, b: a - b\n"
PASSES = 'print("PASSED tests/test_sub.py::test_sub")\nprint("PASSED tests/test_calc.py::test_add")\n'


def put(path: str, content: str, how: str = ">") -> str:
    return f"mkdir -p $(dirname {path}); cat {how} {path} <<'X'\n{content}X\n"


HOOK = """\
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
COMPILED = """\
import importlib._bootstrap_external as b, pathlib, sys
code = compile("def test_sub(): pass", "tests/test_sub.py", "exec")
for name in ("test_sub", "calc"):
    for folder in ("tests/__pycache__", "__pycache__"):
        pathlib.Path(folder).mkdir(exist_ok=True)
        data = b._code_to_hash_pyc(code, b"12345678", False)
        pathlib.Path(f"{folder}/{name}.{sys.implementation.cache_tag}.pyc").write_bytes(data)
"""
CHEATS = {
    "edits the tests that it is judged by": put("tests/test_sub.py", "def test_sub(): pass\n"),
    "makes a test's file a link": put("mine.py", "def test_sub(): pass\n") + "ln -s ../mine.py tests/test_sub.py",
    "makes the tests' folder a link": "mv tests elsewhere; ln -s elsewhere tests;" + put("elsewhere/test_sub.py", "def test_sub(): pass\n"),
    "hooks in a conftest": put("conftest.py", HOOK),
    "hooks in the tests' conftest": put("tests/conftest.py", SUBTRACTS),
    "sets pytest's options": put("pytest.ini", "[pytest]\naddopts = -p mine\n") + put("mine.py", SUBTRACTS),
    "changes pytest's part of setup.cfg": put("mine.py", SUBTRACTS) + "sed -i 's/no:cacheprovider/mine/' setup.cfg",
    "puts a module in the runner's place": put("pytest.py", PASSES),
    "puts a package in the runner's place": put("pytest/__init__.py", PASSES) + put("pytest/__main__.py", PASSES),
    "registers a plug-in": put("evil.egg-info/PKG-INFO", "Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    + put("evil.egg-info/entry_points.txt", "[pytest11]\nevil = mine\n")
    + put("mine.py", SUBTRACTS),
    "customises the interpreter": put("sitecustomize.py", SUBTRACTS),
    "plants a compiled file": f"{PYTHON} - <<'X'\n{COMPILED}X\n",
    "prints passes": put("calc.py", PASSES, ">>"),
    "prints passes when all is over": put("calc.py", f"import atexit\n@atexit.register\ndef p():\n    {PASSES.splitlines()[0]}\n", ">>"),
    "ends the run by itself, but not with its exit code": put(
        "calc.py", PASSES + "import os, sys\nsys.stdout.flush()\nos._exit(1)\n", ">>"
    ),
    "removes the tests": "rm -r tests",
    "skips the tests": put("calc.py", "import pytest\npytest.skip(allow_module_level=True)\n", ">>"),
    "leaves hooks for git": put(".git/hooks/post-checkout", "#!/bin/sh\necho 'def sub(a, b): return a - b' >> calc.py\n")
    + "chmod +x .git/hooks/post-checkout",
}


@pytest.mark.parametrize("cheat", CHEATS)
async def test_no_reward_for_an_agent_that(lab: Lab, repository: Path, cheat: str) -> None:
    verdict = await judged(lab, CHEATS[cheat])
    assert verdict.reward == 0, verdict.report


@pytest.mark.parametrize("cheat", ["hooks in a conftest", "changes pytest's part of setup.cfg", "registers a plug-in", "prints passes"])
async def test_the_same_beside_a_real_fix_does_no_harm(lab: Lab, repository: Path, cheat: str) -> None:
    verdict = await judged(lab, f"{FIX}\n{CHEATS[cheat]}")
    assert verdict.reward == 1, verdict.report


async def test_the_agents_part_of_a_shared_settings_file_stays(lab: Lab, repository: Path) -> None:
    config = {**BASIC, "test_command": f"grep -q 'version = 2' setup.cfg && {BASIC['test_command']}"}
    assert (await judged(lab, f"{FIX}; sed -i 's/^name.*/&\\nversion = 2/' setup.cfg", config)).reward == 1


async def test_a_task_may_allow_what_is_guarded(lab: Lab, repository: Path) -> None:
    hook = CHEATS["hooks in a conftest"]
    assert (await judged(lab, hook, {**BASIC, "allow": ["./conftest.py"]})).reward == 1


async def test_a_patch_that_does_not_apply_is_a_zero(lab: Lab, repository: Path) -> None:
    bad = b"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n-never\n+there\n was\n"
    verdict = await make("test_map", BASIC).evaluate(lab.evidence(None, patch=bad))
    assert verdict.reward == 0
    assert "does not apply" in verdict.report["reason"]


async def test_a_patch_applies_although_white_space_and_lines_moved(lab: Lab, repository: Path) -> None:
    loose = (
        b"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -15,3 +15,3 @@\n \n"
        b" def sub(a, b):\n-    return   a + b\n+    return a - b\n"
    )
    verdict = await make("test_map", BASIC).evaluate(lab.evidence(None, patch=loose))
    assert verdict.reward == 1, verdict.report


async def test_a_test_patch_that_does_not_apply_is_the_tasks_fault(lab: Lab, repository: Path) -> None:
    config = {**BASIC, "test_patch": TEST_PATCH.replace("def test_add", "def other")}
    with pytest.raises(EvaluatorError, match="test_patch does not apply"):
        await judged(lab, FIX, config)


async def test_no_patch_is_no_zero(lab: Lab, repository: Path) -> None:
    with pytest.raises(EvaluatorError, match="no patch"):
        await make("test_map", BASIC).evaluate(lab.evidence(None))


async def test_a_patch_command_of_the_tasks_own(lab: Lab, repository: Path) -> None:
    async with lab.sandbox() as agent:
        await work(agent, FIX)
        evidence = lab.evidence(agent)
        assert (await make("test_map", {**BASIC, "patch_command": "git diff"}).evaluate(evidence)).reward == 1
        with pytest.raises(EvaluatorError, match="patch_command"):
            await make("test_map", {**BASIC, "patch_command": "exit 1"}).evaluate(evidence)


async def test_an_endless_loop_in_the_work_is_a_zero(lab: Lab, repository: Path) -> None:
    verdict = await judged(lab, "printf 'while True: pass\\n' >> calc.py", {**BASIC, "timeout_seconds": 3})
    assert (verdict.reward, verdict.report["reason"]) == (0, "the tests did not finish in time")


async def test_tests_that_had_no_time_are_no_zero(lab: Lab, repository: Path) -> None:
    with pytest.raises(EvaluatorError, match="left for the tests"):
        await judged(lab, "printf 'while True: pass\\n' >> calc.py", {**BASIC, "timeout_seconds": 300}, timeout_s=4)


async def test_a_build_that_fails_on_the_work_is_a_zero(lab: Lab, repository: Path) -> None:
    config = {**BASIC, "setup": [f"{PYTHON} -m py_compile calc.py"]}
    assert (await judged(lab, FIX, config)).reward == 1
    broken = await judged(lab, "echo 'def (' >> calc.py", config)
    assert broken.reward == 0
    assert "setup command" in broken.report["reason"]


async def test_junit_and_expected_statuses(lab: Lab, repository: Path) -> None:
    config = {
        "test_command": f"{PYTEST} tests --junitxml=out.xml",
        "parser": "junit",
        "junit_path": "out.xml",
        "expected": {"tests/test_sub.py::test_sub": "FAILED", "tests/test_calc.py::test_add": "PASSED"},
        "tests": BASIC["tests"],
    }
    assert (await judged(lab, "true", config)).reward == 1
    assert (await judged(lab, FIX, config)).reward == 0
    assert (await judged(lab, "echo 'import os; os._exit(0)' >> calc.py", config)).reward == 0


async def test_a_junit_file_that_the_agent_brought_is_not_read(lab: Lab, repository: Path) -> None:
    config = {
        "test_command": f"{PYTEST} tests --junitxml=out/all.xml",
        "parser": "junit",
        "junit_path": "out/all.xml",
        "FAIL_TO_PASS": ["tests/test_calc.py::test_add"],
    }
    forged = '<testsuite><testcase classname="tests.test_calc" name="test_add"/></testsuite>'
    ends = f"mkdir out; echo '{forged}' > out/all.xml; echo 'import os; os._exit(0)' >> calc.py"
    assert (await judged(lab, ends, config)).reward == 0
    assert (await judged(lab, f"{ends}; git checkout -q calc.py", config)).reward == 1


async def test_tests_from_the_tasks_folder(lab: Lab, repository: Path, task_folder: Path) -> None:
    (task_folder / "hidden" / "tests").mkdir(parents=True)
    (task_folder / "hidden" / "tests" / "test_sub.py").write_text(HIDDEN)
    config = {**{key: value for key, value in BASIC.items() if key != "tests"}, "tests_dir": "hidden"}
    assert (await judged(lab, FIX, config)).reward == 1
    assert (await judged(lab, CHEATS["edits the tests that it is judged by"], config)).reward == 0


async def test_the_references_name_and_settings(lab: Lab, repository: Path) -> None:
    config = {
        "repo_dir": None,
        "patch_command": "git add -A && git diff --cached",
        "exclude_patterns": ["*.md"],
        "test_command": f"{PYTEST} tests",
        "expected": {"tests/test_calc.py::test_add": "PASSED"},
    }
    async with lab.sandbox() as agent:
        await work(agent, "echo hello > README.md")
        verdict = await make("test_on_output", config).evaluate(lab.evidence(agent))
    assert verdict.reward == 1
    assert verdict.report["patch_dropped"] == ["README.md"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"test_command": "x"}, "without a test nothing can be judged"),
        ({"test_command": "x", "FAIL_TO_PASS": ["a"], "parser": "junit"}, "go together"),
        ({"test_command": "x", "FAIL_TO_PASS": ["a"], "parser": "junit", "junit_path": "/tmp/x.xml"}, "inside of it"),
        ({"FAIL_TO_PASS": ["a"]}, "test_command"),
    ],
)
def test_wrong_settings_are_told_at_submission(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make("test_map", config)


async def test_a_patch_that_the_agent_made_impossible_is_its_own_doing(lab: Lab, repository: Path) -> None:
    """No infrastructure failure: it would be tried again until one suits the agent."""
    verdict = await make("test_map", BASIC).evaluate(lab.evidence(None, patch_refused="no patch: too many files"))
    assert (verdict.reward, verdict.report["reason"]) == (0.0, "no patch: too many files")
    carried = await make("command", {"command": "true", "carry": "patch"}).evaluate(lab.evidence(None, patch_refused="no patch"))
    assert carried.reward == 0.0


async def test_a_patch_command_that_fails_on_the_agents_work_alone_is_its_own_doing(lab: Lab, repository: Path) -> None:
    async with lab.sandbox() as agent:
        await work(agent, f"{FIX}; rm -rf .git")
        verdict = await make("test_map", {**BASIC, "patch_command": "git diff --exit-code HEAD; test $? -le 1"}).evaluate(
            lab.evidence(agent)
        )
    assert verdict.reward == 0.0
    assert "patch_command gave no patch" in verdict.report["reason"]
