"""The command in this process, with a home of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from polar.cli.commands import app
from polar.errors import PolarError

Polar = Callable[..., Result]


@pytest.fixture
def polar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Polar:
    """`polar("session", "list")`; an error of Polar's is raised, any other exit than `code` fails the test."""
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "home"))

    def run(*arguments: object, code: int = 0) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if isinstance(result.exception, PolarError):
            raise result.exception
        assert result.exit_code == code, result.output
        return result

    return run
