"""Which gateway, and which store, the commands talk to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from polar.cli.control import Admin, alive, announced, running, state_file, store_place, store_url
from polar.errors import ConfigError

Polar = Callable[..., Any]
FIRST, SECOND = Admin("http://127.0.0.1:8101", "one"), Admin("http://127.0.0.1:8201", "two")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLAR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_the_newest_gateway_is_found_and_the_older_one_again_when_it_ends() -> None:
    with announced(FIRST, "/stores/one.db"):
        with announced(SECOND, "/stores/two.db"):
            assert (running(), store_url(None)) == (SECOND, "/stores/two.db")
        assert (running(), store_url(None)) == (FIRST, "/stores/one.db")
        assert json.loads(state_file().read_bytes())["admin_token"] == "one"


def test_an_older_gateway_that_ends_first_takes_nothing_with_it() -> None:
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(announced(FIRST, "/one.db"))
        second.enter_context(announced(SECOND, "/two.db"))
        first.close()
        assert running() == SECOND


def test_without_a_gateway_reading_finds_the_last_store_and_control_says_so(home: Path) -> None:
    assert store_url(None) == str(home / "polar.db")
    with announced(FIRST, "/stores/one.db"):
        pass
    assert store_url(None) == "/stores/one.db"
    with pytest.raises(ConfigError, match="no gateway is running"):
        running()


def test_a_gateway_that_was_killed_is_not_taken_for_running(home: Path) -> None:
    code = (
        "import os, signal; from polar.cli.control import Admin, announced\n"
        "with announced(Admin('http://127.0.0.1:9', 'dead'), '/dead.db'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    with announced(FIRST, "/one.db"):
        subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
        assert len(list((home / "gateways").glob("*.json"))) == 2
        assert running() == FIRST
        assert len(alive()) == len(list((home / "gateways").glob("*.json"))) == 1


def test_state_is_readable_by_its_owner_only(home: Path) -> None:
    with announced(FIRST, "/one.db"):
        for path in (state_file(), *(home / "gateways").glob("*.json")):
            assert path.stat().st_mode & 0o777 == 0o600


def test_a_relative_store_is_announced_by_its_whole_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with announced(FIRST, "x.db"):
        monkeypatch.chdir("/")
        assert store_url(None) == str(tmp_path / "x.db")
    assert store_place("sqlite:////data/x.db") == "/data/x.db"
    assert store_place("postgresql://host/polar") == "postgresql://host/polar"


@pytest.mark.parametrize("command", [["list"], ["show", "x"], ["export", "x"]])
@pytest.mark.parametrize("form", ["{}", "sqlite:{}", "sqlite:///{}"])
def test_reading_makes_no_store(polar: Polar, tmp_path: Path, command: list[str], form: str) -> None:
    path = tmp_path / "nope.db"
    with pytest.raises(ConfigError, match="there is no store at"):
        polar("session", *command, "--store", form.format(path))
    assert not path.exists()
