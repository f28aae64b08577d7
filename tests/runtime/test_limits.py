"""Limits of `local` and `bubblewrap`, and what they refuse."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from sandboxes import Sandboxes

from polar.errors import ConfigError, SandboxError
from polar.runtime import Place, RuntimeSpec, create, machine
from polar.runtime.kept import used
from polar.runtime.spec import DEFAULT_PIDS
from polar.testing.runtime import FakeRuntime

OURS = ("local", "plain", "bubblewrap")


async def test_memory(sandboxes: Sandboxes) -> None:
    if sandboxes.name not in OURS:
        pytest.skip("another room's")
    runtime = await sandboxes.make(memory_mb=200)
    assert (await runtime.exec(["python3", "-c", "x = bytearray(100 << 20); print(len(x))"])).ok
    assert not (await runtime.exec(["python3", "-c", "x = bytearray(300 << 20); print(len(x))"])).ok


async def test_processes(sandboxes: Sandboxes) -> None:
    if sandboxes.name not in ("local", "bubblewrap"):
        pytest.skip("counted together with all of the user's")
    runtime = await sandboxes.make(pids=20)
    result = await runtime.exec("for n in $(seq 60); do sleep 2 & done; wait", timeout_s=30)
    assert b"fork" in result.stderr or b"Resource temporarily unavailable" in result.stderr


async def test_a_program_that_forks_without_end_stops_itself(sandboxes: Sandboxes) -> None:
    if sandboxes.name not in ("local", "bubblewrap"):
        pytest.skip("counted together with all of the user's")
    runtime = await sandboxes.make()
    assert int((await runtime.exec("ulimit -u")).text) == DEFAULT_PIDS


async def test_cores(sandboxes: Sandboxes) -> None:
    if sandboxes.name not in OURS:
        pytest.skip("another room's")
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core is all there is")
    runtime = await sandboxes.make(cpus=1)
    assert (await runtime.exec(["nproc"])).stdout == b"1\n"


async def test_disk(sandboxes: Sandboxes) -> None:
    if sandboxes.name not in OURS:
        pytest.skip("another room's")
    runtime = await sandboxes.make(storage_mb=20)
    result = await runtime.exec("head -c 60000000 /dev/zero > big; sleep 20", timeout_s=15)
    assert result.exit_code == 137
    assert b"20 MB are used up" in result.stderr


async def test_folders_deeper_than_any_path_hide_no_disk(sandboxes: Sandboxes) -> None:
    if sandboxes.name not in OURS:
        pytest.skip("another room's")
    runtime = await sandboxes.make(storage_mb=20)
    code = (
        "import os, time\nfor _ in range(2500):\n os.mkdir('d')\n os.chdir('d')\n"
        "with open('big', 'wb') as file: file.write(bytes(60 << 20))\ntime.sleep(20)"
    )
    result = await runtime.exec(["python3", "-c", code], timeout_s=15)
    assert result.exit_code == 137
    assert b"20 MB are used up" in result.stderr


def test_what_a_folder_takes_is_counted_at_every_depth_and_leaves_no_descriptor(tmp_path: Path) -> None:
    here = tmp_path
    for depth in range(100):
        here = here / f"d{depth}"
        here.mkdir()
        (here / "file").write_bytes(bytes(8192))
    (here / "link").symlink_to("/usr")
    before = len(os.listdir("/proc/self/fd"))
    assert 100 * 8192 <= used(tmp_path) <= 100 * 24_576
    assert used(tmp_path / "gone") == 0
    assert len(os.listdir("/proc/self/fd")) == before


async def test_large_address_spaces_are_no_memory(sandboxes: Sandboxes) -> None:
    """JavaScript engines reserve address space by the terabyte."""
    if sandboxes.name not in OURS:
        pytest.skip("another room's")
    runtime = await sandboxes.make(memory_mb=1000)
    code = "import mmap; m = mmap.mmap(-1, 1 << 36, prot=0, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000); print('reserved')"
    assert (await runtime.exec(["python3", "-c", code])).stdout == b"reserved\n"


@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
@pytest.mark.parametrize(
    "wrong",
    [{"build_context": "x"}, {"gpus": 1}, {"kwargs": {"a": 1}}, {"cpus": 0.5}, {"user": "no-such-user"}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_what_cannot_be_heeded_is_refused(backend: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{backend}|cpus"):
        create(RuntimeSpec(backend=backend, **wrong), Place("s", "o", tmp_path))


def test_an_image_is_refused_by_local_and_checked_by_bubblewrap(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="image"):
        create(RuntimeSpec(image="python:3.12"), Place("s", "o", tmp_path))
    with pytest.raises(ConfigError, match="root file system"):
        create(RuntimeSpec(backend="bwrap", image="python:3.12"), Place("s", "o", tmp_path))


def test_without_namespaces_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "namespaces", lambda: "a test says so")
    for wrong in ({"pids": 10}, {"workdir": "/app"}, {"mounts": [{"source": "/usr", "target": "/x"}]}):
        with pytest.raises(ConfigError, match="a test says so"):
            create(RuntimeSpec(**wrong), Place("s", "o", tmp_path))  # type: ignore[arg-type]
    create(RuntimeSpec(mounts=[{"source": "/usr", "target": "/usr"}]), Place("s", "o", tmp_path))  # type: ignore[list-item]


def test_bridge_without_its_program_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="slirp4netns"):
        create(RuntimeSpec(backend="bubblewrap", network="bridge"), Place("s", "o", tmp_path))


def test_an_import_path_names_a_runtime(tmp_path: Path) -> None:
    made = create(RuntimeSpec(import_path="polar.testing.runtime:FakeRuntime"), Place("s", "o", tmp_path))
    assert isinstance(made, FakeRuntime)
    for wrong in ("polar.testing.runtime", "polar.testing.runtime:Counts", "no.such:Thing", ":"):
        with pytest.raises(ConfigError, match="import_path"):
            create(RuntimeSpec(import_path=wrong), Place("s", "o", tmp_path))


def test_an_unknown_backend_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there are: .*local"):
        create(RuntimeSpec(backend="nope"), Place("s", "o", tmp_path))


async def test_failures_can_be_planted_in_the_fake(tmp_path: Path) -> None:
    made = create(RuntimeSpec(backend="fake", kwargs={"fail": {"start": "no room"}}), Place("s", "o", tmp_path))
    with pytest.raises(SandboxError, match="planted: no room"):
        await made.start()
