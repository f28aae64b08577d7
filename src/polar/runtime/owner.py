"""Who answers for sandboxes: one owner a process, known to be dead by a lock that can be taken.

    <root>/<owner id>/alive.lock       locked (flock) for as long as the owner's process lives: the kernel lets go at kill -9 and at reboot
    <root>/<owner id>/<sandbox id>/    one private folder a sandbox

An owner's id begins with eight hex digits of the hash of its root, so that what it made (containers and processes carry the id) is found
from the root alone, and two installations on one machine never touch each other's. Knows no backend.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import stat
from pathlib import Path

from polar.errors import ConfigError

LOCK = "alive.lock"
_SANDBOX_ID = re.compile(r"[a-z0-9-]{1,63}\Z")


def root_mark(root: Path) -> str:
    """What the ids of all owners of this root begin with."""
    return hashlib.sha256(os.fsencode(root.absolute().resolve())).hexdigest()[:8]


class Owner:
    """The owner that this process is, from `open` to `close` or to its end, however it ends."""

    def __init__(self, root: Path, owner_id: str, lock: int) -> None:
        self.root = root
        self.id = owner_id
        self._lock: int | None = lock

    @classmethod
    def open(cls, root: Path) -> Owner:
        """Makes `<root>/<id>`, readable by nobody else, and locks it. It appears under its name only when it is locked."""
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        root = root.absolute().resolve()
        owner_id = f"{root_mark(root)}-{secrets.token_hex(4)}"
        making = root / f".{owner_id}"
        making.mkdir(mode=0o700)
        lock = os.open(making / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        making.rename(root / owner_id)
        return cls(root, owner_id, lock)

    @property
    def folder(self) -> Path:
        return self.root / self.id

    def sandbox(self, sandbox_id: str) -> Path:
        """A new private folder. Raises `ConfigError` for an id that is no id, `FileExistsError` for one in use."""
        folder = self._path(sandbox_id)
        folder.mkdir(mode=0o700)
        return folder

    def remove(self, sandbox_id: str) -> None:
        """Removes the folder whatever modes and depths the program inside left; nothing happens where there is none. Blocks."""
        remove_tree(self._path(sandbox_id))

    def close(self) -> None:
        """Removes the owner's folder and lets go of the lock; the sandboxes were stopped before."""
        if self._lock is not None:
            remove_tree(self.folder)
            os.close(self._lock)
            self._lock = None

    def _path(self, sandbox_id: str) -> Path:
        if not _SANDBOX_ID.match(sandbox_id):
            raise ConfigError(f"a sandbox id is made of a-z, 0-9 and -, at most 63 characters: {sandbox_id!r} is not")
        return self.folder / sandbox_id


def owners(root: Path) -> list[str]:
    """The ids of the owners whose folders stand under `root`, half-made ones (without their dot) too."""
    mark = root_mark(root)
    if not root.is_dir():
        return []
    return sorted({one.name.lstrip(".") for one in root.iterdir() if one.name.lstrip(".").startswith(f"{mark}-") and not one.is_symlink()})


def owner_alive(root: Path, owner_id: str) -> bool:
    """Whether that owner's process lives. One whose folder is gone is dead."""
    lock = take_over(root, owner_id)
    if lock is not None:
        os.close(lock)
        return False
    return _lock_path(root, owner_id) is not None


def take_over(root: Path, owner_id: str) -> int | None:
    """The dead owner's lock, taken (close it to let go): while it is held, nobody else cleans up after that owner. `None`: it lives, or
    has no lock."""
    path = _lock_path(root, owner_id)
    if path is None:
        return None
    try:
        lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _lock_path(root: Path, owner_id: str) -> Path | None:
    for name in (owner_id, f".{owner_id}"):
        path = root / name / LOCK
        if path.exists():
            return path
    return None


def remove_tree(folder: Path) -> None:
    """Removes a folder with all in it. Follows no link, needs no permission bits, and works at any depth: every folder inside is first
    moved up to the top, so no path is ever longer than two names."""
    try:
        if not stat.S_ISDIR(folder.lstat().st_mode):
            folder.unlink()
            return
        folder.chmod(0o700)
    except FileNotFoundError:
        return
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        moved = 0
        while names := os.listdir(top):
            for name in names:
                if not stat.S_ISDIR(os.lstat(name, dir_fd=top).st_mode):
                    os.unlink(name, dir_fd=top)
                    continue
                os.chmod(name, 0o700, dir_fd=top)
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
                try:
                    for child in os.listdir(inner):
                        if stat.S_ISDIR(os.lstat(child, dir_fd=inner).st_mode):
                            os.chmod(child, 0o700, dir_fd=inner)
                            moved += 1
                            os.rename(child, f".moved-{moved}-{secrets.token_hex(4)}", src_dir_fd=inner, dst_dir_fd=top)
                        else:
                            os.unlink(child, dir_fd=inner)
                finally:
                    os.close(inner)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    folder.rmdir()
