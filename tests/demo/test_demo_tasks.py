"""The demo's tasks: their lines are tasks, what they judge is judged rightly, and the two sides never mix."""

from __future__ import annotations

import subprocess
from pathlib import Path

import orjson
import pytest

from polar.demo.tasks import check_line, files_line, line, write_tasks
from polar.runtime.spec import RuntimeSpec
from polar.tasks import find
from polar.tasks.files import FAMILIES, FileTask, instances


def sh(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=30, check=False)


def task_of(family: str) -> FileTask:
    return next(instances(3, held_out=True, families=(family,)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_task_is_failed_before_its_solution_and_passed_after_it(family: str, tmp_path: Path) -> None:
    task = task_of(family)
    if task.files:
        assert sh(files_line(task), tmp_path).returncode == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict(task.files)
    assert sh(check_line(task), tmp_path).returncode == 1
    assert sh(task.solution, tmp_path).returncode == 0
    assert sh(check_line(task), tmp_path).returncode == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_too_many_fails_it(family: str, tmp_path: Path) -> None:
    task = task_of(family)
    if task.files:
        sh(files_line(task), tmp_path)
    sh(task.solution, tmp_path)
    (tmp_path / "zzz.txt").write_text("")
    done = sh(check_line(task), tmp_path)
    assert done.returncode == 1
    assert "other files" in done.stdout


def test_a_file_of_tasks_is_read_as_tasks_of_its_side(tmp_path: Path) -> None:
    train = write_tasks(tmp_path / "train.jsonl", count=14, held_out=False, seed=1)
    held_out = write_tasks(tmp_path / "held-out.jsonl", count=14, held_out=True, seed=1)
    sides = [find(str(path)) for path in (train, held_out)]
    assert [{task.split for task in side} for side in sides] == [{"train"}, {"held_out"}]
    assert len({task.name for side in sides for task in side}) == 28
    assert sides[0][0].fields(RuntimeSpec(backend="local"))["evaluator"]["strategy"] == "command"


def test_the_same_seed_gives_the_same_tasks_and_another_one_others(tmp_path: Path) -> None:
    first, again, other = (
        write_tasks(tmp_path / f"{number}.jsonl", count=21, held_out=False, seed=seed).read_bytes() for number, seed in enumerate((5, 5, 6))
    )
    assert first == again
    assert first != other
    assert {orjson.loads(one)["metadata"]["family"] for one in first.splitlines()} == set(FAMILIES)


def test_a_line_tells_no_solution_in_its_instruction() -> None:
    task = task_of("second")
    assert task.words[2] not in line(task)["instruction"]
