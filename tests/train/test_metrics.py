"""Numbers of a run stand where they were asked for, whole, once a step, also after a crash."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.train.metrics import FILE, JsonLines, open_metrics, read_metrics


def numbers(folder: Path) -> list[dict[str, float | None]]:
    return [{name: value for name, value in line.items() if name != "time"} for line in read_metrics(folder)]


def test_a_line_a_step_as_json(tmp_path: Path) -> None:
    with open_metrics(tmp_path / "run") as metrics:
        metrics.log(1, {"loss": 0.5, "tokens": 7})
        metrics.log(2, {"loss": 0.1 + 0.2})
    lines = [json.loads(line) for line in (tmp_path / "run" / FILE).read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[0]["tokens"] == 7
    assert lines[1]["loss"] == 0.1 + 0.2
    assert all(line["time"] > 0 for line in lines)


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as metrics:
        metrics.log(0, {"nan": math.nan, "inf": -math.inf, "fine": 1.0})
    assert numbers(tmp_path) == [{"step": 0, "nan": None, "inf": None, "fine": 1.0}]


def test_several_calls_for_a_step_add_up(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as metrics:
        metrics.log(3, {"loss": 1.0})
        metrics.log(3, {"pass@1": 0.25})
    assert numbers(tmp_path) == [{"step": 3, "loss": 1.0, "pass@1": 0.25}]


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    import numpy as np
    import torch

    with open_metrics(tmp_path) as metrics:
        metrics.log(1, {"a": np.float32(0.5), "b": torch.tensor(2.0), "c": True})  # type: ignore[dict-item]
    assert numbers(tmp_path) == [{"step": 1, "a": 0.5, "b": 2.0, "c": 1.0}]


@pytest.mark.parametrize("values", [{"loss": "high"}, {"loss": None}, {"step": 1.0}, {"time": 1.0}])
def test_what_is_no_metric_is_refused_and_nothing_is_written(tmp_path: Path, values: dict[str, float]) -> None:
    with open_metrics(tmp_path) as metrics, pytest.raises(ValueError):
        metrics.log(1, {"fine": 1.0, **values})
    assert read_metrics(tmp_path) == []


@settings(deadline=None)  # each line is synced, and a disk may be busy
@given(st.lists(st.integers(0, 12), max_size=12).map(sorted), st.integers(-1, 13))
def test_a_resumed_run_has_no_step_twice(tmp_path_factory: pytest.TempPathFactory, steps: list[int], resumed: int) -> None:
    folder = tmp_path_factory.mktemp("metrics")
    with open_metrics(folder) as metrics:
        for step in steps:
            metrics.log(step, {"run": 1})
    with open_metrics(folder, resumed_step=resumed) as metrics:
        for step in range(resumed + 1, 14):
            metrics.log(step, {"run": 2})
    raw = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    assert [line["step"] for line in raw] == [step for step in steps if step <= resumed] + list(range(resumed + 1, 14))
    assert all(line["run"] == (1 if line["step"] <= resumed else 2) for line in raw)


def test_opened_again_without_a_step_everything_stays(tmp_path: Path) -> None:
    for step in (1, 2):
        with open_metrics(tmp_path) as metrics:
            metrics.log(step, {"loss": step})
    assert [line["step"] for line in numbers(tmp_path)] == [1, 2]


def test_a_line_that_a_crash_cut_short_is_gone(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as metrics:
        metrics.log(1, {"loss": 1.0})
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"step": 2, "lo')
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]
    with open_metrics(tmp_path) as metrics:
        metrics.log(2, {"loss": 2.0})
    assert [line["loss"] for line in read_metrics(tmp_path)] == [1.0, 2.0]


def test_another_file_of_that_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("my notes\n")
    with pytest.raises(ConfigError, match="line 1"):
        open_metrics(tmp_path)
    assert (tmp_path / FILE).read_text() == "my notes\n"


def test_what_was_logged_survives_kill_9(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from polar.train.metrics import open_metrics
metrics = open_metrics(Path({str(tmp_path)!r}))
for step in range(50):
    metrics.log(step, {{"loss": 1.0}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == -9
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(50))


def test_closing_twice_closes_once(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / FILE)
    lines.close()
    lines.close()


# --- the others ---------------------------------------------------------------------------------------------------------


def test_tensorboard_holds_the_numbers_and_forgets_what_is_done_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with open_metrics(tmp_path, ["tensorboard"]) as metrics:
        for step in range(4):
            metrics.log(step, {"loss": float(step)})
    with open_metrics(tmp_path, ["jsonl", "tensorboard"], resumed_step=1) as metrics:
        metrics.log(2, {"loss": 20.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert [line["loss"] for line in read_metrics(tmp_path)] == [0.0, 1.0, 20.0]


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of W&B's own file: a LevelDB log of protobuf messages behind seven bytes of header, in blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    raw, place, message = file.read_bytes(), 7, b""
    while place + 7 <= len(raw):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = struct.unpack_from("<HB", raw, place + 4)
        if kind == 0:
            return
        message += raw[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(message)
            message = b""


@pytest.mark.real
def test_wandb_offline_keeps_one_run_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for step in (1, 2):
        with open_metrics(tmp_path / "run", ["wandb"], config={"lr": 0.1}) as metrics:
            metrics.log(step, {"loss": step / 2, "bad": math.nan})
        time.sleep(1.1)  # W&B names its folder by run and second: two within one would write over each other
    records = [one for file in (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb") for one in wandb_records(file)]
    runs = {(one.run.project, one.run.run_id, one.run.display_name) for one in records if one.HasField("run")}
    assert [(project, name) for project, _, name in runs] == [("polar", "run")]
    points = [{item.key or item.nested_key[0]: item.value_json for item in one.history.item} for one in records if one.HasField("history")]
    assert sorted((json.loads(point["step"]), json.loads(point["loss"])) for point in points) == [(1, 0.5), (2, 1.0)]


@pytest.mark.real
def test_trackio_keeps_one_run_for_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own: trackio reads its folder's place when it is imported, and writes to standard output."""
    program = """
import json, sys
from pathlib import Path
from polar.train.metrics import open_metrics
for step in (1, 2):
    with open_metrics(Path("run"), ["trackio"]) as metrics:
        metrics.log(step, {"loss": step / 2})
from trackio.sqlite_storage import SQLiteStorage
found = {run: [(log["step"], log["loss"]) for log in SQLiteStorage.get_logs("polar", run)] for run in SQLiteStorage.get_runs("polar")}
Path("found.json").write_text(json.dumps(found))
"""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, timeout=120, check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    assert list(found.values()) == [[[1, 0.5], [2, 1.0]]]
    assert next(iter(found)).startswith("run-")


@pytest.mark.parametrize("writer", ["tensorboard", "wandb", "trackio"])
def test_a_writer_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writer: str) -> None:
    monkeypatch.setitem(sys.modules, {"tensorboard": "torch.utils.tensorboard"}.get(writer, writer), None)
    with pytest.raises(ConfigError, match=f"pip install {writer}"):
        open_metrics(tmp_path / "run", [writer])
    assert not (tmp_path / "run").exists()


def test_a_writer_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mlflow; there are: jsonl, tensorboard, wandb, trackio"):
        open_metrics(tmp_path, ["mlflow"])
