"""What the demo's hints call this command."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from polar.cli.demo import own_name


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "my bin" / "polar"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_command_off_the_path_is_named_as_it_was_started(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", "/nowhere")
    assert own_name() == f"'{program}'"


def test_a_command_on_the_path_is_polar(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [str(program)])
    monkeypatch.setenv("PATH", str(program.parent))
    assert own_name() == "polar"


def test_a_module_is_started_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/polar/cli/__main__.py"])
    assert own_name().endswith("-m polar.cli")
