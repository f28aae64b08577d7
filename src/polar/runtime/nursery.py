"""This process's line to the nursery of keepers (`polar.keeper.nursery`): started with the first sandbox, ended with this process."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import polar

SOURCE = str(Path(polar.__file__).parent.parent)
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where programs are looked for, in sandboxes and by what makes them."""


def python(code: str) -> list[str]:
    """A bare interpreter (nothing of the environment, no site packages) that runs `code`, with `polar.keeper` to import from."""
    return [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.append({SOURCE!r}); {code}"]


class Nursery:
    """Blocking, and safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def keeper(self, control: socket.socket, log: Path) -> tuple[int, int]:
        """A new keeper that answers on `control` and writes its troubles to `log`: its pid and a descriptor of the process. Raises
        `OSError`."""
        with log.open("ab") as file:
            return self._ask(b"keeper", control.fileno(), file.fileno())

    def listener(self, pid: int, port: int) -> socket.socket:
        """A socket that listens on 127.0.0.1:`port` in the network namespace of the process `pid`. Raises `OSError` with the reason."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs, open(os.devnull, "ab") as nothing:
                _, process = self._ask(f"listen {pid} {port}".encode(), theirs.fileno(), nothing.fileno())
                os.close(process)
            said, fds, _, _ = socket.recv_fds(ours, 1000, 1, socket.MSG_CMSG_CLOEXEC)
        if not fds:
            raise OSError(said.decode(errors="replace") or "the helper ended")
        return socket.socket(fileno=fds[0])

    def close(self) -> None:
        """Ends it; keepers go on."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process = None

    def _ask(self, what: bytes, control: int, log: int) -> tuple[int, int]:
        with self._lock:
            try:
                return self._asked(what, control, log)
            except ConnectionError:
                self.close()  # somebody killed it: the next one
                return self._asked(what, control, log)

    def _asked(self, what: bytes, control: int, log: int) -> tuple[int, int]:
        if self._socket is None:
            self._start()
        assert self._socket is not None
        socket.send_fds(self._socket, [what], [control, log])
        data, fds, _, _ = socket.recv_fds(self._socket, 64, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ConnectionResetError("the nursery of keepers ended")
        return int(data), fds[0]

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                python(f"from polar.keeper.nursery import main; main({theirs.fileno()})"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={"PATH": PATH},
                start_new_session=True,
            )
        self._socket = ours


def nursery() -> Nursery:
    """The one of this process."""
    return _of(os.getpid())


@functools.cache
def _of(pid: int) -> Nursery:
    made = Nursery()
    atexit.register(made.close)
    return made
