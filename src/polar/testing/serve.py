"""Runs an ASGI application on 127.0.0.1 from a thread, for tests and self-checks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn


@dataclass(slots=True)
class Running:
    """A server in a thread. `stop` may be called more than once."""

    url: str
    server: uvicorn.Server
    thread: threading.Thread

    def stop(self, timeout_s: float = 5.0, *, cut: bool = False) -> None:
        """Ends the server; `cut` drops open connections at once instead of letting answers in flight go out."""
        self.server.should_exit = True
        self.server.force_exit = cut
        self.thread.join(timeout_s)


@contextmanager
def serve_app(app: Callable[..., Any], *, port: int = 0, start_timeout_s: float = 10.0) -> Iterator[Running]:
    """Serves `app` until the block ends; `port` 0 picks a free one. Raises `TimeoutError` if it does not come up."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="critical", access_log=False, ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + start_timeout_s
    while not server.started:
        if time.monotonic() > deadline or not thread.is_alive():
            raise TimeoutError("the server did not start")
        time.sleep(0.005)
    running = Running(f"http://127.0.0.1:{listener.getsockname()[1]}", server, thread)
    try:
        yield running
    finally:
        running.stop()
        listener.close()
