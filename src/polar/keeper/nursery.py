"""Where keepers come from: one bare process a node, which forks itself. A keeper is there in a millisecond and shares its memory with the
others, which a new interpreter each would not.

A request is one message: `keeper`, or `listen <pid> <port>` for a helper of the relay (`polar.keeper.listener`), with the new process's
socket and its log; the answer is its pid, with a descriptor of the process. When the socket ends, so does this; the others have sockets
of their own.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NoReturn

from polar.keeper import listener
from polar.keeper import main as keeper


def main(channel: int) -> None:
    """Serves until the socket `channel` ends."""
    control = socket.socket(fileno=channel)
    control.set_inheritable(False)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 64, 2, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        # until its descriptor is open, the keeper must not be reaped: the number could be another process's by then
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            _become(data.decode().split(), control, fds)
        handle = os.pidfd_open(pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        socket.send_fds(control, [str(pid).encode()], [handle])
        for fd in (handle, *fds):
            os.close(fd)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(what: Sequence[str], control: socket.socket, fds: Sequence[int]) -> NoReturn:
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        control.close()
        os.setsid()
        os.dup2(fds[1], 2)
        os.close(fds[1])
        own = socket.socket(fileno=fds[0])
        if what[0] == "listen":
            listener.main(own, int(what[1]), int(what[2]))
        else:
            keeper.main(own)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)
