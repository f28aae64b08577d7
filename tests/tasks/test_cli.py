"""`polar tasks`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from task_folders import MakeTask
from typer.testing import CliRunner

from polar.cli.tasks import app
from polar.errors import ConfigError

runner = CliRunner()


def test_the_sets() -> None:
    found = json.loads(runner.invoke(app, ["list", "--json"]).stdout)
    assert [(one["set"], one["tasks"]) for one in found] == [("demo", 14), ("coding", 14), ("swe", 4), ("all", 32)]
    assert "small repositories" in runner.invoke(app, ["list"]).stdout


def test_the_tasks_of_a_source() -> None:
    found = json.loads(runner.invoke(app, ["list", "swe", "--split", "held_out", "--json"]).stdout)
    assert [one["task"] for one in found] == ["hooks-8"]
    assert "polar" not in found[0]["metadata"]
    assert "lru-cache" in runner.invoke(app, ["list", "coding"]).stdout


def test_one_task() -> None:
    said = runner.invoke(app, ["show", "log-report"]).stdout
    for part in ("log-report", "environment/files/access.log", "harbor", "Write `report.py`"):
        assert part in said
    facts = json.loads(runner.invoke(app, ["show", "swe", "--only", "spans-42", "--json"]).stdout)
    assert (facts["evaluator"], facts["solution"]) == ("test_map", "gold.patch, solve.sh")


@pytest.mark.parametrize(
    ("arguments", "said"), [(["show", "coding"], "--only"), (["show", "nothing"], "neither"), (["list", "swe", "--split", "x"], "--split")]
)
def test_what_is_wrong_is_said(arguments: list[str], said: str) -> None:
    result = runner.invoke(app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_validate_says_so_by_its_exit_code(make_task: MakeTask, tmp_path: Path) -> None:
    good = make_task("good")
    result = runner.invoke(app, ["validate", str(good), "--repeats", "1", "--json", "--logs", str(tmp_path / "logs")])
    assert (result.exit_code, json.loads(result.stdout)["ok"]) == (0, True)
    bad = make_task("bad", files={"solution/solve.sh": "true\n"})
    result = runner.invoke(app, ["validate", str(bad), "--repeats", "1"])
    assert result.exit_code == 1
    assert "the reference solution gets 0, not 1" in " ".join(result.stdout.split())


def test_run_is_polar_run_in_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []

    def run_tasks(tasks: str, harnesses: list[str], samples: int, where: object, **more: object) -> int:
        asked.extend([tasks, harnesses, samples, more["runtime"], more["limit"]])
        return 3

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polar.cli.run.run_tasks", run_tasks)
    result = runner.invoke(app, ["run", "swe", "--harness", "oracle, noop", "--runtime", "docker", "--image", "x", "--limit", "1"])
    assert result.exit_code == 3
    assert asked == ["swe", ["oracle", "noop"], 1, {"backend": "docker", "image": "x"}, 1]
