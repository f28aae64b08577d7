"""Commands in a running container: started, followed, and ended with everything that they started. Knows no image and no file transfer."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiodocker

from polar.errors import SandboxError
from polar.runtime import shell
from polar.runtime.attach import Attached
from polar.runtime.base import ExecResult, OnOutput, Place
from polar.runtime.container_processes import (
    EXEC_VARIABLE,
    INSIDE_MARK,
    HostView,
    InsideView,
    View,
    belongs,
    end,
    end_all,
    oom_kills,
    started_by,
)
from polar.runtime.daemon import Daemon, said
from polar.runtime.tail import BEGIN, BEGIN_AND_DRAIN, Tail

T = TypeVar("T")
TIMED_OUT = 124
KILLED = 137
COMMAND_AT_FAULT, CANNOT_BEGIN = (126, 127), 126
"""What daemons say, and what is said here, of a command that never began because its folder or its user does not exist."""
BEGIN_TRIES = 100
SETTLE_S, LAG_S = 0.3, 10.0
"""How long output is still read after a command's end: where something that it left behind holds its stdout, and where nothing does, so
that its end is only late."""
START_S = 120.0
"""How long a daemon may take to start a command. Until then it shows one that has not begun as one that has ended, with exit code 0."""


_SETTLE = """
work=$1 spare=$2 ids=${3:-$(id -u):$(id -g)} home=${4:-$HOME}
case $home in "" | / | [!/]*) home= ;; esac
case $home/ in "$work"/*) home= ;; esac
[ -d "$home" ] && [ -w "$home" ] || home=$spare
echo "$ids $home"
[ "$(id -u)" = 0 ] || exit 0
for folder in "$home" "$work"; do
    [ -d "$folder" ] || { mkdir -p "$folder" && chown "$ids" "$folder"; } || exit 1
done
"""
"""Says the user's ids and a home: the image's own, if it can be written and is not in the working folder. As root it makes both folders."""


class Container:
    """A running container. `first` is its first process as the daemon's machine numbers it, `ids` its user and group, `home`
    that user's home."""

    def __init__(self, daemon: Daemon, container_id: str, place: Place, *, first: int) -> None:
        self.daemon = daemon
        self.id = container_id
        self.place = place
        self.first = first
        self.ids, self.home = "0:0", ""
        self.here = False
        """Whether its processes are this machine's own, and may be seen."""
        self._oom_kills: int | None = None

    async def settle(self, workdir: str, spare_home: str) -> None:
        """Finds out where its processes are, who its user is and where that user's home is, and makes the folders that are missing.
        Raises `SandboxError` where that can't be, and where there is not even a shell."""
        await self._locate()
        script = ["/bin/sh", "-c", _SETTLE, "polar", workdir, spare_home]
        made = await self.run(script, cwd="/", timeout_s=60)
        ids, _, home = made.text.strip().partition(" ")
        if made.ok and home and not ids.startswith("0:"):
            made = await self.run([*script, ids, home], cwd="/", user="0", timeout_s=60)
        if not made.ok or not home:
            raise SandboxError(f"the sandbox {self.place.id} cannot run /bin/sh, or has no place for {workdir}: {made.tail()}")
        self.ids, self.home = ids, home

    async def _locate(self) -> None:
        for _ in range(BEGIN_TRIES if self.daemon.local else 0):
            # for a moment its first process is still the program that makes containers
            self.here = belongs(self.first, self.place.id)
            if self.here or not Path(f"/proc/{self.first}").exists():  # noqa: ASYNC240 - asks the kernel, no disk
                break
            await asyncio.sleep(0.01)
        self._oom_kills = oom_kills(self.first) if self.here else None

    async def _revive(self) -> None:
        """Starts it again after its memory limit ended all of it: what programs inside did must not cost what they wrote. Its files are as
        they were; it has no processes, and no way to the gateway any more. Raises `SandboxError`."""
        with said(f"starting the sandbox {self.place.id} again"):
            await even_if_cancelled(self.daemon.docker.containers.container(self.id).start())
        self.first = int((await self.state()).get("Pid") or 0)
        await self._locate()

    async def run(
        self,
        command: str | Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        keep_bytes: int = 1_000_000,
        user: str | None = None,
    ) -> ExecResult:
        """As `Runtime.exec`."""
        argv, began, emptied = shell.arguments(command), time.monotonic(), False
        if (why := shell.unfit(argv, env or {})) is not None:
            return ExecResult(CANNOT_BEGIN, b"", f"{argv[0][:200]}: {why}\n".encode(errors="replace"), 0.0)
        while True:
            tail = Tail(keep_bytes, on_output, word := secrets.token_hex(8))
            started = [*(BEGIN if stdin is None else BEGIN_AND_DRAIN), word, *argv]
            code = await self._once(started, tail, cwd=cwd, env=env or {}, stdin=stdin, timeout_s=timeout_s, user=user)
            if code is None:
                return tail.result(TIMED_OUT, began, timed_out=True)
            if code == KILLED or not tail.began:
                await self._why(code, tail)
            if tail.began or code in COMMAND_AT_FAULT:
                return tail.result(code if tail.began else CANNOT_BEGIN, began)
            if emptied:
                raise SandboxError(f"the sandbox {self.place.id} starts no command: {tail.result(code, began).tail()}")
            # so many processes or so much memory in use that nothing starts: earlier commands left behind what fills it
            await self.end_all()
            emptied = True

    async def _once(
        self,
        argv: list[str],
        tail: Tail,
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes | None,
        timeout_s: float | None,
        user: str | None,
    ) -> int | None:
        """The exit code; `None` when its time ran out. However it ends without one, nothing that it started is left."""
        mark, view = secrets.token_hex(8), self.view()
        since = await view.now()
        exec_id = await self._create(argv, cwd, {**self._own(user), **env, EXEC_VARIABLE: mark}, user, stdin is not None)
        code = None

        async def alone() -> bool:
            return not started_by(await view.processes(), mark, since=since, first=view.first)

        try:
            code = await self._follow(exec_id, stdin, tail, timeout_s, alone)
        finally:
            if code is None:  # its time ran out, it was cancelled, or the sandbox failed under it
                await even_if_cancelled(self._end(view, mark, since))
        return code

    def _own(self, user: str | None) -> dict[str, str]:
        """The variables of its own user; another one's the daemon knows."""
        return {"HOME": self.home} if self.home and user is None else {}

    async def _end(self, view: View, mark: str, since: int) -> None:
        left = await end(view, mark, since=since)
        if left:
            raise SandboxError(f"a command in the sandbox {self.place.id} has processes that cannot be ended: {left[:10]}")

    async def _why(self, code: int, tail: Tail) -> None:
        """Raises `SandboxError` if the whole container ended, but for want of memory; says in the command's stderr where that ran out."""
        state = await self.state()
        for _ in range(BEGIN_TRIES):
            if not state.get("Running") or not self.here or belongs(self.first, self.place.id):
                break
            await asyncio.sleep(0.05)  # its first process is gone, and the daemon has not seen it yet
            state = await self.state()
        if not state.get("Running"):
            if not state.get("OOMKilled"):
                raise SandboxError(f"the sandbox {self.place.id} was ended while a command ran (exit code {state.get('ExitCode')})")
            await self._revive()
            tail.out_of_memory = True
        elif code == KILLED and self.here:
            before, self._oom_kills = self._oom_kills, oom_kills(self.first)
            tail.out_of_memory = before is not None and self._oom_kills is not None and self._oom_kills > before
        elif code == KILLED:
            tail.out_of_memory = bool(state.get("OOMKilled"))
        if tail.out_of_memory:
            tail.add("stderr", b"[polar] killed: the sandbox's memory limit was reached\n")

    async def end_all(self) -> None:
        """Ends every process but the first, whoever started it. Raises `SandboxError` if one is left."""
        left = await end_all(self.view())
        if left:
            raise SandboxError(f"the sandbox {self.place.id} has processes that cannot be ended: {left[:10]}")

    async def busy(self) -> bool:
        """Whether anything runs in it but its first process and what that waits for."""
        view = self.view()
        return any(one.pid != view.first and not one.sleeper for one in await view.processes())

    def view(self) -> View:
        """Its processes, seen from this machine where they are its own, else by commands inside."""
        return HostView(self.first, self.place.id) if self.here else InsideView(self._inside)

    async def state(self) -> dict[str, Any]:
        """The daemon's `State` of it. Raises `SandboxError` where it is gone."""
        with said(f"looking at the sandbox {self.place.id}"):
            shown = await self.daemon.docker.containers.container(self.id).show()
            return dict(shown["State"])

    async def _create(self, argv: list[str], cwd: str, env: Mapping[str, str], user: str | None, stdin: bool) -> str:
        with said(f"a command in the sandbox {self.place.id}"):
            container = self.daemon.docker.containers.container(self.id)
            made = await container.exec(argv, stdin=stdin, environment=env, workdir=cwd, user=user or "")
            return made.id

    async def _follow(
        self, exec_id: str, stdin: bytes | None, tail: Tail, timeout_s: float | None, alone: Callable[[], Awaitable[bool]] | None = None
    ) -> int | None:
        """The command's exit code, `None` when its time ran out. `alone`: whether nothing that it started is left."""
        with said(f"a command in the sandbox {self.place.id}"):
            attached = await Attached.open(self.daemon.address, self.daemon.api, exec_id)
        try:
            async with asyncio.timeout(timeout_s) as limit, asyncio.TaskGroup() as tasks:
                feeding = tasks.create_task(attached.feed(stdin)) if stdin is not None else None
                reading = tasks.create_task(_read(attached, tail))
                watching = tasks.create_task(self._end_of(exec_id, reading, tail))
                await asyncio.wait({watching})
                await asyncio.wait({reading}, timeout=SETTLE_S)
                if not reading.done() and not watching.cancelled() and watching.exception() is None and alone is not None and await alone():
                    await asyncio.wait({reading}, timeout=LAG_S)
                for task in (feeding, reading):
                    if task is not None:
                        task.cancel()
            return watching.result()
        except TimeoutError:
            if not limit.expired():
                raise
            return None
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            attached.close()

    async def _end_of(self, exec_id: str, reading: asyncio.Task[None], tail: Tail) -> int:
        """Waits for the command's end and returns its exit code. Nearly always that is the end of its output; but something that it left
        behind may hold its stdout, and it may close its stdout and go on."""
        await asyncio.wait({reading}, timeout=1.0)
        pause, began = 0.005, time.monotonic()
        while True:
            with said(f"a command in the sandbox {self.place.id}"):
                shown = await self._shown(exec_id)
            pid = int(shown.get("Pid") or 0)
            if not shown["Running"] and (tail.began or reading.done() or time.monotonic() - began > START_S):
                return int(shown["ExitCode"])
            if self.here and belongs(pid, self.place.id):
                await _ended(pid, reading)
            else:
                await asyncio.sleep(pause)
                pause = min(pause * 2, 2.0)

    async def _shown(self, exec_id: str) -> dict[str, Any]:
        """What the daemon says of the exec. Raises `SandboxError` where the container ended under it, but for want of memory."""
        try:
            return await self.daemon.docker.containers.exec(exec_id).inspect()
        except aiodocker.DockerError as error:
            if error.status in (404, 409) and not (state := await self.state()).get("Running"):
                if state.get("OOMKilled"):
                    return {"Running": False, "ExitCode": KILLED}
                raise SandboxError(f"the sandbox {self.place.id} was ended while a command ran") from error
            raise

    async def _inside(self, argv: Sequence[str]) -> bytes:
        """What a program prints that is run as root for `InsideView`."""
        tail = Tail(16 << 20, None, "")
        exec_id = await self._create(list(argv), "/", {EXEC_VARIABLE: INSIDE_MARK}, "0", stdin=False)
        await self._follow(exec_id, None, tail, 60.0)
        return tail.result(0, 0.0).stdout


async def _read(attached: Attached, tail: Tail) -> None:
    async for stream, data in attached.frames():
        tail.add(stream, data)


async def _ended(pid: int, reading: asyncio.Task[None]) -> None:
    """Waits until a process of this machine has ended, or what it prints has: then the daemon may have gone away."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return await asyncio.sleep(0.05)
    loop.add_reader(handle, over.set)
    if not reading.done():
        reading.add_done_callback(lambda _: over.set())
    try:
        await over.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
    return None


async def even_if_cancelled(work: Coroutine[Any, Any, T]) -> T:
    """Does the work to its end and gives what it gives; a cancellation that comes meanwhile is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancelled = error
        except BaseException:  # raised below, by result()
            break
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller hears
        raise cancelled
    return task.result()
