"""An export that is interrupted goes on where it was, and writes the same bytes as one that was not."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from export_samples import Talk, fill, solved
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.export import About, Spec, export
from polar.export.parts import JsonLines
from polar.export.state import Part, State
from polar.records import Completion
from polar.store import open_store
from polar.store.base import Store

SMALL = 1 / 1024  # a part holds about a kilobyte
ABOUT = About("Test")


class Stop(Exception):
    """What interrupts."""


class Stopping:
    """A store that fails at its nth session."""

    def __init__(self, store: Store, after: int) -> None:
        self.store = store
        self.left = after

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    async def completions(self, session_id: str) -> AsyncIterator[Completion]:
        if self.left == 0:
            raise Stop
        self.left -= 1
        async for completion in self.store.completions(session_id):
            yield completion


def many(count: int) -> list[Talk]:
    return [
        solved(f"s{i:05d}", created=float(i), task=f"t{i % 7}", repository=f"r{i % 7}", reward=float(i % 3 > 0), turns=1 + i % 3)
        for i in range(count)
    ]


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


@settings(max_examples=5, deadline=None)
@given(
    stops=st.lists(st.integers(0, 25), min_size=1, max_size=4),
    form=st.sampled_from(["chat", "rl"]),
    file_format=st.sampled_from(["parquet", "jsonl"]),
)
def test_an_interrupted_export_ends_in_the_same_bytes(stops: list[int], form: Any, file_format: Any) -> None:
    spec = Spec(form=form, file_format=file_format, splits={"test": 0.3}, part_mb=SMALL)

    async def run(folder: Path) -> None:
        store = await fill(folder / "a.db", many(30))
        try:
            await export(store, "x", folder / "whole", spec, about=ABOUT)
            for stop in stops:
                try:
                    await export(Stopping(store, stop), "x", folder / "torn", spec, about=ABOUT)  # type: ignore[arg-type]
                except Stop:
                    assert not (folder / "torn" / "manifest.json").exists()
            await export(store, "x", folder / "torn", spec, about=ABOUT)
        finally:
            await store.aclose()
        assert len(list((folder / "whole" / "data").iterdir())) > 4
        assert digests(folder / "whole") == digests(folder / "torn")

    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(run(Path(scratch)))


async def test_what_was_done_is_not_done_again(tmp_path: Path) -> None:
    store = await fill(tmp_path / "a.db", many(30))
    spec = Spec(file_format="jsonl", part_mb=SMALL)
    with pytest.raises(Stop):
        await export(Stopping(store, 20), "x", tmp_path / "out", spec, about=ABOUT)  # type: ignore[arg-type]
    done = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "data").glob("*.jsonl")}
    assert done
    counting = Stopping(store, 30)
    await export(counting, "x", tmp_path / "out", spec, about=ABOUT)  # type: ignore[arg-type]
    assert counting.left > 15
    assert all(path.stat().st_mtime_ns == at for path, at in done.items())
    await store.aclose()


async def test_a_finished_export_is_left_as_it_is(tmp_path: Path) -> None:
    store = await fill(tmp_path / "a.db", many(3))
    spec = Spec(file_format="jsonl")
    first = await export(store, "x", tmp_path / "out", spec, about=ABOUT)
    before = digests(tmp_path / "out")
    assert await export(store, "x", tmp_path / "out", spec, about=ABOUT) == first
    assert digests(tmp_path / "out") == before
    with pytest.raises(ConfigError, match="another finished export"):
        await export(store, "x", tmp_path / "out", Spec(file_format="jsonl", min_reward=1.0), about=ABOUT)
    await store.aclose()


async def test_an_export_does_not_go_on_with_other_options_or_another_store(tmp_path: Path) -> None:
    store = await fill(tmp_path / "a.db", many(10))
    spec = Spec(file_format="jsonl", part_mb=SMALL)
    with pytest.raises(Stop):
        await export(Stopping(store, 7), "x", tmp_path / "out", spec, about=ABOUT)  # type: ignore[arg-type]
    for name, other in (("y", spec), ("x", Spec(file_format="jsonl", part_mb=SMALL, form="rl"))):
        with pytest.raises(ConfigError, match="unfinished export with other options or of another store"):
            await export(store, name, tmp_path / "out", other, about=ABOUT)
    await export(store, "x", tmp_path / "out", spec, about=ABOUT)
    await store.aclose()


async def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    store = await fill(tmp_path / "a.db", many(1))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="neither empty nor an unfinished export"):
        await export(store, "x", tmp_path / "out", Spec(file_format="jsonl"), about=ABOUT)
    await store.aclose()


async def test_a_part_that_was_changed_is_noticed(tmp_path: Path) -> None:
    store = await fill(tmp_path / "a.db", many(30))
    spec = Spec(file_format="jsonl", part_mb=SMALL)
    with pytest.raises(Stop):
        await export(Stopping(store, 20), "x", tmp_path / "out", spec, about=ABOUT)  # type: ignore[arg-type]
    next((tmp_path / "out" / "data").glob("*.jsonl")).write_text("{}")
    with pytest.raises(ConfigError, match="changed or removed"):
        await export(store, "x", tmp_path / "out", spec, about=ABOUT)
    await store.aclose()


async def test_two_exports_do_not_write_into_one_folder(tmp_path: Path) -> None:
    store = await fill(tmp_path / "a.db", many(3))
    (tmp_path / "out").mkdir()
    spec = Spec(file_format="jsonl")
    other = State.open(tmp_path / "out" / ".export.db", spec.fingerprint("x"))
    with pytest.raises(ConfigError, match="another export"):
        await export(store, "x", tmp_path / "out", spec, about=ABOUT)
    other.close()
    await export(store, "x", tmp_path / "out", spec, about=ABOUT)
    await store.aclose()


async def test_memory_does_not_grow_with_the_number_of_sessions(tmp_path: Path) -> None:
    """So a million rows need what a thousand need: a few sessions, a row group for each split, and pages of the plan."""
    peaks = {}
    for count in (20, 60, 240):  # the first one is for what is imported and cached once
        store = await fill(tmp_path / f"{count}.db", many(count))
        await store.aclose()
        store = open_store(tmp_path / f"{count}.db", cache_bytes=1 << 18)
        tracemalloc.start()
        try:
            spec = Spec(splits={"test": 0.3}, part_mb=1 / 16, best_of=100_000)
            await export(store, "x", tmp_path / f"out{count}", spec, about=ABOUT)
            peaks[count] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            await store.aclose()
    assert peaks[240] < 1.25 * peaks[60] + (1 << 19), peaks
    assert peaks[240] < 16 << 20
    assert pa.default_memory_pool().max_memory() < 64 << 20


async def test_a_full_disk_is_a_clear_error_and_the_export_goes_on_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await fill(tmp_path / "a.db", many(30))
    spec = Spec(file_format="jsonl", part_mb=SMALL)
    finish, left = JsonLines.finish, 3

    def failing(self: JsonLines) -> Part:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return finish(self)

    with monkeypatch.context() as patched:
        patched.setattr(JsonLines, "finish", failing)
        with pytest.raises(ConfigError, match="No space left on device; the same command goes on"):
            await export(store, "x", tmp_path / "torn", spec, about=ABOUT)
    await export(store, "x", tmp_path / "torn", spec, about=ABOUT)
    await export(store, "x", tmp_path / "whole", spec, about=ABOUT)
    assert digests(tmp_path / "torn") == digests(tmp_path / "whole")
    await store.aclose()


@pytest.mark.real
def test_kill_9_in_the_middle_costs_a_part_at_most(tmp_path: Path) -> None:
    async def prepare() -> None:
        await (await fill(tmp_path / "a.db", many(400))).aclose()

    asyncio.run(prepare())
    child = "import sys, asyncio; sys.path.insert(0, sys.argv[1]); import test_export_resume as t; asyncio.run(t.again(*sys.argv[2:]))"
    command = [sys.executable, "-c", child, str(Path(__file__).parent), str(tmp_path)]
    killed = 0
    for parts in (2, 10, 30):
        process = subprocess.Popen([*command, "torn"])
        deadline = time.monotonic() + 60
        while process.poll() is None and len(list((tmp_path / "torn").glob("data/*.jsonl"))) < parts and time.monotonic() < deadline:
            time.sleep(0.01)
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.wait()
    assert killed
    for name in ("torn", "whole"):
        subprocess.run([*command, name], check=True, timeout=120)
    assert digests(tmp_path / "torn") == digests(tmp_path / "whole")


async def again(folder: str, name: str) -> None:
    """What the process that is killed does."""
    store = open_store(Path(folder) / "a.db")
    try:
        await export(store, "x", Path(folder) / name, Spec(file_format="jsonl", part_mb=4 * SMALL), about=ABOUT)
    finally:
        await store.aclose()
