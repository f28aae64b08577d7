"""TCP sockets over which nothing goes for minutes while a model thinks, and ports for servers that start later. Knows no protocol."""

from __future__ import annotations

import errno
import itertools
import random
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


_PORTS = range(20_000, 32_768)
"""Below those that systems give to outgoing connections (Linux: from 32768; IANA, RFC 6335: from 49152): nothing takes one of these by
chance between here and a server's start, or its next one."""
_turns = itertools.count(random.SystemRandom().randrange(len(_PORTS)))


def free_port(host: str = "127.0.0.1") -> int:
    """A port that is free now, another one each time. Raises `OSError` where `host` is no address of this machine, or none is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for place in itertools.islice(_turns, len(_PORTS)):
        port = _PORTS[place % len(_PORTS)]
        with socket.socket(family) as sock:
            try:
                sock.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
            return port
    raise OSError(errno.EADDRINUSE, f"no port from {_PORTS[0]} to {_PORTS[-1]} is free on {host}")
