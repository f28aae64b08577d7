"""The processes of a container: which ones a command started, and their end. Knows no daemon; is given a view of them.

A command's processes are found wherever they moved themselves: by the mark in their environment, by descent from a marked one, and, where
one cleared its environment and left its parent, by having begun after the command. So if two commands run at once in one sandbox and one
of them ends, a process of the other that hides its origin is ended too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from polar.errors import SandboxError
from polar.runtime.base import SANDBOX_VARIABLE

EXEC_VARIABLE = "POLAR_EXEC"
"""In the environment of everything a command starts: which command."""
SLEEPER = ("sleep", "2147483647")
"""The argument list of what a container's first process waits for."""
TICKS_S = os.sysconf("SC_CLK_TCK")
ROUNDS, ROUND_S = 200, 0.03


@dataclass(frozen=True, slots=True)
class Process:
    """`started` in clock ticks since boot; `mark` is the value of `EXEC_VARIABLE`, "" without."""

    pid: int
    parent: int
    started: int
    mark: str
    sleeper: bool
    """Its arguments are those of what the container's first process waits for (anybody may call itself so)."""


class View(Protocol):
    """How a container's processes are seen and ended: from this machine, or by a command inside."""

    first: int
    """The pid of the container's first process, as this view numbers them."""

    async def now(self) -> int:
        """Clock ticks since boot, by the clock of `Process.started`."""

    async def processes(self) -> list[Process]: ...

    async def kill(self, pids: Sequence[int]) -> None: ...


def started_by(found: Iterable[Process], mark: str, *, since: int, first: int) -> list[Process]:
    """What the command `mark`, begun at tick `since`, started, as far as it is alive."""
    by_pid = {one.pid: one for one in found}

    def origin(one: Process) -> str:
        seen: set[int] = set()
        while not one.mark and one.pid not in seen and one.parent != first and one.parent in by_pid:
            seen.add(one.pid)
            one = by_pid[one.parent]
        return one.mark

    def belongs(one: Process) -> bool:
        whose = origin(one)
        return whose == mark if whose else one.started >= since

    return [one for one in by_pid.values() if one.pid != first and belongs(one)]


async def end(view: View, mark: str, *, since: int) -> list[int]:
    """Ends everything that the command started and returns the pids that could not be ended."""
    return await _end(view, lambda found: started_by(found, mark, since=since, first=view.first))


async def end_all(view: View) -> list[int]:
    """Ends everything but the first process and returns the pids that could not be ended."""
    return await _end(view, lambda found: [one for one in found if one.pid != view.first])


async def _end(view: View, choose: Callable[[list[Process]], list[Process]]) -> list[int]:
    left: list[Process] = []
    killed_at: int | None = None
    for _ in range(ROUNDS):
        left = choose(await view.processes())
        if killed_at is not None:
            # the one that the first process began to wait for after its last was ended; no more than one can be that
            own = max(
                (one for one in left if one.sleeper and one.parent == view.first and one.started >= killed_at), key=_age, default=None
            )
            left = [one for one in left if one is not own]
        if not left:
            return []
        killed_at = await view.now()
        await view.kill([one.pid for one in left])
        await asyncio.sleep(ROUND_S)
    return [one.pid for one in left]


def _age(process: Process) -> tuple[int, int]:
    return process.started, process.pid


class HostView:
    """Through this machine's /proc: needs to be root, or the user whose rootless daemon it is. Only processes in the pid namespace of
    `first` count; if that is our own, only those that also carry the sandbox's mark."""

    def __init__(self, first: int, sandbox: str) -> None:
        self.first = first
        self._sandbox = sandbox

    async def now(self) -> int:
        return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_S)

    async def processes(self) -> list[Process]:
        return await asyncio.to_thread(self._processes)

    def _processes(self) -> list[Process]:
        found = []
        for entry in os.listdir("/proc") if _space(self.first) else ():
            if entry.isdigit() and self._inside(int(entry)):
                with contextlib.suppress(OSError):  # it ended
                    stat, environ, arguments = (Path(f"/proc/{entry}/{name}").read_bytes() for name in ("stat", "environ", "cmdline"))
                    one = parsed(int(entry), stat, environ, arguments)
                    if one is not None:
                        found.append(one)
        return found

    def _inside(self, pid: int) -> bool:
        space = _space(self.first)
        if space is None or _space(pid) != space:
            return False
        return space != _space(os.getpid()) or belongs(pid, self._sandbox)

    async def kill(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(pid)
                try:
                    # between the listing and here the number may have come to belong to a process outside
                    if self._inside(pid):
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                finally:
                    os.close(handle)


class InsideView:
    """By commands inside, as root: for daemons on another machine or in a virtual one. `run` runs a program and returns its stdout;
    what it starts carries the mark `INSIDE_MARK`."""

    first = 1

    def __init__(self, run: Callable[[Sequence[str]], Awaitable[bytes]]) -> None:
        self._run = run

    async def now(self) -> int:
        uptime = await self._run(["/bin/sh", "-c", "read -r up _ </proc/uptime && echo $up"])
        try:
            return int(float(uptime) * TICKS_S)
        except ValueError:
            raise SandboxError(f"the sandbox has no /proc/uptime: {uptime[:100]!r}") from None

    async def processes(self) -> list[Process]:
        found = []
        lines = (await self._run(["/bin/sh", "-c", _LIST])).split(b"\n")
        for pid, stat, environ, arguments in zip(*(lines[number::4] for number in range(4)), strict=False):
            one = parsed(int(pid), stat, environ, arguments.replace(b" ", b"\0") + b"\0")
            if one is not None and one.mark != INSIDE_MARK:
                found.append(one)
        return found

    async def kill(self, pids: Sequence[int]) -> None:
        await self._run(["/bin/sh", "-c", 'kill -9 "$@"', "polar", *map(str, pids)])


INSIDE_MARK = "polar"
# four lines a process, none of which can hold a line's end
_LIST = r"""
for folder in /proc/[0-9]*; do
    { read -r stat <"$folder/stat"; } 2>/dev/null || continue
    mark=$(tr '\0' '\n' <"$folder/environ" 2>/dev/null | sed -n '/^POLAR_EXEC=[0-9a-z]*$/p' | head -n 1)
    arguments=$(tr '\0\n' '  ' <"$folder/cmdline" 2>/dev/null)
    printf '%s\n%s\n%s\n%s\n' "${folder#/proc/}" "$stat" "$mark" "${arguments% }"
done
"""


def parsed(pid: int, stat: bytes, environ: bytes, arguments: bytes) -> Process | None:
    """A process from its files in /proc; `None` for one that is dead and only waited for. One whose files make no sense (its name may
    hold a line's end) counts as begun just now by nobody."""
    fields = stat[stat.rfind(b")") + 1 :].split()
    if len(fields) < 20:
        return Process(pid, 0, 1 << 62, "", sleeper=False)
    if fields[0] in (b"Z", b"X"):
        return None
    prefix = f"{EXEC_VARIABLE}=".encode()
    mark = next((one[len(prefix) :].decode(errors="replace") for one in environ.split(b"\0") if one.startswith(prefix)), "")
    sleeper = tuple(one.decode(errors="replace") for one in arguments.split(b"\0")[:-1]) == SLEEPER
    return Process(pid, int(fields[1]), int(fields[19]), mark, sleeper)


def belongs(pid: int, sandbox: str) -> bool:
    """Whether that process of this machine is the sandbox's: its number may mean another on the daemon's machine."""
    try:
        return f"{SANDBOX_VARIABLE}={sandbox}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def oom_kills(pid: int) -> int | None:
    """How many processes of that process's control group were killed for memory so far; `None` where that can't be read."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        old = next((path for _, names, path in lines if "memory" in names.split(",")), None)
        if old is not None:
            text = Path(f"/sys/fs/cgroup/memory{old}/memory.oom_control").read_text()
        else:
            text = Path(f"/sys/fs/cgroup{next(path for number, _, path in lines if number == '0')}/memory.events").read_text()
        return int(next(line.split()[1] for line in text.splitlines() if line.startswith("oom_kill ")))
    return None


def _space(pid: int) -> int | None:
    """Which pid namespace a process of this machine is in; `None` where it ended or is another user's."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return None
