"""The line to a keeper process (`polar.keeper`): starts it, sends it commands with their descriptors, hears their ends.

The keeper lives as long as this socket; when this process ends, however it ends, the keeper sees the socket end and ends everything inside.
Knows the keeper's messages and no backend.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from polar.errors import SandboxError
from polar.runtime.nursery import nursery

_START_S, _KILL_S, _STOP_S = 60.0, 15.0, 20.0


class Line:
    """From `open` to `close`. Every method raises `SandboxError` where the keeper is gone."""

    def __init__(self, name: str, ours: socket.socket, pid: int, process: int) -> None:
        self._name = name
        self._socket: socket.socket | None = ours
        self.keeper_pid = pid
        self._process: int | None = process
        self._hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._ends: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._kills: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0

    @classmethod
    async def open(cls, name: str, config: Mapping[str, Any], log: Path) -> tuple[Line, int | None]:
        """Starts the keeper of the sandbox `name`. Gives a pid in the sandbox's namespaces too (`None`: it has none of its own)."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)

        def start() -> tuple[int, int]:
            with theirs:  # closed by the thread that hands it over: its number may mean another file at once
                return nursery().keeper(theirs, log)

        starting = asyncio.ensure_future(asyncio.to_thread(start))
        try:
            pid, process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            ours.close()  # by which the keeper ends, if there is one in the end
            starting.add_done_callback(_let_go)
            raise
        except OSError as error:
            ours.close()
            raise SandboxError(f"the keeper of the sandbox {name} could not be started: {error}") from error
        line = cls(name, ours, pid, process)
        asyncio.get_running_loop().add_reader(ours.fileno(), line._heard)
        try:
            await line._send({}, dict(config), [])
            async with asyncio.timeout(_START_S):
                hello = await line._hello
            if "failed" in hello:
                raise SandboxError(str(hello["failed"]))
        except TimeoutError:
            await line.close()
            raise SandboxError(f"the sandbox {name} was not there after {_START_S:g} s") from None
        except BaseException:
            await line.close()
            raise
        return line, hello["pid"]

    @property
    def broken(self) -> bool:
        """Whether the keeper is gone, or this was closed."""
        return self._socket is None

    async def run(
        self,
        body: Mapping[str, Any],
        fds: Sequence[int],
        *,
        timeout_s: float | None = None,
        sent: Callable[[], None] | None = None,
    ) -> tuple[int, bool]:
        """Runs a command with those standard streams; calls `sent` when they are handed over. Gives its exit code, and whether its time
        ran out. After that, and after a cancellation, nothing that it started is left; else what it left running goes on."""
        number = self._number()
        end: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._ends[number] = end
        try:
            await self._send({"op": "run", "id": number}, body, fds)
            if sent is not None:
                sent()
            async with asyncio.timeout(timeout_s):
                return int((await end)["exit"]), False
        except TimeoutError:
            await self._kill("kill", number)
            return 124, True
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError):
                await asyncio.shield(self._kill("kill", number))
            raise
        finally:
            self._ends.pop(number, None)

    async def clear(self) -> None:
        """Ends every command and all that they left running."""
        await self._kill("clear", self._number())

    async def close(self) -> None:
        """Ends everything inside, and the keeper. Raises nothing."""
        self._hang_up(f"the sandbox {self._name} was stopped")
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            if not await _ended(process, _STOP_S):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                await _ended(process, _STOP_S)
        finally:
            os.close(process)

    def _number(self) -> int:
        self._count += 1
        return self._count

    async def _kill(self, op: str, number: int) -> None:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._kills[number] = answer
        try:
            await self._send({"op": op, "id": number}, None, [])
            async with asyncio.timeout(_KILL_S):
                if not (await answer)["killed"]:
                    raise SandboxError(f"processes in the sandbox {self._name} do not end")
        except TimeoutError:
            raise SandboxError(f"the keeper of the sandbox {self._name} does not answer") from None
        finally:
            self._kills.pop(number, None)

    async def _send(self, message: Mapping[str, Any], body: Mapping[str, Any] | None, fds: Sequence[int]) -> None:
        long = [] if body is None else [memory(json.dumps(body).encode())]
        try:
            while True:
                if self._socket is None:
                    raise SandboxError(f"the sandbox {self._name} is gone")
                try:
                    socket.send_fds(self._socket, [json.dumps(message).encode()], [*long, *fds])
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.01)
                except OSError as error:
                    raise SandboxError(f"the sandbox {self._name} is gone: {error}") from error
        finally:
            for fd in long:
                os.close(fd)

    def _heard(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(f"the keeper of the sandbox {self._name} ended")
            return
        message = json.loads(data)
        waiting: asyncio.Future[dict[str, Any]] | None = self._hello
        if "id" in message:
            waiting = (self._kills if "killed" in message else self._ends).get(message["id"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _hang_up(self, why: str) -> None:
        if self._socket is None:
            return
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self._socket.close()
        self._socket = None
        for waiting in (self._hello, *self._ends.values(), *self._kills.values()):
            if not waiting.done():
                waiting.set_exception(SandboxError(why))
                waiting.exception()  # one that nobody waits for any more is no fault


def _let_go(starting: asyncio.Future[tuple[int, int]]) -> None:
    """Of a keeper that nobody waits for any more."""
    if not starting.cancelled() and starting.exception() is None:
        os.close(starting.result()[1])


def memory(data: bytes) -> int:
    """A memory file with that content, read from its beginning; the caller closes it."""
    fd = os.memfd_create("polar", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _ended(process: int, within_s: float) -> bool:
    """Whether the process of that descriptor ends in time."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(process, ended.set)
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(process)
