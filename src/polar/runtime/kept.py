"""Sandboxes that a keeper process of Polar's own holds (`polar.keeper`): what `local` and `bubblewrap` have in common.

The keeper lives as long as the socket to it; when this process ends, however it ends, the keeper sees the socket end and ends everything
inside. Knows the keeper's messages and no namespace.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polar
from polar.errors import SandboxError, UnsafePath
from polar.keeper.commands import NOT_FOUND, REFUSED
from polar.runtime import processes, shell, transfer
from polar.runtime.base import OWNER_VARIABLE, SANDBOX_VARIABLE, ExecResult, OnOutput, Place, Runtime
from polar.runtime.output import Output
from polar.runtime.spec import RuntimeSpec

KEEPER = [
    sys.executable,
    "-I",
    "-S",
    "-c",
    f"import sys; sys.path.append({str(Path(polar.__file__).parent.parent)!r}); from polar.keeper.main import main; main()",
]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_S, _KILL_S, _STOP_S = 60.0, 15.0, 20.0
_DRAIN_S = 0.2
"""How long output may be quiet after a command's end before what it left running is no more listened to."""


class Kept(Runtime):
    """A sandbox with a keeper. A backend gives `configuration` (what the keeper makes) and the environment."""

    def __init__(self, spec: RuntimeSpec, place: Place) -> None:
        super().__init__(spec, place)
        self._socket: socket.socket | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._kills: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._hello: asyncio.Future[dict[str, Any]] | None = None
        self._next = 0
        self._storage: asyncio.Task[None] | None = None
        self._full = False
        self.pid: int | None = None
        """A process in the sandbox's namespaces, as this machine numbers it."""

    # -- what a backend says

    def configuration(self) -> dict[str, Any]:
        """The keeper's configuration; makes the folders that it names. Blocks."""
        raise NotImplementedError

    @property
    def contained(self) -> bool:
        """Whether the kernel ends everything inside with the keeper: a process namespace of its own."""
        return True

    def environment(self) -> dict[str, str]:
        """What every command's environment begins with, before `spec.env`."""
        return {
            "PATH": PATH,
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            **self.marks(),
        }

    def rights(self, user: str | None) -> dict[str, int]:
        """`uid` and `gid` for a command of that user; nothing for the sandbox's own."""
        return {}

    def marks(self) -> dict[str, str]:
        return {SANDBOX_VARIABLE: self.place.id, OWNER_VARIABLE: self.place.owner}

    # -- life

    async def start(self) -> None:
        config = await asyncio.to_thread(self.configuration)
        config["marks"] = self.marks()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with (self.place.folder / "keeper.log").open("ab") as log:
                self._keeper = subprocess.Popen(  # noqa: ASYNC220 - returns when the program runs, a millisecond
                    [*KEEPER, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    cwd="/",
                    env={"PATH": PATH, **self.marks()},
                    start_new_session=True,
                )
        except OSError as error:
            ours.close()
            raise SandboxError(f"the sandbox's keeper could not be started: {error}") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        self._socket = ours
        self._hello = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._heard)
        await self._send({}, config, [])
        try:
            async with asyncio.timeout(_START_S):
                hello = await self._hello
        except TimeoutError:
            raise SandboxError(f"the sandbox was not there after {_START_S:g} s") from None
        if "failed" in hello:
            raise SandboxError(str(hello["failed"]))
        self.pid = hello["pid"]
        if self.spec.storage_mb is not None:
            self._storage = asyncio.create_task(self._watch_storage(self.spec.storage_mb << 20))

    async def stop(self) -> None:
        if self._storage is not None:
            self._storage.cancel()
            self._storage = None
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._fail_waiting("the sandbox was stopped")
        if self._keeper is not None:
            keeper, self._keeper = self._keeper, None
            if not await _ended(keeper.pid, _STOP_S):
                keeper.kill()
            await asyncio.to_thread(keeper.wait)
        if self.contained:
            return
        left = await asyncio.to_thread(processes.end, sandbox=self.place.id, folder=self.place.folder)
        if left:
            raise SandboxError(f"processes of the sandbox {self.place.id} do not end: {', '.join(map(str, left))}")

    # -- commands

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        keep_bytes: int = 1_000_000,
        user: str | None = None,
    ) -> ExecResult:
        body: dict[str, Any] = {
            "argv": shell.arguments(command),
            "cwd": self._inside(cwd or "."),
            "env": {**self.environment(), **self.spec.env, **(env or {})},
            **self.rights(user or self.spec.user),
        }
        out, err = Output("stdout", on_output, keep_bytes), Output("stderr", on_output, keep_bytes)
        source = _memory(stdin) if stdin else os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        begun = time.monotonic()
        try:
            code, timed_out = await self._command(body, [source, out.writing, err.writing], timeout_s, [out, err])
            if not timed_out:
                await _drained(out, err)
        finally:
            os.close(source)
            out.close()
            err.close()
        if self._full and code == 137:
            err.note(f"polar: the sandbox's {self.spec.storage_mb} MB are used up; its processes were ended\n".encode())
        return ExecResult(code, out.kept(), err.kept(), time.monotonic() - begun, timed_out, out.truncated or err.truncated)

    async def end_processes(self) -> None:
        answer = await self._kill({"op": "clear", "id": self._number()})
        if not answer.get("killed"):
            raise SandboxError(f"processes in the sandbox {self.place.id} do not end")

    async def _command(
        self, body: dict[str, Any], fds: list[int], timeout_s: float | None, outputs: Sequence[Output] = ()
    ) -> tuple[int, bool]:
        """Exit code, and whether its time ran out. The given descriptors' copies go to the command; those of `outputs` are closed here."""
        number = self._number()
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            await self._send({"op": "run", "id": number}, body, fds)
            for one in outputs:
                one.begin()
            async with asyncio.timeout(timeout_s):
                return int((await answer)["exit"]), False
        except TimeoutError:
            await self._end(number)
            return 124, True
        except asyncio.CancelledError:
            await asyncio.shield(self._end(number))
            raise
        finally:
            self._answers.pop(number, None)

    async def _end(self, number: int) -> None:
        if self._socket is None:
            return
        answer = await self._kill({"op": "kill", "id": number})
        if not answer.get("killed"):
            raise SandboxError(f"a command in the sandbox {self.place.id} does not end")

    async def _kill(self, message: dict[str, Any]) -> dict[str, Any]:
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._kills[message["id"]] = answer
        try:
            await self._send(message, None, [])
            async with asyncio.timeout(_KILL_S):
                return await answer
        except TimeoutError:
            raise SandboxError(f"the keeper of the sandbox {self.place.id} does not answer") from None
        finally:
            self._kills.pop(message["id"], None)

    # -- files

    async def upload(self, source: Path, target: str) -> None:
        reading, writing = os.pipe()
        errors = Output("stderr", None, 4000)
        packing: asyncio.Task[None] | None = None
        try:
            body = {"call": "unpack", "path": self._inside(target)}
            running = asyncio.create_task(
                self._copy(body, [reading, os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), errors.writing], errors)
            )
            packing = asyncio.create_task(transfer.in_thread(lambda: _pack(source, writing)))
            problem: BaseException | None = None
            try:
                await packing
            except BrokenPipeError as error:
                problem = error
            finally:
                code = await running
        finally:
            errors.close()
        if code or problem is not None:
            raise SandboxError(f"{source} could not be copied to {target}: {errors.text() or 'the copy broke off'}")

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        reading, writing = os.pipe()
        errors = Output("stderr", None, 4000)
        staged = self.place.folder / f"coming-{secrets.token_hex(4)}"
        try:
            body = {"call": "pack", "path": self._inside(source)}
            running = asyncio.create_task(
                self._copy(body, [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), writing, errors.writing], errors)
            )
            problem: UnsafePath | None = None
            try:
                await transfer.in_thread(lambda: _extract(reading, staged, max_bytes))
            except UnsafePath as error:
                problem = error
            finally:
                code = await running
            if code == NOT_FOUND:
                raise FileNotFoundError(source)
            if code == REFUSED:
                raise UnsafePath(errors.text())
            if problem is not None:
                raise problem
            if code:
                raise SandboxError(f"{source} could not be copied out: {errors.text()}")
            await asyncio.to_thread(_move, staged, target)
        finally:
            errors.close()
            await asyncio.to_thread(transfer.remove_tree, staged)

    async def _copy(self, body: dict[str, Any], fds: list[int], errors: Output) -> int:
        """Runs a copy inside. The first two descriptors are closed here."""
        sent = False
        try:
            number = self._number()
            answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
            self._answers[number] = answer
            try:
                await self._send({"op": "run", "id": number}, {**body, "argv": [], "env": {}, "cwd": "/"}, fds)
                errors.begin()
                os.close(fds[0])
                os.close(fds[1])
                sent = True
                code = int((await answer)["exit"])
                await _drained(errors)
                return code
            except asyncio.CancelledError:
                await asyncio.shield(self._end(number))
                raise
            finally:
                self._answers.pop(number, None)
        finally:
            if not sent:
                os.close(fds[0])
                os.close(fds[1])

    # -- the keeper's socket

    def _inside(self, path: str) -> str:
        return path if path.startswith("/") else f"{self.workdir}/{path}" if path not in ("", ".") else self.workdir

    def _number(self) -> int:
        self._next += 1
        return self._next

    async def _send(self, message: dict[str, Any], body: object, fds: list[int]) -> None:
        long = [] if body is None else [_memory(json.dumps(body).encode())]
        try:
            while True:
                if self._socket is None:
                    raise SandboxError(f"the sandbox {self.place.id} is not running")
                try:
                    socket.send_fds(self._socket, [json.dumps(message).encode()], [*long, *fds])
                    return
                except BlockingIOError:
                    await asyncio.sleep(0.01)
                except OSError as error:
                    raise SandboxError(f"the sandbox {self.place.id} is gone: {error}") from error
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
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._socket = None
            self._fail_waiting(f"the keeper of the sandbox {self.place.id} ended")
            return
        message = json.loads(data)
        if "id" not in message:
            waiting = self._hello
        else:
            waiting = (self._kills if "killed" in message else self._answers).get(message["id"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _fail_waiting(self, why: str) -> None:
        for waiting in (self._hello, *self._answers.values(), *self._kills.values()):
            if waiting is not None and not waiting.done():
                waiting.set_exception(SandboxError(why))
                waiting.exception()  # a future that nobody waits for any more is no fault

    async def _watch_storage(self, limit: int) -> None:
        while True:
            await asyncio.sleep(2.0)
            used = await asyncio.to_thread(_used, self.place.folder)
            self._full = used > limit
            if self._full:
                with contextlib.suppress(SandboxError):
                    await self.end_processes()


def _memory(data: bytes) -> int:
    """A memory file with that content, read from its beginning."""
    fd = os.memfd_create("polar", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


async def _drained(*outputs: Output) -> None:
    """Waits until the outputs end, or are quiet: something that the command left running may hold them open."""
    seen = -1
    while not all(one.ended for one in outputs):
        total = sum(one.total for one in outputs)
        if total == seen:
            return
        seen = total
        waits = [asyncio.create_task(one.wait()) for one in outputs]
        _, pending = await asyncio.wait(waits, timeout=_DRAIN_S)
        for task in pending:
            task.cancel()


async def _ended(pid: int, within_s: float) -> bool:
    """Whether a child of ours ends in time; it is not reaped here."""
    fd = os.pidfd_open(pid)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(fd, ended.set)
    try:
        async with asyncio.timeout(within_s):
            await ended.wait()
        return True
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _pack(source: Path, writing: int) -> None:
    with os.fdopen(writing, "wb") as stream:
        transfer.pack(source, stream)


def _extract(reading: int, target: Path, max_bytes: int) -> None:
    with os.fdopen(reading, "rb") as stream:
        transfer.extract(stream, target, max_bytes=max_bytes)


def _move(staged: Path, target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target} stands already")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(staged, target)


def _used(folder: Path) -> int:
    """Bytes on disk."""
    total = 0
    for top, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(top, name)).st_blocks * 512
    return total
