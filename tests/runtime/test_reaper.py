"""The reaper: after `kill -9` of the process that answers for sandboxes, nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandboxes import SPECS, sandboxes_of, soon

from polar.runtime import Left, Owner, Runtime, processes
from polar.runtime.owner import root_mark
from polar.runtime.reaper import listing, reap
from polar.testing.runtime import FakeRuntime

OWNER = """
import asyncio, sys
from pathlib import Path
from polar.runtime import Owner, Place, RuntimeSpec, create, machine
if sys.argv[3] == "plain":
    machine.namespaces = lambda: "a test says so"
async def main():
    owner = Owner.open(Path(sys.argv[1]))
    runtimes = [create(RuntimeSpec(backend=sys.argv[2]), Place(f"s{n}", owner.id, owner.sandbox(f"s{n}"))) for n in range(2)]
    for one in runtimes:
        await one.start()
        await one.exec("mkdir -p closed; touch closed/x; chmod 0 closed; (env -i setsid sleep 300 &) ; sleep 300 & true")
    print(owner.id, flush=True)
    await asyncio.gather(*(one.exec("sleep 300") for one in runtimes))
asyncio.run(main())
"""


@pytest.fixture(params=["local", "plain", "bubblewrap"])
def killed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, str, bool]]:
    """A root, the id of an owner on it with two sandboxes at work, killed; and whether the kernel ends its processes."""
    backend = SPECS[request.param]["backend"]
    child = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path), backend, request.param], stdout=subprocess.PIPE)
    assert child.stdout is not None
    owner_id = child.stdout.readline().decode().strip()
    if not owner_id:
        pytest.skip(f"no sandbox of backend {request.param} here")
    assert processes.find(owner_prefix=owner_id)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    yield tmp_path, owner_id, request.param != "plain"
    processes.end(owner_prefix=owner_id, folder=tmp_path)


async def test_nothing_is_left_of_a_killed_owner(killed: tuple[Path, str, bool]) -> None:
    root, owner_id, contained = killed
    if contained:
        await soon(lambda: not processes.find(owner_prefix=owner_id))
    planned = await reap(root, dry_run=True)
    assert {one.name for one in planned if one.kind == "folder"} >= {str(root / owner_id), str(root / owner_id / "s0")}
    assert (root / owner_id / "s1").is_dir()
    removed = await reap(root)
    assert {one.owner for one in removed} == {owner_id}
    assert processes.find(owner_prefix=owner_id, folder=root) == []
    assert list(root.iterdir()) == []
    assert await reap(root) == []
    assert await listing(root) == []


def sleeper(owner_id: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "300"], env={"POLAR_OWNER": owner_id, "POLAR_SANDBOX": "x"})


def leave_five(root: Path) -> None:
    """Five dead owners with a sandbox each."""
    code = "import sys; from pathlib import Path; from polar.runtime.owner import Owner; Owner.open(Path(sys.argv[1])).sandbox('s')"
    for _ in range(5):
        subprocess.run([sys.executable, "-c", code, str(root)], check=True)


async def test_the_living_are_listed_and_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sandboxes_of("local", tmp_path, monkeypatch) as sandboxes:
        runtime = await sandboxes.make()
        await runtime.exec("sleep 300 &")
        found = await listing(tmp_path)
        assert {one.kind for one in found} == {"process", "folder"}
        assert {one.sandbox for one in found} >= {runtime.place.id}
        assert await reap(tmp_path) == []
        assert (await runtime.exec("echo well")).stdout == b"well\n"


async def test_another_roots_things_are_not_seen(tmp_path: Path) -> None:
    Owner.open(tmp_path / "a").close()
    other = Owner.open(tmp_path / "b")
    marked = sleeper("00000000-dead")
    try:
        assert await reap(tmp_path / "a") == []
        assert marked.poll() is None
        assert other.folder.is_dir()
    finally:
        marked.kill()
        marked.wait()
        other.close()


async def test_a_marked_process_without_any_folder_is_ended(tmp_path: Path) -> None:
    owner_id = f"{root_mark(tmp_path)}-0123abcd"
    marked = sleeper(owner_id)
    removed = await reap(tmp_path)
    assert [(one.kind, one.name, one.sandbox) for one in removed] == [("process", str(marked.pid), "x")]
    assert marked.wait() == -signal.SIGKILL


async def test_a_half_made_owner_is_removed(tmp_path: Path) -> None:
    half = tmp_path / f".{root_mark(tmp_path)}-0123abcd"
    half.mkdir()
    (half / "alive.lock").touch()
    assert [one.name for one in await reap(tmp_path)] == [str(half)]
    assert os.listdir(tmp_path) == []


async def test_backends_are_asked_for_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = Left("container", "c1", "s", f"{root_mark(tmp_path)}-0123abcd")
    others = Left("container", "c2", "s", "ffffffff-0123abcd")
    there = [dead, others]

    async def find(cls: type[Runtime]) -> list[Left]:
        return list(there)

    async def remove(cls: type[Runtime], left: Left) -> None:
        if left in there:
            there.remove(left)  # asked again through a backend that another test derived from this one

    monkeypatch.setattr(FakeRuntime, "find", classmethod(find))
    monkeypatch.setattr(FakeRuntime, "remove", classmethod(remove))
    assert await reap(tmp_path, dry_run=True) == [dead]
    assert await reap(tmp_path) == [dead]
    assert there == [others]


async def test_two_reapers_do_not_meet(tmp_path: Path) -> None:
    leave_five(tmp_path)
    both = await asyncio.gather(reap(tmp_path), reap(tmp_path))
    assert os.listdir(tmp_path) == []
    names = [one.name for removed in both for one in removed]
    assert len(names) == len(set(names)) == 10
