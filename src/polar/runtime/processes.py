"""Processes of sandboxes, found on this machine by what their environment and their working folder say: all there is after a crash.

Reading another user's environment needs root; who is not root sees, and started, only its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from polar.runtime.base import OWNER_VARIABLE, SANDBOX_VARIABLE


@dataclass(frozen=True, slots=True)
class Found:
    """A process that belongs to a sandbox."""

    pid: int
    sandbox: str
    owner: str
    command: str


def find(*, owner_prefix: str = "", sandbox: str | None = None, folder: Path | None = None) -> list[Found]:
    """The processes that carry an owner's id which begins so (and that sandbox's id, if given), and those that work under `folder`. Never
    this process itself."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        marks = _marks(name)
        owner, inside = marks.get(OWNER_VARIABLE, ""), marks.get(SANDBOX_VARIABLE, "")
        marked = bool(owner) and owner.startswith(owner_prefix) and (sandbox is None or sandbox == inside)
        if marked or (folder is not None and _works_under(name, folder)):
            found.append(Found(int(name), inside, owner, _command(name)))
    return found


def end(*, owner_prefix: str = "", sandbox: str | None = None, folder: Path | None = None, within_s: float = 10.0) -> list[int]:
    """Ends them, until a look finds none. Gives those that are still there after `within_s`."""
    deadline = time.monotonic() + within_s
    while found := find(owner_prefix=owner_prefix, sandbox=sandbox, folder=folder):
        for one in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one.pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return [one.pid for one in found]
        time.sleep(0.01)
    return []


def _marks(name: str) -> dict[str, str]:
    try:
        data = Path("/proc", name, "environ").read_bytes()
    except OSError:
        return {}
    marks: dict[str, str] = {}
    for line in data.split(b"\0"):
        key, _, value = line.partition(b"=")
        if key in (OWNER_VARIABLE.encode(), SANDBOX_VARIABLE.encode()):
            marks.setdefault(key.decode(), value.decode(errors="replace"))
    return marks


def _works_under(name: str, folder: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{name}/cwd")).is_relative_to(folder)
    except OSError:
        return False


def _command(name: str) -> str:
    try:
        return Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:200]
    except OSError:
        return ""
