"""A run's folder: one run, one process, the same settings."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.runtime.spec import RuntimeSpec
from polar.tasks import find
from polar.testing.rollout import TOKEN, stub_rollouts
from polar.train import TrainConfig, train
from polar.train.checks import check_tasks
from polar.train.folder import locked, opened, read_run
from polar.train.run import weights_folder
from polar.train.world import entered


def config(folder: Path, **more: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": "m", "tasks": "demo", "output": str(folder), **more})


def test_a_run_keeps_its_name(tmp_path: Path) -> None:
    with opened(config(tmp_path / "run")) as first:
        assert not first.begun
    with opened(config(tmp_path / "run", steps=500, checkpoints={"every": 1})) as again:
        assert again.begun
        assert again.run_id == first.run_id
    assert read_run(tmp_path / "run")[1]["model"]["name"] == "m"


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model": "other"}, "model.name"),
        ({"model": {"name": "m", "dtype": "bfloat16"}}, "model.dtype"),
        ({"model": {"name": "m", "lora": {}}}, "model.lora"),
        ({"seed": 4}, "seed"),
        ({"batch": {"groups": 9}}, "batch.groups"),
        ({"harnesses": "codex"}, "harnesses"),
    ],
)
def test_settings_that_make_another_run_are_refused_by_name(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    with opened(config(tmp_path / "run")) as run:
        (run.path / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match=f"another {named}"), opened(config(tmp_path / "run", **changed)):
        pass


def test_a_run_that_is_short_of_memory_goes_on_with_less(tmp_path: Path) -> None:
    with opened(config(tmp_path / "run")) as run:
        (run.path / "metrics.jsonl").touch()
    less = {"model": {"name": "m", "gradient_checkpointing": True, "sharding": "full", "attention": "eager"}}
    with opened(config(tmp_path / "run", **less, optimisation={"token_budget": 99})) as again:
        assert again.begun


def test_two_processes_do_not_train_in_one_folder(tmp_path: Path) -> None:
    with opened(config(tmp_path / "run")), pytest.raises(ConfigError, match="another process"), opened(config(tmp_path / "run")):
        pass


def test_settings_that_were_wrong_from_the_start_can_be_mended(tmp_path: Path) -> None:
    with opened(config(tmp_path / "run", harnesses="codx")) as wrong:
        pass
    with opened(config(tmp_path / "run", harnesses="codex")) as mended:
        assert not mended.begun
        assert mended.run_id != wrong.run_id
    assert read_run(tmp_path / "run")[1]["harnesses"] == {"codex": 1.0}


def test_a_run_that_could_not_be_named_leaves_a_folder_to_begin_in(tmp_path: Path) -> None:
    for left in (".lock", ".run.json.17"):
        (tmp_path / left).touch()
    with opened(config(tmp_path)) as run:
        assert not run.begun


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something else than a run"), opened(config(tmp_path)):
        pass
    with pytest.raises(ConfigError, match="holds no run"):
        read_run(tmp_path)


def task(folder: Path, name: str, instruction: str = "Do it.") -> None:
    """A Harbor task, or other words for one that is there."""
    (folder / name / "environment").mkdir(parents=True, exist_ok=True)
    (folder / name / "tests").mkdir(exist_ok=True)
    for file, text in {
        "task.toml": "",
        "instruction.md": instruction,
        "tests/test.sh": "true\n",
        "environment/Dockerfile": "FROM x\n",
    }.items():
        (folder / name / file).write_text(text)


def begun(folder: Path) -> Path:
    (folder / "rollout").mkdir(parents=True)
    return folder


RUNTIME = RuntimeSpec(backend="docker")


def test_a_task_that_was_edited_under_its_name_is_noticed_once(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    for name in ("a", "b"):
        task(tmp_path / "tasks", name)
    line = tmp_path / "lines.jsonl"
    line.write_text('{"id": "c", "instruction": "Say 4.", "answer": "4"}\n')

    def edited() -> list[str]:
        return check_tasks(run, [*find(str(tmp_path / "tasks")), *find(str(line))], RUNTIME)

    assert edited() == []
    assert edited() == []
    task(tmp_path / "tasks", "b", "Do it well.")
    assert edited() == ["b"]
    (tmp_path / "tasks" / "a" / "tests" / "test.sh").write_text("false\n")
    line.write_text('{"id": "c", "instruction": "Say 4.", "answer": "5"}\n')
    assert edited() == ["a", "c"]
    assert edited() == []
    (tmp_path / "tasks").rename(tmp_path / "moved")
    assert check_tasks(run, [*find(str(tmp_path / "moved")), *find(str(line))], RUNTIME) == []


def test_other_tasks_are_another_run(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    for name in ("a", "b"):
        task(tmp_path / "tasks", name)
    tasks = find(str(tmp_path / "tasks"))
    check_tasks(run, tasks, RUNTIME)
    with pytest.raises(ConfigError, match=r"tasks: they are not those that the run in .* began with \(gone: b\)"):
        check_tasks(run, tasks[:1], RUNTIME)
    with pytest.raises(ConfigError, match="their order"):
        check_tasks(run, tasks[::-1], RUNTIME)
    task(tmp_path / "tasks", "c")
    with pytest.raises(ConfigError, match=r"\(new: c\)"):
        check_tasks(run, find(str(tmp_path / "tasks")), RUNTIME)
    (run / "rollout").rmdir()  # nothing was asked for yet
    assert check_tasks(run, find(str(tmp_path / "tasks")), RUNTIME) == []


async def test_other_tasks_are_another_run_at_a_service_elsewhere_from_its_first_answer_on(tmp_path: Path) -> None:
    """It may have been asked for groups when the run was killed, long before there is a checkpoint."""
    run = tmp_path / "run"
    run.mkdir()
    for name in ("a", "b"):
        task(tmp_path / "tasks", name)
    tasks = find(str(tmp_path / "tasks"))
    check_tasks(run, tasks, RUNTIME)
    check_tasks(run, tasks[::-1], RUNTIME)  # nobody was asked for anything yet
    check_tasks(run, tasks, RUNTIME)
    async with stub_rollouts(tmp_path / "service", []) as (_, url):
        settings = config(run, rollout={"url": url, "token": TOKEN})
        async with entered(settings, "m", [], run / "rollout", lambda line: None):
            pass
    with pytest.raises(ConfigError, match="their order"):
        check_tasks(run, tasks[::-1], RUNTIME)
    assert check_tasks(run, tasks, RUNTIME) == []


def test_two_runs_do_not_write_weights_for_engines_into_one_folder(tmp_path: Path) -> None:
    settings = config(tmp_path / "run", model="tiny-qwen3", sync={"folder": str(tmp_path / "weights")})
    with (
        locked(tmp_path / "weights", "it is ours"),
        pytest.raises(ConfigError, match=r"sync\.folder: another run writes its weights to .*/weights"),
    ):
        train(settings)
    assert not (tmp_path / "run" / "rollout").exists()


def test_a_weights_folder_on_a_disk_without_locks_is_used_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    said: list[str] = []
    settings = config(tmp_path / "run", sync={"folder": str(tmp_path / "weights")})
    with opened(settings) as folder:
        monkeypatch.setattr("fcntl.flock", refused)
        with weights_folder(settings, folder, said.append) as place:
            assert place == tmp_path / "weights"
    assert len(said) == 1
    assert "has no locks (No locks available)" in said[0]
