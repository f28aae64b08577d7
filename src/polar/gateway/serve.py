"""Puts a gateway on its two listeners: the model API, which sandboxes see, and the control API, on loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import uvicorn
from starlette.types import ASGIApp

from polar.errors import ConfigError
from polar.gateway.config import GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.http1 import Http1
from polar.gateway.shards import Shards
from polar.gateway.waiting import engines_up, entered, unless
from polar.sockets import probe

SWITCH_INTERVAL_S = 0.0005
"""How long a render in its thread may keep the interpreter from the event loop; Python's default of 5 ms is felt by every call."""
CLOSE_S = 5
"""How long clients may take for the last bytes once all calls have ended: for one that has stalled there would be no end."""


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises `ConfigError` if the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe(sock)
    try:
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        why = "ports go up to 65535" if isinstance(error, OverflowError) else error.strerror
        raise ConfigError(f"cannot listen on {host}:{port}: {why}; choose another with --port") from error
    sock.listen(2048)
    sock.setblocking(False)
    return sock


def server_of(app: ASGIApp) -> uvicorn.Server:
    """One uvicorn server. Upgrades are left to the app, which refuses them itself; long answers are not cut before its end."""
    config = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        http=Http1,
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nothing here asks for a client's address
        date_header=False,
        timeout_keep_alive=120,  # above the 90 s of clients in Rust and Go, so that they never reuse a connection that is being closed
        backlog=2048,
        h11_max_incomplete_event_size=256 * 1024,
        timeout_graceful_shutdown=CLOSE_S,
    )
    config.load()
    return uvicorn.Server(config)


@asynccontextmanager
async def serving(
    gateway: Gateway, *, progress: Callable[[str], object] = lambda line: None, control_host: str = "127.0.0.1"
) -> AsyncIterator[Gateway]:
    """A started gateway on its listeners. Its `config` then holds the real ports (0 takes free ones). `control_host` is loopback but for
    the nodes of a service on another machine; every control route asks for the token there too."""
    config = gateway.config
    model_socket = bind(config.host, config.port)
    config.port = model_socket.getsockname()[1]
    try:
        control_socket = bind(control_host, 0 if config.admin_port == 0 else config.control_port)
    except ConfigError:
        model_socket.close()
        raise
    config.admin_port = control_socket.getsockname()[1]
    servers = [server_of(gateway.api), server_of(gateway.admin)]
    tasks: list[asyncio.Task[None]] = []
    try:
        await gateway.start(progress)
        for server, sock in zip(servers, (model_socket, control_socket), strict=True):
            tasks.append(asyncio.create_task(run_server(server, sock)))
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
            for task in tasks:
                if task.done():
                    task.result()
        yield gateway
    finally:
        await gateway.aclose()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in (model_socket, control_socket):
            sock.close()


async def run_server(server: uvicorn.Server, sock: socket.socket) -> None:
    """`Server.serve` without its signal handlers: this process may hold several servers."""
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[sock])
    await server.main_loop()
    await server.shutdown(sockets=[sock])


def settle_garbage() -> None:
    """What a started gateway holds (modules, renderers, tool tables) is not searched for garbage again, and the collector comes less often:
    its full runs would stop every call for tens of milliseconds. A call leaves next to no cycles behind."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


async def run_until_signal(
    config: GatewayConfig, ready: Callable[[Gateway], object], progress: Callable[[str], None], shards: Shards | None = None
) -> None:
    """Serves until SIGINT or SIGTERM, then shuts down gracefully. Engines that are still loading are waited for first, as `config` says.
    `ready` is called (and awaited) once it listens."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(signum, stop.set)
    if not await unless(stop, engines_up(config.engines, config.engine_wait_s, progress)):
        return
    async with AsyncExitStack() as stack:
        gateway = await entered(stack, serving(Gateway(config, shards=shards), progress=progress), stop)
        if gateway is None:
            return
        settle_garbage()
        outcome = ready(gateway)
        if asyncio.iscoroutine(outcome):
            await outcome
        orphaned = asyncio.create_task(without_parent(stop)) if shards is not None else None
        await stop.wait()
        if orphaned is not None:
            orphaned.cancel()
        progress("shutting down: waiting for calls in flight")


async def without_parent(stop: asyncio.Event) -> None:
    """Ends a worker whose supervisor was killed: nobody else would."""
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110 - a parent that dies sets no event
        await asyncio.sleep(1.0)
    stop.set()
