"""Logs and artefacts of attempts: `<root>/<session>/<attempt>/`, with keys taken out of every text, kept for a time and up to a size.

    harness.stdout, harness.stderr   what the agent program printed
    answer.txt, patch.diff           its final answer, and what it changed
    transcript/                      the CLI's own records
    prepare.log, evaluator/          what preparing and judging printed, and the evaluator's report
    trajectory.json.zst              the rewarded rows
    result.json                      the result without its rows

Knows no attempt and no HTTP. What lies here may have been written by an agent: links are never followed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from polar.gateway.sessions import KEY_PREFIX

KEY = re.compile(re.escape(KEY_PREFIX).encode() + rb"[A-Za-z0-9_-]{20,64}")
SCRUBBED = KEY_PREFIX.encode() + b"*" * 8
_PIECE = 1 << 20
_OVERLAP = 256
"""More than the longest key: so much of a piece is looked at again with the next."""


def scrub(text: bytes) -> bytes:
    """The text with every session key replaced."""
    return KEY.sub(SCRUBBED, text)


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file of an attempt; `path` is relative to the attempt's folder, with slashes."""

    path: str
    size: int


class Artifacts:
    """All folders below `root`. Methods block on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, session_id: str, attempt: int) -> Path:
        return self.root / session_id / str(attempt)

    def make(self, session_id: str, attempt: int) -> Path:
        """An empty private folder for this attempt."""
        folder = self.folder(session_id, attempt)
        if folder.exists():  # an attempt of the same number before a crash: nobody owns it any more
            shutil.rmtree(folder)
        folder.mkdir(parents=True, mode=0o700)
        return folder

    def latest(self, session_id: str) -> int | None:
        """The highest attempt number that has a folder here."""
        try:
            numbers = [int(entry.name) for entry in os.scandir(self.root / session_id) if entry.name.isdigit()]
        except (FileNotFoundError, NotADirectoryError):
            return None
        return max(numbers, default=None)

    def files(self, session_id: str, attempt: int) -> list[Artifact]:
        """Regular files only, in order of their paths."""
        folder = self.folder(session_id, attempt)
        return sorted((Artifact(str(path.relative_to(folder)), size) for path, size in _regular(folder)), key=lambda one: one.path)

    def open(self, session_id: str, attempt: int, path: str) -> int:
        """A descriptor of one file, to be closed by the caller. Raises `FileNotFoundError` for whatever is not a regular file below the
        attempt's folder: each part of the path is opened without following links."""
        parts = path.split("/")
        if not all(part and part not in (".", "..") and "\0" not in part for part in parts):
            raise FileNotFoundError(path)
        try:
            at = os.open(self.folder(session_id, attempt), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            for number, part in enumerate(parts):
                last = number == len(parts) - 1
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_NONBLOCK if last else os.O_DIRECTORY)
                try:
                    below = os.open(part, flags, dir_fd=at)
                finally:
                    os.close(at)
                at = below
        except OSError as error:
            raise FileNotFoundError(path) from error
        if not stat.S_ISREG(os.fstat(at).st_mode):
            os.close(at)
            raise FileNotFoundError(path)
        return at

    def scrub(self, folder: Path) -> None:
        """Takes keys out of every file below `folder`, whatever it calls itself: a transcript's database is no safer than a log."""
        for path, _ in _regular(folder):
            _scrub_file(path)

    def expire(self, *, days: float, gigabytes: float, keep: Collection[Path] = ()) -> int:
        """Removes attempts older than `days`, then the oldest until the rest fits; never one of `keep`. Returns how many went."""
        known: list[tuple[float, int, Path]] = []
        for folder in self._attempts():
            if folder not in keep:
                with contextlib.suppress(FileNotFoundError):  # another node, or an attempt that is about to begin, has removed it
                    known.append((folder.stat().st_mtime, sum(size for _, size in _regular(folder)), folder))
        known.sort()
        total, removed = sum(size for _, size, _ in known), 0
        oldest = time.time() - days * 86_400
        for changed, size, folder in known:
            if changed >= oldest and total <= gigabytes * 1e9:
                break
            shutil.rmtree(folder, ignore_errors=True)
            try:
                folder.parent.rmdir()
            except OSError:  # other attempts of the session are still there
                pass
            total -= size
            removed += 1
        return removed

    def _attempts(self) -> Iterator[Path]:
        if not self.root.is_dir():
            return
        for session in os.scandir(self.root):
            if session.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # as above
                    for attempt in os.scandir(session.path):
                        if attempt.name.isdigit() and attempt.is_dir(follow_symlinks=False):
                            yield Path(attempt.path)


def _regular(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every regular file below, links left out, with its size. Whoever writes there goes on meanwhile."""
    for base, _, names in os.walk(folder, followlinks=False):
        for name in names:
            path = Path(base) / name
            try:
                found = path.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(found.st_mode):
                yield path, found.st_size


def _scrub_file(path: Path) -> None:
    """Rewrites a file that holds a key; others are left alone. Memory is bounded by a piece."""
    if not _holds_key(path):
        return
    target = path.with_name(f".scrubbed-{secrets.token_hex(8)}")
    with path.open("rb") as source, target.open("xb") as clean:
        rest = b""
        while piece := source.read(_PIECE):
            text = rest + piece
            cut = max(0, len(text) - _OVERLAP)
            for match in KEY.finditer(text, max(0, cut - _OVERLAP)):
                if match.start() < cut < match.end():
                    cut = match.start()
            clean.write(scrub(text[:cut]))
            rest = text[cut:]
        clean.write(scrub(rest))
    os.replace(target, path)


def _holds_key(path: Path) -> bool:
    with path.open("rb") as source:
        rest = b""
        while piece := source.read(_PIECE):
            if KEY.search(rest + piece):
                return True
            rest = piece[-_OVERLAP:]
    return False
