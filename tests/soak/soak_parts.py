"""What the fault tests break: processes that are kept running, lines that can be stalled or cut, a disk that can be filled, a receiver of
callbacks that can be down. Knows no plan."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from polar.runtime import processes
from polar.sockets import free_port


class Kept:
    """A process that is started again whenever it ends, as a supervisor would, unless it is told not to."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, env: dict[str, str]) -> None:
        self.name = name
        self.pid: int | None = None
        self.starts = 0
        self._command = [sys.executable, "-m", "polar.cli", *arguments]
        self._log = log
        self._env = env
        self._may_run = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()

    def start(self) -> None:
        self._may_run.set()
        if self._task is None:
            self._task = asyncio.create_task(self._keep(), name=f"keep {self.name}")

    async def kill(self, *, again: bool = True) -> None:
        """SIGKILL to the process itself, and to nothing that it started. Returns when it is gone."""
        if not again:
            self._may_run.clear()
        process = self._process
        if process is not None:
            self._send(signal.SIGKILL)
            await process.wait()

    def pause(self) -> None:
        self._send(signal.SIGSTOP)

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    async def stop(self) -> int | None:
        """Ends it as an operator would; gives its exit code."""
        self._may_run.clear()
        async with self._starting:  # one that is on its way would be nobody's
            process = self._process
        if process is not None:
            self.go_on()
            self._send(signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), 60)
            except TimeoutError:
                self._send(signal.SIGKILL)
                await process.wait()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        return None if process is None else process.returncode

    def _send(self, number: int) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _keep(self) -> None:
        while True:
            await self._may_run.wait()
            with self._log.open("ab") as log:
                async with self._starting:
                    self._process = await asyncio.create_subprocess_exec(
                        *self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env, start_new_session=True
                    )
            self.pid = self._process.pid
            self.starts += 1
            code = await self._process.wait()
            self.pid = None
            with self._log.open("ab") as log:
                log.write(f"--- {self.name} ended with {code}\n".encode())
            await asyncio.sleep(0.3)

    @property
    def ready(self) -> bool:
        """Whether a node has come up after its last start: it has cleaned up what an earlier process left, and says where it is."""
        return self.pid is not None and ": model API http" in self._log.read_text(errors="replace").rpartition("--- ")[2]

    def tail(self, size: int = 3000) -> str:
        return self._log.read_text(errors="replace")[-size:] if self._log.exists() else ""


class Line:
    """A port of this machine that leads to another. `stall`: bytes stay where they are, both ways, and new connections wait; `refuse`:
    connections are cut, and nobody listens; `mend`: as before."""

    def __init__(self, target: int) -> None:
        self.port = free_port()
        self._target = target
        self._server: asyncio.Server | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def mend(self) -> None:
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    def stall(self) -> None:
        self._flowing.clear()

    async def refuse(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        there: asyncio.StreamWriter | None = None
        pumps: list[asyncio.Task[None]] = []
        try:
            await self._flowing.wait()
            back, there = await asyncio.open_connection("127.0.0.1", self._target)
            pumps = [asyncio.create_task(self._pump(reader, there)), asyncio.create_task(self._pump(back, writer))]
            await asyncio.wait(pumps, return_when=asyncio.ALL_COMPLETED)
        except (OSError, asyncio.CancelledError):
            pass  # its end is what the other side sees of it
        finally:
            self._open.discard(task)
            for pump in pumps:
                pump.cancel()
            for one in (writer, there):
                if one is not None:
                    one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._flowing.wait()
                writer.write(data)
                await writer.drain()
            await self._flowing.wait()
            writer.write_eof()
        except (OSError, RuntimeError):
            writer.transport.abort()


class Disk:
    """A folder on a disk of its own, if `size_mb` is given (root only), which can be filled to the last byte."""

    def __init__(self, folder: Path, size_mb: int | None) -> None:
        self.folder = folder
        self._mounted = size_mb is not None
        folder.mkdir()
        if size_mb is not None:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mb}m,mode=755", "polar-soak", str(folder)], check=True, timeout=30)

    def fill(self) -> None:
        """Only on a disk of its own."""
        assert self._mounted
        with (self.folder / "ballast").open("wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12, 1):
                try:
                    while file.write(b"\0" * size):
                        pass
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        (self.folder / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        if self._mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True, timeout=30)
            self._mounted = False


def may_mount() -> bool:
    """Whether small disks can be made here."""
    return os.geteuid() == 0 and subprocess.run(["unshare", "-m", "true"], capture_output=True, timeout=30, check=False).returncode == 0


@dataclass
class Receiver:
    """Takes callbacks. `mood`: `up`; `down` (503); `forgetful` (takes it, and cuts the connection before its answer)."""

    mood: str = "up"
    taken: list[tuple[str, Any]] = field(default_factory=list)
    """`X-Polar-Delivery` and body of each, in order, those that were cut too."""
    port: int = field(default_factory=free_port)
    _runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/done"

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/done", self._take)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.StreamResponse:
        if self.mood == "down":
            return web.Response(status=503)
        self.taken.append((request.headers["x-polar-delivery"], orjson.loads(await request.read())))
        if self.mood == "forgetful" and request.transport is not None:
            request.transport.abort()
        return web.Response(text="ok")


def agents_of(task: int, owner_prefix: str) -> list[int]:
    """The agent programs of a task in the sandboxes of one node, as this machine numbers them."""
    word = f"soak-task-{task}"
    found = []
    for one in processes.find(owner_prefix=owner_prefix):
        with contextlib.suppress(OSError):
            arguments = Path(f"/proc/{one.pid}/cmdline").read_bytes().split(b"\0")
            if word.encode() in arguments and b"python" in arguments[0]:
                found.append(one.pid)
    return found


def first_of_namespace(pid: int) -> int | None:
    """The process with which that one's process namespace lives and dies; `None` if it has none of its own."""
    with contextlib.suppress(OSError):
        mine = os.readlink(f"/proc/{pid}/ns/pid")
        if mine == os.readlink("/proc/self/ns/pid"):
            return None
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and os.readlink(f"/proc/{name}/ns/pid") == mine and _number_inside(int(name)) == 1:
                    return int(name)
    return None


def _number_inside(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("NSpid:")).split()[-1])
