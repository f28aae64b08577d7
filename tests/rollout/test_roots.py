"""Where sandboxes were is remembered, so that `polar ps` and `polar gc` find them without being told."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from polar.cli.commands import app
from polar.rollout import roots
from polar.runtime.owner import Owner

OTHER = """
import pathlib, sys, time
from polar.runtime.owner import Owner
Owner.open(pathlib.Path(sys.argv[1])).sandbox("theirs")
print(1, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "state"))


def test_a_root_is_noted_once_and_can_be_forgotten(tmp_path: Path) -> None:
    assert roots.known() == []
    roots.remember(tmp_path / "a")
    roots.remember(tmp_path / "a")
    roots.remember(tmp_path / "b")
    assert set(roots.known()) == {tmp_path / "a", tmp_path / "b"}
    roots.forget(tmp_path / "a")
    assert roots.known() == [tmp_path / "b"]


def test_ps_tells_the_living_from_the_dead_and_gc_removes_only_these(tmp_path: Path) -> None:
    root = tmp_path / "sandboxes"
    roots.remember(root)
    living = Owner.open(root)
    living.sandbox("mine")
    other = subprocess.Popen([sys.executable, "-c", OTHER, str(root)], stdout=subprocess.PIPE)
    assert other.stdout is not None
    other.stdout.readline()
    other.kill()
    other.wait()
    listed = json.loads(CliRunner().invoke(app, ["ps", "--json"]).stdout)
    assert {(one["sandbox"], one["alive"]) for one in listed if one["sandbox"]} == {("mine", True), ("theirs", False)}
    planned = json.loads(CliRunner().invoke(app, ["gc", "--dry-run", "--json"]).stdout)
    removed = json.loads(CliRunner().invoke(app, ["gc", "--json"]).stdout)
    assert planned == removed
    assert {one["sandbox"] for one in removed} == {"theirs", ""}
    assert (living.folder / "mine").is_dir()
    living.close()


def test_a_root_that_is_gone_with_nothing_left_is_forgotten(tmp_path: Path) -> None:
    root = tmp_path / "sandboxes"
    root.mkdir()
    roots.remember(root)
    shutil.rmtree(root)
    assert CliRunner().invoke(app, ["gc"]).exit_code == 0
    assert roots.known() == []
