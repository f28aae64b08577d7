"""Process trees: who descends from whom, and how to end all of them although they fork meanwhile.

A command's first process is a *child subreaper*: whatever its descendants do (setsid, double fork, an environment of their own), they stay
its descendants in the kernel's own books, so a tree needs no marker and no guess.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time


class Trees:
    """Reads the process table through an open `/proc` of the keeper's own process namespace, whatever is mounted there later."""

    def __init__(self) -> None:
        self._proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _read(self, path: str) -> str | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return None
        try:
            return os.read(fd, 1 << 20).decode(errors="replace")
        except OSError:
            return None
        finally:
            os.close(fd)

    def _stat(self, pid: int) -> tuple[str, int] | None:
        """State letter and parent."""
        text = self._read(f"{pid}/stat")
        if text is None:
            return None
        state, parent = text.rpartition(")")[2].split()[:2]
        return state, int(parent)

    def _table(self) -> dict[int, list[int]]:
        """Children by parent, from the whole table: for kernels without the `children` file."""
        children: dict[int, list[int]] = {}
        for name in os.listdir(self._proc):
            if name.isdigit() and (stat := self._stat(int(name))) is not None:
                children.setdefault(stat[1], []).append(int(name))
        return children

    def children(self, pid: int) -> list[int]:
        """The direct children, zombies too."""
        try:
            tasks_fd = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
        except OSError:
            return []
        try:
            tasks = os.listdir(tasks_fd)
        except OSError:
            return []
        finally:
            os.close(tasks_fd)
        found: list[int] = []
        for task in tasks:
            text = self._read(f"{pid}/task/{task}/children")
            if text is None and self._read(f"{pid}/stat") is not None and not self._has_children_file():
                return self._table().get(pid, [])
            found.extend(map(int, (text or "").split()))
        return found

    def _has_children_file(self) -> bool:
        return self._read(f"{os.getpid()}/task/{os.getpid()}/children") is not None

    def living(self, roots: list[int]) -> list[int]:
        """The roots and all their descendants that are not zombies."""
        seen: set[int] = set()
        todo = list(roots)
        while todo:
            pid = todo.pop()
            if pid not in seen:
                seen.add(pid)
                todo.extend(self.children(pid))
        return [pid for pid in seen if (stat := self._stat(pid)) is not None and stat[0] not in "ZX"]

    def end(self, roots: list[int], spare: set[int], within_s: float = 10.0) -> bool:
        """Ends all descendants of the roots, and the roots but those in `spare`. First everything is stopped, until a look finds nothing
        new, so that nothing forks away; then it is killed. False: something still lives after `within_s` (a call into the kernel that
        does not return)."""
        deadline = time.monotonic() + within_s
        stopped: set[int] = set()
        while new := set(self.living(roots)) - spare - stopped:
            _signal(new, signal.SIGSTOP)
            stopped |= new
            if time.monotonic() > deadline:
                break
        while left := set(self.living(roots)) - spare:
            _signal(left, signal.SIGKILL)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)
        return True


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
