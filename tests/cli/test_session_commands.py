"""`polar session export` and `env`, `polar harness run`: files, URLs and folders as they are given."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar.cli.guide import session_url
from polar.cli.output import written
from polar.errors import ConfigError
from polar.records import Session
from polar.store import open_store

Polar = Callable[..., Any]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one session, `ses_1`, and no calls."""

    async def make() -> None:
        opened = open_store(tmp_path / "polar.db")
        await opened.create_session(Session("ses_1", b"hash", b"secret"))
        await opened.aclose()

    asyncio.run(make())
    return tmp_path / "polar.db"


def test_a_list_without_a_gateway_is_of_the_named_store(polar: Polar, store: Path) -> None:
    assert "ses_1" in polar("session", "list", "--store", store).stdout
    assert "ses_1" in polar("session", "list", "--store", f"sqlite:{store}").stdout


@pytest.mark.parametrize("place", ["nowhere/file.jsonl", "."])
def test_an_export_that_cannot_be_written_says_so(polar: Polar, store: Path, tmp_path: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        polar("session", "export", "ses_1", "--store", store, "-o", tmp_path / place)
    assert [path for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_an_export_stands_under_its_name_when_it_is_complete(polar: Polar, store: Path, tmp_path: Path) -> None:
    polar("session", "export", "ses_1", "--store", store, "-o", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    (tmp_path / "old").write_text("old")

    def interrupted() -> None:
        with written(tmp_path / "old") as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert (tmp_path / "old").read_text() == "old"


@pytest.mark.parametrize("behind", ["", "/", "/v1", "/v1/", "/v1beta"])
@pytest.mark.parametrize("root", ["http://127.0.0.1:8100/s/KEY", "https://proxy.example/polar/s/KEY", "http://[::1]:8100/s/KEY"])
def test_a_providers_own_path_behind_a_sessions_url_is_left_out(root: str, behind: str) -> None:
    assert session_url(root + behind) == (root, "KEY")


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8100", "http://127.0.0.1:8100/v1", "127.0.0.1/s/KEY", "http://h/s/", "http://h/s/K/x", ""]
)
def test_what_is_no_sessions_url_is_refused_by_all_commands(polar: Polar, tmp_path: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="is not the base URL of a session"):
        polar("session", "env", url)
    with pytest.raises(ConfigError, match="is not the base URL of a session"):
        polar("harness", "run", "shell", "x", "--base-url", url, "--cwd", tmp_path)


def run_shell(polar: Polar, cwd: Path, line: str, *options: object, code: int = 0) -> Any:
    return polar("harness", "run", "shell", "x", "--base-url", "http://127.0.0.1:9/s/KEY", "--cwd", cwd, *options, "--", line, code=code)


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Path]]:
    """The home folders that runs left behind."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return lambda: list((tmp_path / "temporary").iterdir())


def test_a_run_works_in_a_folder_that_is_there(polar: Polar, tmp_path: Path, homes: Callable[[], list[Path]]) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        run_shell(polar, tmp_path / "nonexistent", "true")
    assert not (tmp_path / "nonexistent").exists()
    assert homes() == []


def test_a_home_is_removed_after_success_unless_it_shall_stay(polar: Polar, tmp_path: Path, homes: Callable[[], list[Path]]) -> None:
    run_shell(polar, tmp_path, "pwd > here")
    assert (tmp_path / "here").read_text().strip() == str(tmp_path)
    assert homes() == []
    kept = run_shell(polar, tmp_path, "true", "--keep")
    assert [str(home) in kept.stderr for home in homes()] == [True]


def test_a_home_is_kept_after_a_failure_and_named(polar: Polar, tmp_path: Path, homes: Callable[[], list[Path]]) -> None:
    failed = run_shell(polar, tmp_path, "echo out; exit 3", code=1)
    (home,) = homes()
    assert f"its output is in {home / 'polar-run'}\n" in failed.stderr
    assert (home / "polar-run" / "0.stdout").read_text() == "out\n"


def test_a_run_that_did_not_start_leaves_no_home(polar: Polar, tmp_path: Path, homes: Callable[[], list[Path]]) -> None:
    with pytest.raises(ConfigError):
        polar("harness", "run", "shell", "x", "--base-url", "http://127.0.0.1:9/s/KEY", "--cwd", tmp_path)  # no command
    assert homes() == []


def test_exported_lines_go_to_standard_output(polar: Polar, store: Path) -> None:
    lines = polar("session", "export", "ses_1", "--store", store).stdout.splitlines()
    assert [orjson.loads(line) for line in lines] == []
