"""The bundled tasks, without any sandbox: solvable, not solved by doing nothing, whole, and told apart from what they hide."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from polar.tasks import SETS, Task, grade, load_all, prepare, solve

CODING = load_all(SETS["coding"].folders[0])
SWE = load_all(SETS["swe"].folders[0])
every_coding_task = pytest.mark.parametrize("task", CODING, ids=lambda task: task.name)
every_instance = pytest.mark.parametrize("task", SWE, ids=lambda task: task.name)


def repository(task: Task, folder: Path) -> Path:
    """The instance's repository as a node sets it up."""
    folder.mkdir()
    env = {"PATH": os.defpath, "HOME": str(folder.parent)}
    subprocess.run(["sh", str(task.folder.resolve() / "environment/setup.sh")], cwd=folder, env=env, check=True, timeout=60)
    return folder


def git(folder: Path, *arguments: str) -> str:
    env = {"PATH": os.defpath, "HOME": str(folder), "GIT_CONFIG_GLOBAL": "/dev/null"}
    return subprocess.run(["git", *arguments], cwd=folder, env=env, check=True, capture_output=True, text=True, timeout=60).stdout


def instance(task: Task) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((task.folder / "instance.json").read_text())
    return found


@every_coding_task
def test_a_coding_tasks_solution_passes(task: Task, tmp_path: Path) -> None:
    prepare(task, tmp_path)
    solve(task, tmp_path)
    result = grade(task, tmp_path)
    assert result.passed, result.output


@every_coding_task
def test_doing_nothing_in_a_coding_task_gets_nothing(task: Task, tmp_path: Path) -> None:
    prepare(task, tmp_path)
    assert grade(task, tmp_path).reward == 0


HALF = {
    "redact-secrets": ("redact.py", "import sys\nsys.stdout.write(sys.stdin.read())\n"),
    "lru-cache": (
        "cache.py",
        """
class LRUCache(dict):
    def __init__(self, capacity):
        if capacity < 1:
            raise ValueError

    def peek(self, key, default=None):
        return dict.get(self, key, default)

    def put(self, key, value):
        self[key] = value

    def delete(self, key):
        return self.pop(key, self) is not self

    def stats(self):
        return {"hits": 1, "misses": 1, "evictions": 0}
""",
    ),
}
"""Work that is only partly right."""


@pytest.mark.parametrize("name", sorted(HALF))
def test_half_the_work_gets_a_fraction(name: str, tmp_path: Path) -> None:
    task = next(task for task in CODING if task.name == name)
    (tmp_path / HALF[name][0]).write_text(HALF[name][1])
    assert 0 < grade(task, tmp_path).reward < 1


def test_what_worked_before_must_go_on_working(tmp_path: Path) -> None:
    task = next(task for task in CODING if task.name == "fix-word-count-cli")
    prepare(task, tmp_path)
    solve(task, tmp_path)
    program = tmp_path / "wordfreq.py"
    program.write_text(program.read_text().replace('prog="wordfreq"', 'prog="wordfreq", add_help=False'))
    result = grade(task, tmp_path)
    assert result.reward == 0
    assert "FAILED help" in result.output


def test_all_copies_of_the_graders_are_the_same() -> None:
    for tasks in (CODING, SWE):
        assert len({(task.folder / "tests" / "grade.py").read_bytes() for task in tasks}) == 1
        assert len({(task.folder / "tests" / "test.sh").read_bytes() for task in tasks}) == 1


def test_scripts_are_shell_and_instructions_name_what_is_made() -> None:
    for task in CODING + SWE:
        for script in ("tests/test.sh", "solution/solve.sh"):
            assert (task.folder / script).read_text().startswith("#!/bin/sh\n")
        if task in CODING:
            made = [path.name for path in (task.folder / "solution" / "files").iterdir()]
            assert all(name in task.instruction for name in made)


@every_instance
def test_an_instance_is_set_up_at_its_base_commit_with_the_future_in_reach(task: Task, tmp_path: Path) -> None:
    folder = repository(task, tmp_path / "repo")
    assert git(folder, "rev-parse", "HEAD").strip() == instance(task)["base_commit"]
    assert git(folder, "status", "--porcelain") == ""
    assert git(folder, "log", "--oneline", "HEAD..origin/main").count("\n") == 2


@every_instance
def test_an_instances_patches_apply_and_say_what_they_claim(task: Task, tmp_path: Path) -> None:
    row = instance(task)
    folder = repository(task, tmp_path / "repo")
    assert (task.folder / "solution" / "gold.patch").read_text() == row["patch"]
    for name in ("test_patch", "patch"):
        (tmp_path / name).write_text(row[name])
    git(folder, "apply", str(tmp_path / "test_patch"))
    before = passed(folder, row)
    git(folder, "apply", str(tmp_path / "patch"))
    after = passed(folder, row)
    assert sorted(after - before) == sorted(json.loads(row["FAIL_TO_PASS"]))
    assert sorted(after & before) == sorted(json.loads(row["PASS_TO_PASS"]))


def passed(folder: Path, row: dict[str, Any]) -> set[str]:
    files = sorted({name.partition("::")[0] for name in json.loads(row["FAIL_TO_PASS"])})
    done = subprocess.run(
        ["python3", "-I", "-B", "runtests.py", *files], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )
    return {line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith("PASSED ")}


@every_instance
def test_an_instances_manifest_agrees_with_its_row(task: Task) -> None:
    config, row = task.evaluator.config, instance(task)
    assert config["fail_to_pass"] == json.loads(row["FAIL_TO_PASS"])
    assert config["pass_to_pass"] == json.loads(row["PASS_TO_PASS"])
    assert row["problem_statement"].strip() in task.instruction


@every_instance
def test_an_instances_own_verifier(task: Task, tmp_path: Path) -> None:
    folder = repository(task, tmp_path / "repo")
    assert grade(task, folder).reward == 0
    solve(task, folder)
    assert grade(task, folder).reward == 1


@every_instance
def test_edited_tests_are_put_back(task: Task, tmp_path: Path) -> None:
    folder = repository(task, tmp_path / "repo")
    (folder / "runtests.py").write_text("print('PASSED everything')\n")
    shutil.rmtree(folder / "tests")
    (folder / "tests").symlink_to("/nonexistent")
    (folder / "tests").unlink()
    assert grade(task, folder).reward == 0
