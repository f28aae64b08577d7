"""What the console script prints and exits with when something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import polar.cli
from polar.errors import ConfigError

Polar = Callable[..., Any]


def script(code: str, *arguments: object, home: Path) -> subprocess.CompletedProcess[str]:
    """`main` in a process of its own, its output in pipes, `code` before it."""
    command = [sys.executable, "-c", f"{code}\nfrom polar.cli import main; main()", *map(str, arguments)]
    environment = {**os.environ, "POLAR_HOME": str(home)}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def main_of(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["polar", *map(str, arguments)])
    with pytest.raises(SystemExit) as caught:
        polar.cli.main()
    return int(caught.value.code or 0)


def test_an_interrupt_while_the_command_loads_is_an_end_without_a_traceback(tmp_path: Path) -> None:
    hook = (
        "import sys\nclass Interrupt:\n    def find_spec(self, name, *rest):\n"
        "        if name == 'polar.cli.commands': raise KeyboardInterrupt\nsys.meta_path.insert(0, Interrupt())"
    )
    done = script(hook, "--version", home=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_the_version_needs_nothing_heavy(tmp_path: Path) -> None:
    heavy = "import sys, atexit\natexit.register(lambda: print({'torch', 'transformers', 'renderers', 'sqlalchemy'} & set(sys.modules)))"
    done = script(heavy, "--version", home=tmp_path)
    assert done.stdout.splitlines()[1] == "set()"


def test_an_error_in_a_pipe_is_one_line_and_no_path_is_split(tmp_path: Path) -> None:
    path = tmp_path / ("long" * 40) / "[bold]" / "x.db"
    done = script("", "session", "list", "--store", path, home=tmp_path)
    assert (done.returncode, done.stderr) == (2, f"error: there is no store at {path}; name one with --store\n")


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("POLAR_HOME", str(tmp_path))
    code = main_of(monkeypatch, "demo", "-o", file / "below")
    assert code == 2
    assert capsys.readouterr().err == f"error: {file / 'below'}: Not a directory\n"


def test_a_store_in_a_file_of_something_else_is_named(polar: Polar, tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("not a database, but some text that is long enough to be read as a header of one " * 2)
    with pytest.raises(ConfigError, match=r"x\.db"):
        polar("session", "list", "--store", tmp_path / "x.db")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--harness", "pie"), "no harness is called 'pie'"),
        (("--builder", "nope"), "no builder is called 'nope'"),
        (("--runtime", "dokcer"), "no runtime is called 'dokcer'"),
    ],
)
def test_a_run_that_cannot_work_starts_nothing_and_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, options: tuple[str, str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main_of(monkeypatch, "run", "--limit", 1, *options) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_run_names_a_service_that_is_not_there_soon(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("polar.cli.run.FIRST_ANSWER_S", 0.1)
    assert main_of(monkeypatch, "run", "--limit", 1, "--url", "http://127.0.0.1:1") == 2
    assert "the rollout service at http://127.0.0.1:1 does not answer" in capsys.readouterr().err
