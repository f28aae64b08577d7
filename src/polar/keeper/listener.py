"""Opens a listening socket in another process's network namespace and hands it out."""

from __future__ import annotations

import os
import socket

from polar.keeper import kernel


def main(channel: socket.socket, pid: int, port: int) -> None:
    """Binds 127.0.0.1:`port` where the process `pid` is, and sends the socket over `channel`; or the reason why not."""
    try:
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        if not kernel.may_administer():
            kernel.setns(kernel.user_namespace_of(network), kernel.CLONE_NEWUSER)
        kernel.setns(network, kernel.CLONE_NEWNET)
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", port))
            one.listen(4096)
            socket.send_fds(channel, [b"socket"], [one.fileno()])
    except OSError as error:
        channel.send(str(error).encode())
