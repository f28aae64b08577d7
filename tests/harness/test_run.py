"""Running: a private home, a clean environment, a wall clock, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.harness import Endpoint, Options, RunResult, launch
from polar.harness.run import MARKER

AT = Endpoint("http://127.0.0.1:9/s/key", "key", "openai_chat", "model")


def shell(tmp_path: Path, command: str, prompt: str = "do it", timeout_s: float = 20.0) -> RunResult:
    options = Options(extra_args=(command,))
    return asyncio.run(launch("shell", prompt, AT, cwd=tmp_path / "work", home=tmp_path / "home", timeout_s=timeout_s, options=options))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return open(f"/proc/{pid}/stat").read().split()[2] != "Z"


def test_the_environment_is_made_from_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a key of the user's")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    result = shell(tmp_path, "env")
    seen = dict(line.split("=", 1) for line in (result.answer or "").splitlines() if "=" in line)
    assert seen["OPENAI_API_KEY"] == "key"
    assert "HTTPS_PROXY" not in seen
    assert seen["HOME"] == str(tmp_path / "home")


def test_the_exit_code_and_both_outputs_are_kept(tmp_path: Path) -> None:
    result = shell(tmp_path, "echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.ok) == (3, False)
    assert result.stdout.read_text() == "out\n"
    assert result.stderr.read_text() == "err\n"
    assert result.problem == "exit code 3: err"


def test_a_prompt_without_a_placeholder_comes_by_stdin(tmp_path: Path) -> None:
    assert shell(tmp_path, "cat", prompt="by stdin").answer == "by stdin"


def test_the_instruction_file_holds_the_prompt(tmp_path: Path) -> None:
    assert shell(tmp_path, "cat {{INSTRUCTION_FILE}}", prompt="it's in a file").answer == "it's in a file"


def test_stdin_is_empty_where_the_prompt_goes_elsewhere(tmp_path: Path) -> None:
    assert shell(tmp_path, "echo {{INSTRUCTION}}; cat", prompt="x").answer == "x"


def test_a_run_that_takes_too_long_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    started = time.monotonic()
    command = "setsid sh -c 'echo $$ > escaped.pid; trap \"\" TERM; sleep 60' & sleep 60 & echo $! > child.pid; wait"
    result = shell(tmp_path, command, timeout_s=1.0)
    assert result.timed_out
    assert "still running" in (result.problem or "")
    assert time.monotonic() - started < 15
    for name in ("escaped.pid", "child.pid"):
        assert not alive(int((tmp_path / "work" / name).read_text()))


def test_what_a_finished_run_leaves_behind_is_stopped(tmp_path: Path) -> None:
    result = shell(tmp_path, "setsid sleep 60 > /dev/null 2>&1 & echo $!")
    assert result.ok
    assert not alive(int(result.answer or "0"))


def test_cancelling_a_run_stops_its_processes(tmp_path: Path) -> None:
    async def scenario() -> None:
        options = Options(extra_args=("echo $$ > me.pid; sleep 60",))
        task = asyncio.create_task(launch("shell", "x", AT, cwd=tmp_path, home=tmp_path / "home", timeout_s=60, options=options))
        while not (tmp_path / "me.pid").exists() or not (tmp_path / "me.pid").read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(scenario())
    assert not alive(int((tmp_path / "me.pid").read_text()))


def test_each_run_of_a_home_has_its_own_output(tmp_path: Path) -> None:
    first, second = shell(tmp_path, "echo 1"), shell(tmp_path, "echo 2")
    assert (first.answer, second.answer) == ("1", "2")
    assert first.stdout.read_text() == "1\n"


def test_a_missing_harness_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLAR_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="polar harness install codex"):
        asyncio.run(launch("codex", "x", AT, cwd=tmp_path, home=tmp_path / "home", timeout_s=1))


def test_every_process_of_a_run_carries_its_marker(tmp_path: Path) -> None:
    assert f"{MARKER}=" in (shell(tmp_path, "sh -c env").answer or "")
