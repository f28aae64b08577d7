"""The steps that prepare a sandbox."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from polar.errors import ConfigError, SandboxError
from polar.runtime import Place, RuntimeSpec, Step, create
from polar.runtime.prepare import prepare
from polar.testing.runtime import Answer, Command, FakeRuntime


@pytest.fixture
async def runtime(tmp_path: Path) -> FakeRuntime:
    made = create(RuntimeSpec(backend="fake"), Place("s", "o", tmp_path))
    assert isinstance(made, FakeRuntime)
    await made.start()
    return made


async def test_steps_run_in_order_with_their_settings(runtime: FakeRuntime, tmp_path: Path) -> None:
    task = tmp_path / "task"
    (task / "files").mkdir(parents=True)
    (task / "one").write_text("1")
    (task / "files" / "two").write_text("2")
    steps = [
        Step(type="upload_file", source="one", target="/data/one"),
        Step(type="upload_dir", source="files", target="folder"),
        Step(type="exec", command="make", cwd="/src", env={"A": "1"}, timeout_seconds=5),
    ]
    await prepare(runtime, steps, task_folder=task)
    assert runtime.path("/data/one").read_text() == "1"
    assert runtime.path("folder/two").read_text() == "2"
    asked = runtime.counts.commands[0]
    assert (asked.line, asked.cwd, asked.env["A"], asked.timeout_s) == ("make", "/src", "1", 5)


async def test_a_failing_step_is_named_with_its_code_and_output(
    runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeRuntime, "script", staticmethod(lambda command: Answer(3, b"out", b"it broke")))
    with pytest.raises(SandboxError, match=r"prepare step 2 of 2 \(exec: make all\) failed: exit code 3; .*it broke"):
        await prepare(
            runtime, [Step(type="upload_file", source=__file__, target="x"), Step(type="exec", command="make all")], task_folder=None
        )


async def test_a_step_is_tried_again_with_growing_waits(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[float] = []

    def script(command: Command) -> int:
        tries.append(time.monotonic())
        return 0 if len(tries) == 3 else 1

    monkeypatch.setattr(FakeRuntime, "script", staticmethod(script))
    await prepare(runtime, [Step(type="exec", command="x", max_attempts=3, retry_backoff=0.1)], task_folder=None)
    assert len(tries) == 3
    assert tries[1] - tries[0] >= 0.1
    assert tries[2] - tries[1] >= 0.2


async def test_a_step_whose_attempts_run_out_fails(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRuntime, "script", staticmethod(lambda command: 1))
    with pytest.raises(SandboxError, match="attempt 2 of 2"):
        await prepare(runtime, [Step(type="exec", command="x", max_attempts=2, retry_backoff=0)], task_folder=None)
    assert len(runtime.counts.commands) == 2


@pytest.mark.parametrize(
    ("step", "says"),
    [
        (Step(type="upload_file", source="no", target="x"), "there is no file"),
        (Step(type="upload_dir", source="no", target="x"), "there is no folder"),
    ],
)
async def test_a_missing_source_is_named(runtime: FakeRuntime, tmp_path: Path, step: Step, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        await prepare(runtime, [step], task_folder=tmp_path)


async def test_a_relative_source_needs_a_task_folder(runtime: FakeRuntime) -> None:
    with pytest.raises(ConfigError, match="the task has no folder"):
        await prepare(runtime, [Step(type="upload_file", source="x", target="x")], task_folder=None)


async def test_a_step_that_takes_too_long(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(command: Command) -> int:
        await asyncio.sleep(10)
        return 0

    monkeypatch.setattr(FakeRuntime, "script", staticmethod(slow))
    with pytest.raises(SandboxError, match=r"its 0\.05 s ran out"):
        await prepare(runtime, [Step(type="exec", command="x", timeout_seconds=0.05)], task_folder=None)


async def test_the_log_has_every_step_and_its_output(runtime: FakeRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeRuntime, "script", staticmethod(lambda command: Answer(0, b"hello\n")))
    await prepare(runtime, [Step(type="exec", command="echo hello")], task_folder=None, log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == "== prepare step 1 of 1 (exec: echo hello)\nhello\n"
