"""Where tasks come from, by name and by path."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_folders import MakeTask

from polar.errors import ConfigError
from polar.tasks import SETS, find


def test_the_bundled_sets() -> None:
    sizes = {name: len(one.tasks()) for name, one in SETS.items()}
    assert sizes == {"demo": 14, "coding": 14, "swe": 4, "all": 32}


def test_every_bundled_name_is_unique_and_every_set_has_both_splits() -> None:
    names = [task.name for task in find("all")]
    assert len(set(names)) == len(names)
    for name in ("demo", "coding", "swe"):
        assert {task.split for task in find(name)} == {"train", "held_out"}


@pytest.mark.parametrize("source", ["coding/lru-cache", "lru-cache"])
def test_one_bundled_task(source: str) -> None:
    assert [task.name for task in find(source)] == ["lru-cache"]


def test_several_sources_a_split_and_a_limit() -> None:
    assert [task.name for task in find("hooks-8, lru-cache", split="held_out")] == ["hooks-8"]
    assert len(find("demo,swe", limit=15)) == 15


def test_a_folder_of_tasks_at_any_depth(make_task: MakeTask, tmp_path: Path) -> None:
    make_task("x/one")
    make_task("y/z/two")
    make_task(".hidden/three")
    assert [task.name for task in find(str(tmp_path))] == ["one", "two"]
    assert [task.name for task in find(str(tmp_path / "tasks" / "x" / "one"))] == ["one"]


@pytest.mark.parametrize(
    ("source", "said"),
    [("no-such-thing", "neither a path"), ("coding/write-train", "neither"), (",", "name a task set"), ("lru-cache,lru-cache", "several")],
)
def test_what_is_not_there_is_said(source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find(source)


def test_a_folder_without_tasks_and_a_file_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task\.toml"):
        find(str(tmp_path))
    (tmp_path / "tasks.csv").write_text("")
    with pytest.raises(ConfigError, match=r"\.jsonl"):
        find(str(tmp_path / "tasks.csv"))


def test_a_split_that_no_task_is_in() -> None:
    with pytest.raises(ConfigError, match="held_out"):
        find("lru-cache", split="held_out")
