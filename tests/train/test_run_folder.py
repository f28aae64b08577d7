"""A run's folder: one run, one process, the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.train.config import TrainConfig
from polar.train.folder import opened, read_run


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
        ({"model": "other"}, "model"),
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
