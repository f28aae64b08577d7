"""`polar gateway --workers N`: starts the worker processes, restarts one that dies, ends them all together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import orjson

from polar.cli.control import Admin, call
from polar.errors import ConfigError
from polar.gateway.config import GatewayConfig, reachable
from polar.sockets import free_port

RESTART_S = 1.0
LONGEST_RESTART_S = 30.0
SOON_S = 5.0
"""A worker that lives no longer has not come up."""
READY_S = 120.0


async def supervise(config: GatewayConfig, ready: Callable[[Admin], Awaitable[None]], progress: Callable[[str], None]) -> None:
    """Runs until SIGINT or SIGTERM. Worker 0 has the configured ports, the others free ones."""
    from polar.gateway.waiting import engines_up, unless  # with all that a gateway needs: not for other commands

    token = config.admin_token or "polar-admin-" + secrets.token_urlsafe(24)
    ports = [(config.port, config.control_port), *[(free_port(config.host), free_port()) for _ in range(1, config.workers)]]
    urls = [(f"http://{reachable(config.host)}:{port}", f"http://127.0.0.1:{admin_port}") for port, admin_port in ports]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    if not await unless(stop, engines_up(config.engines, config.engine_wait_s, progress)):
        return
    with tempfile.TemporaryDirectory(prefix="polar-workers-") as folder:
        commands = []
        for index, (port, admin_port) in enumerate(ports):
            settings = {**config.model_dump(), "port": port, "admin_port": admin_port, "admin_token": token}
            file = Path(folder) / f"worker-{index}.json"
            file.touch(mode=0o600)
            file.write_bytes(orjson.dumps(settings))
            commands.append(
                [sys.executable, "-m", "polar.cli", "gateway", "--config", str(file), "--session", "none", "--worker", str(index)]
            )
        environment = {**os.environ, "POLAR_WORKERS": orjson.dumps(urls).decode()}
        up = [asyncio.Event() for _ in commands]
        keepers = [
            asyncio.create_task(_keep(index, command, environment, up[index], stop, progress)) for index, command in enumerate(commands)
        ]

        async def come_up() -> None:
            for index, (_, admin_url) in enumerate(urls):
                await _until_ready(index, Admin(admin_url, token), keepers[index])
                up[index].set()
            progress(f"{config.workers} workers are up")
            await ready(Admin(urls[0][1], token))

        try:
            if await unless(stop, come_up()):
                await stop.wait()
        finally:
            stop.set()
            progress("shutting down: waiting for calls in flight")
            await asyncio.gather(*keepers, return_exceptions=True)


async def _keep(
    index: int, command: list[str], environment: dict[str, str], up: asyncio.Event, stop: asyncio.Event, progress: Callable[[str], None]
) -> None:
    """Keeps one worker running. Until it was `up`, one that ends in its first seconds has a fault that a restart won't mend, a
    `ConfigError`. Later its sessions have nobody else, so it is tried again, ever more rarely."""
    wait_s = RESTART_S
    while not stop.is_set():
        began = asyncio.get_running_loop().time()
        try:
            why = f"ended with code {await _run(command, environment, stop)}"
        except OSError as error:  # the machine has no process or no descriptor to give now
            why = f"could not be started ({error.strerror or error})"
            if not up.is_set():
                raise ConfigError(f"worker {index} {why}") from error
        if stop.is_set():
            return
        soon = asyncio.get_running_loop().time() - began < SOON_S
        if soon and not up.is_set():
            raise ConfigError(f"worker {index} {why} as soon as it started")
        wait_s = min(2 * wait_s, LONGEST_RESTART_S) if soon else RESTART_S
        progress(f"worker {index} {why}; starting it again")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), wait_s)


async def _run(command: list[str], environment: dict[str, str], stop: asyncio.Event) -> int:
    """A worker until it ends, by itself or since `stop` was set; its exit code. Raises `OSError` where it cannot be started."""
    process = await asyncio.create_subprocess_exec(*command, env=environment, start_new_session=True)
    ended = asyncio.create_task(process.wait())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stop.is_set() and process.returncode is None:
        process.terminate()
    return await ended


async def _until_ready(index: int, admin: Admin, keeper: asyncio.Task[None]) -> None:
    deadline = asyncio.get_running_loop().time() + READY_S
    while True:
        if keeper.done():
            keeper.result()
        try:
            await asyncio.to_thread(call, admin, "GET", "/health?own=1")
            return
        except ConfigError as error:
            if asyncio.get_running_loop().time() > deadline:
                raise ConfigError(f"worker {index} does not come up: {error}") from error
            await asyncio.sleep(0.2)
