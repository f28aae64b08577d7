"""The bundled tasks: the reference solution passes, doing nothing fails, and a broken verifier is no reward of zero."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.tasks import EvaluatorError, Task, bundled, grade, load, prepare, solve
from polar.tasks.files import FAMILIES, WORDS, instances

TASKS = bundled()
every_task = pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)


def copied(task: Task, folder: Path) -> Path:
    target = folder / task.name
    shutil.copytree(task.folder, target)
    return target


def test_there_is_a_training_and_a_held_out_task_of_every_family() -> None:
    found = sorted((task.metadata["family"], task.split) for task in TASKS)
    assert found == sorted((family, split) for family in FAMILIES for split in ("train", "held_out"))


@every_task
def test_the_reference_solution_passes(task: Task, tmp_path: Path) -> None:
    prepare(task, tmp_path)
    solve(task, tmp_path)
    result = grade(task, tmp_path)
    assert result.passed, result.output


@every_task
def test_doing_nothing_fails(task: Task, tmp_path: Path) -> None:
    prepare(task, tmp_path)
    assert grade(task, tmp_path).reward == 0


@every_task
def test_a_file_too_many_fails(task: Task, tmp_path: Path) -> None:
    prepare(task, tmp_path)
    solve(task, tmp_path)
    (tmp_path / "left-over.txt").write_text("x")
    result = grade(task, tmp_path)
    assert not result.passed
    assert "left-over.txt" in result.output


def test_a_missing_final_newline_is_forgiven_and_a_wrong_word_is_not(tmp_path: Path) -> None:
    task = next(task for task in TASKS if task.metadata["family"] == "write")
    (expected,) = (task.folder / "tests" / "expected").iterdir()
    target = tmp_path / expected.name
    target.write_text(expected.read_text().rstrip("\n"))
    assert grade(task, tmp_path).passed
    target.write_text(expected.read_text() + "more\n")
    assert not grade(task, tmp_path).passed


def test_a_verifier_that_fails_is_an_error_and_no_reward(tmp_path: Path) -> None:
    folder = copied(TASKS[0], tmp_path / "tasks")
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\necho broken\nexit 3\n")
    with pytest.raises(EvaluatorError, match="exit code 3; it printed: broken"):
        grade(load(folder), tmp_path)


def test_a_verifier_without_a_reward_is_an_error(tmp_path: Path) -> None:
    folder = copied(TASKS[0], tmp_path / "tasks")
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\ntrue\n")
    with pytest.raises(EvaluatorError, match="no readable reward"):
        grade(load(folder), tmp_path)


def test_a_verifier_that_hangs_is_an_error(tmp_path: Path) -> None:
    folder = copied(TASKS[0], tmp_path / "tasks")
    (folder / "tests" / "test.sh").write_text("#!/bin/sh\nexec sleep 30\n")
    settings_file = folder / "task.toml"
    settings_file.write_text(settings_file.read_text().replace("timeout_sec = 30.0", "timeout_sec = 0.3"))
    with pytest.raises(EvaluatorError, match=r"longer than 0\.3 s"):
        grade(load(folder), tmp_path)


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh"])
def test_an_incomplete_folder_is_refused_by_name(missing: str, tmp_path: Path) -> None:
    folder = copied(TASKS[0], tmp_path)
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=missing):
        load(folder)


def test_a_malformed_manifest_is_refused(tmp_path: Path) -> None:
    folder = copied(TASKS[0], tmp_path)
    (folder / "task.toml").write_text("= nothing")
    with pytest.raises(ConfigError, match=r"task\.toml"):
        load(folder)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), held_out=st.booleans())
def test_instances_are_reproducible_distinct_in_words_and_on_one_side_of_the_split(seed: int, held_out: bool) -> None:
    first, again = instances(seed, held_out=held_out), instances(seed, held_out=held_out)
    for family, one, same in zip(FAMILIES, first, again, strict=False):
        assert one == same
        assert one.family == family
        assert one.held_out is held_out
        stems = [word.split(".")[0] for word in one.words]
        assert len(set(stems)) == len(stems)
        assert set(stems) <= set(WORDS)
        assert dict(one.files) != dict(one.expected)


def test_the_bundled_tasks_are_the_generators_and_on_its_side_of_the_split() -> None:
    for split, held_out in (("train", False), ("held_out", True)):
        stream = instances(20, held_out=held_out)
        made = {(task.family, task.instruction) for task in (next(stream) for _ in FAMILIES)}
        assert made == {(task.metadata["family"], task.instruction) for task in bundled(split)}  # type: ignore[arg-type]
