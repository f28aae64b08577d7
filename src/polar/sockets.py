"""TCP sockets over which nothing goes for minutes while a model thinks. Knows no protocol."""

from __future__ import annotations

import socket
from typing import Any

IDLE_S = 30
"""Below what routers (NAT) and load balancers let pass before they forget a connection without a word: 60 seconds and up."""
INTERVAL_S = 15
PROBES = 4


def probe(sock: socket.socket) -> None:
    """Probes a silent peer from now on: the way to it stays open, and one that is gone is an error after a minute and a half. What is
    accepted on a listening socket inherits this."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", IDLE_S), ("TCP_KEEPINTVL", INTERVAL_S), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, option):  # not every system lets a program choose
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def probing(address: tuple[Any, ...]) -> socket.socket:
    """A fresh client's socket for one of `socket.getaddrinfo`'s addresses, as aiohttp's connector wants one made."""
    sock = socket.socket(*address[:3])
    probe(sock)
    return sock
