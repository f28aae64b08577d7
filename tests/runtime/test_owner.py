"""Owners: private folders, and a death that cannot be hidden."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polar.errors import ConfigError
from polar.runtime import Owner, owner_alive
from polar.runtime.owner import LOCK, owners, remove_tree, root_mark, take_over

OPEN = (
    "import sys; from pathlib import Path; from polar.runtime.owner import Owner; "
    "owner = Owner.open(Path(sys.argv[1])); print(owner.id, flush=True)"
)


def test_an_owner_lives_until_it_closes(tmp_path: Path) -> None:
    owner = Owner.open(tmp_path / "root")
    assert owner.id.startswith(f"{root_mark(tmp_path / 'root')}-")
    assert owner_alive(tmp_path / "root", owner.id)
    assert owner.folder.stat().st_mode & 0o777 == 0o700
    owner.close()
    owner.close()
    assert not owner_alive(tmp_path / "root", owner.id)
    assert not owner.folder.exists()


def test_an_owner_is_dead_after_kill_9(tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", f"{OPEN}; sys.stdin.read()", str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    owner_id = child.stdout.readline().decode().strip()
    assert owner_alive(tmp_path, owner_id)
    assert take_over(tmp_path, owner_id) is None
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not owner_alive(tmp_path, owner_id)
    assert owners(tmp_path) == [owner_id]


def test_a_program_that_the_owner_started_does_not_keep_it_alive(tmp_path: Path) -> None:
    code = f"{OPEN}; import subprocess; print(subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL).pid, flush=True)"
    child = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, check=True)
    owner_id, pid = child.stdout.decode().split()
    try:
        assert not owner_alive(tmp_path, owner_id)
    finally:
        os.kill(int(pid), signal.SIGKILL)


def test_one_cleans_up_at_a_time(tmp_path: Path) -> None:
    child = subprocess.run([sys.executable, "-c", OPEN, str(tmp_path)], stdout=subprocess.PIPE, check=True)
    owner_id = child.stdout.decode().strip()
    lock = take_over(tmp_path, owner_id)
    assert lock is not None
    assert take_over(tmp_path, owner_id) is None
    os.close(lock)


def test_roots_are_told_apart_and_a_link_to_one_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    assert root_mark(tmp_path / "a") != root_mark(tmp_path / "b")
    assert root_mark(tmp_path / "a") == root_mark(tmp_path / "link")


def test_a_sandboxes_folder_is_private_and_its_id_safe(tmp_path: Path) -> None:
    owner = Owner.open(tmp_path)
    folder = owner.sandbox("s-1")
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(FileExistsError):
        owner.sandbox("s-1")
    for bad in ("", "..", "a/b", "A", "x" * 64, "a\n"):
        with pytest.raises(ConfigError):
            owner.sandbox(bad)
        with pytest.raises(ConfigError):
            owner.remove(bad)
    owner.close()


def test_a_folder_is_removed_whatever_was_left_in_it(tmp_path: Path) -> None:
    owner = Owner.open(tmp_path / "root")
    folder = owner.sandbox("s")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("x")
    (folder / "link").symlink_to(outside)
    closed = folder / "closed" / "inner"
    closed.mkdir(parents=True)
    (closed / "file").write_text("x")
    (closed / "file").chmod(0)
    closed.chmod(0)
    closed.parent.chmod(0)
    os.mkfifo(folder / "pipe")
    (folder / LOCK).mkdir()
    owner.remove("s")
    owner.remove("s")
    assert not folder.exists()
    assert (outside / "kept").exists()
    owner.close()


def test_a_folder_of_any_depth_is_removed(tmp_path: Path) -> None:
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 50, dir_fd=fd)
        inner = os.open("d" * 50, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    os.close(fd)
    remove_tree(top)
    assert list(tmp_path.iterdir()) == []
