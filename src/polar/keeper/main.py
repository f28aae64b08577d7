"""The keeper's loop: requests from Polar on one socket, commands' ends on their pipes.

A request is a small JSON message with descriptors attached; its long part (arguments, environment) lies in a memory file:

    {"op": "run", "id": 7}    + [body, stdin, stdout, stderr]   -> {"id": 7, "exit": 0}, when the command itself has ended
    {"op": "kill", "id": 7}                                     -> {"id": 7, "killed": true}, when nothing of it is left
    {"op": "clear", "id": 8}                                    -> {"id": 8, "killed": true}: nothing of any command is left

When the socket ends, for whatever reason, so does everything inside, and then the keeper.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
from collections.abc import Mapping

from polar.keeper import commands, kernel, views
from polar.keeper.trees import Trees

MESSAGE = 1 << 16


class Keeper:
    """One sandbox. `view.reaper` is the first process of its namespace; without one, the keeper itself collects what commands leave."""

    def __init__(self, control: socket.socket, trees: Trees, view: views.View, rights: commands.Rights) -> None:
        self._control = control
        self._trees = trees
        self._view = view
        self._rights = rights
        self._stubs: dict[int, int] = {}
        self._pipes: dict[int, int] = {}
        self._ended: set[int] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake)
        self._wake_write = wake
        self._selector.register(control, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)

    def serve(self) -> None:
        """Until the socket ends."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._control:
                    if not self._request():
                        return
                elif key.fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                else:
                    self._command_says(key.fd)
            self._reap()

    def _request(self) -> bool:
        data, fds, _, _ = socket.recv_fds(self._control, MESSAGE, 8, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        message = json.loads(data)
        number = int(message["id"])
        if message["op"] == "run":
            self._run(number, json.loads(commands.read_all(fds[0])), fds[1:])
        elif message["op"] == "kill":
            self._answer({"id": number, "killed": self._kill(number)})
        else:
            self._answer({"id": number, "killed": self._clear()})
        return True

    def _run(self, number: int, body: Mapping[str, object], fds: list[int]) -> None:
        stub, pipe = commands.start(body, fds, self._rights_for(body), self._forget_own)
        for fd in fds:
            os.close(fd)
        self._stubs[number], self._pipes[pipe] = stub, number
        self._selector.register(pipe, selectors.EVENT_READ)

    def _rights_for(self, body: Mapping[str, object]) -> commands.Rights:
        uid, gid = body.get("uid"), body.get("gid")
        if not isinstance(uid, int) or not isinstance(gid, int):
            return self._rights
        plain = self._rights
        return commands.Rights(uid, gid, plain.user_namespace, plain.confined, plain.data_bytes, plain.processes, plain.cpus)

    def _forget_own(self) -> None:
        """In a fork: what is the keeper's alone. (All of it is closed at exec too.)"""
        self._selector.close()
        self._control.close()
        for fd in (self._wake, self._wake_write, *self._pipes):
            os.close(fd)

    def _command_says(self, pipe: int) -> None:
        number = self._pipes[pipe]
        data = os.read(pipe, 4)
        if len(data) == 4:
            self._ended.add(number)
            self._answer({"id": number, "exit": commands.status_of(data)})
            return
        self._selector.unregister(pipe)
        os.close(pipe)
        del self._pipes[pipe]
        stub = self._stubs.pop(number)
        if number not in self._ended:  # a program inside killed the stub, and the command may live on without it
            self._trees.end(self._orphans(), self._spared())
            self._answer({"id": number, "exit": 137})
        self._ended.discard(number)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(stub, 0)

    def _kill(self, number: int) -> bool:
        roots = self._orphans()
        stub = self._stubs.get(number)
        if stub is not None:
            roots.append(stub)
        done = self._trees.end(roots, self._spared())
        if stub is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub, signal.SIGKILL)
        return done

    def _clear(self) -> bool:
        return self._trees.end([*self._orphans(), *self._stubs.values()], self._spared())

    def _reaper(self) -> int:
        return os.getpid() if self._view.reaper is None else self._view.reaper

    def _orphans(self) -> list[int]:
        """What lost its stub: children of the process that collects them."""
        known = {*self._stubs.values(), *self._spared()}
        return [pid for pid in self._trees.children(self._reaper()) if pid not in known]

    def _spared(self) -> set[int]:
        """Never ended by a command's end: the stubs, which end by themselves when nothing of theirs is left, and who collects."""
        return {*self._stubs.values(), os.getpid(), self._reaper()}

    def _answer(self, message: Mapping[str, object]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self._control.send(json.dumps(message).encode())

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def close(self, first: subprocess.Popen[bytes] | None) -> None:
        """Ends everything."""
        if self._view.reaper is not None:
            with contextlib.suppress(ProcessLookupError):
                (first.kill if first is not None else lambda: os.kill(self._reaper(), signal.SIGKILL))()
        else:
            self._clear()
        for stub in self._stubs.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(stub, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def main(control: socket.socket) -> None:
    """Makes the sandbox that the first message describes, and keeps it until the socket ends."""
    data, fds, _, _ = socket.recv_fds(control, MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
    if not data:
        return
    config = json.loads(commands.read_all(fds[0]))
    os.umask(0o022)
    trees = Trees()
    first: subprocess.Popen[bytes] | None = None
    try:
        if config["kind"] == "plain":
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER)
            view = views.View(None)
        elif config["kind"] == "local":
            view = views.local(config)
        else:
            view, first = views.bubblewrap(config)
    except views.Failed as error:
        control.send(json.dumps({"failed": str(error)}).encode())
        return
    keeper = Keeper(control, trees, view, _rights(config, view))
    control.send(json.dumps({"ready": True, "pid": view.network_pid or view.reaper}).encode())
    try:
        keeper.serve()
    finally:
        keeper.close(first)


def _rights(config: Mapping[str, object], view: views.View) -> commands.Rights:
    def number(name: str) -> int | None:
        value = config[name]
        return value if isinstance(value, int) else None

    cpus = config["cpus"]
    return commands.Rights(
        uid=number("uid_inside"),
        gid=number("uid_inside"),
        user_namespace=view.user_namespace,
        confined=bool(config["confined"]),
        data_bytes=number("data_bytes"),
        processes=number("processes"),
        cpus=frozenset(int(one) for one in cpus) if isinstance(cpus, list) else None,
    )
