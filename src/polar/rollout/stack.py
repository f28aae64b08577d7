"""The whole of it on one machine: the rollout service in this process, each node a child process that is started again when it dies.

Knows no sandbox and no stage. A node that crashes takes no other down, and one that this process leaves behind (after kill -9) ends by
itself: it watches its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from polar.errors import ConfigError, SandboxError
from polar.folders import state_dir
from polar.gateway.config import reachable
from polar.gateway.serve import bind, run_server, server_of
from polar.gateway.waiting import engines_up, unless
from polar.rollout.config import PolarConfig
from polar.rollout.service import Service

Progress = Callable[[str], None]

NODE_START_S = 300.0
"""How long a node may take to register: its engine is checked, its harness may be installed."""
FIRST_RESTART_S, LONGEST_RESTART_S = 0.5, 30.0
STOP_S = 30.0
"""Beyond a node's `shutdown_s`: how long it may take to end, before it is killed."""


def service_token(config: PolarConfig) -> str:
    """The API's token: as configured, else the one kept in the state directory, made there the first time."""
    if config.rollout.token:
        return config.rollout.token
    path = token_file()
    with contextlib.suppress(FileNotFoundError):
        if token := path.read_text().strip():
            return token
        path.unlink()  # the disk was full when it was to be written: nobody could call with an empty one
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    token = "polar-rollout-" + secrets.token_urlsafe(24)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:  # another service made it at the same moment
        return path.read_text().strip()
    with os.fdopen(descriptor, "w") as file:
        file.write(token)
    return token


def token_file() -> Path:
    return state_dir() / "rollout.token"


@dataclass(frozen=True, slots=True)
class Stack:
    """A running service: where it is and what it asks for."""

    url: str
    token: str
    service: Service


@asynccontextmanager
async def serving_rollout(config: PolarConfig, *, progress: Progress = lambda line: None) -> AsyncIterator[Stack]:
    """The service alone on its listeners; `config.rollout` then holds the real ports (0 takes free ones)."""
    rollout, token = config.rollout, service_token(config)
    sockets = [bind(rollout.host, rollout.port)]
    rollout.port = sockets[0].getsockname()[1]
    if rollout.compat_open:
        try:
            sockets.append(bind("127.0.0.1", rollout.compat_port))
        except ConfigError:
            sockets[0].close()
            raise
        rollout.compat_port = sockets[1].getsockname()[1]
    service = Service(rollout, token)
    await service.start()
    apps = [service.app, *([service.open_app] if rollout.compat_open else [])]
    servers: list[uvicorn.Server] = [server_of(app) for app in apps]
    tasks = [asyncio.create_task(run_server(server, sock)) for server, sock in zip(servers, sockets, strict=True)]
    try:
        while not all(server.started for server in servers):  # noqa: ASYNC110 - uvicorn sets a flag, no event
            await asyncio.sleep(0.01)
        url = f"http://{reachable(rollout.host)}:{rollout.port}"
        progress(f"rollout service at {url}")
        yield Stack(url, token, service)
    finally:
        for server in servers:
            server.should_exit = True
        await service.aclose()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in sockets:
            sock.close()


@asynccontextmanager
async def serving(
    config: PolarConfig, folder: Path, *, progress: Progress = lambda line: None, stop: asyncio.Event | None = None
) -> AsyncIterator[Stack]:
    """Service and nodes. `folder` gets the nodes' logs and their settings (which hold the token, so it is private). The service takes tasks
    while the nodes' engines are waited for (`gateway.engine_wait_s`); a `stop` that is set meanwhile leaves it without nodes. One that is
    set while they start does not wait for them.

    Raises `SandboxError` with the end of its log where a node does not come up the first time.
    """
    stop = stop or asyncio.Event()
    async with serving_rollout(config, progress=progress) as stack:
        if not await unless(stop, _engines_up(config, progress)):
            yield stack
            return
        settings = config.model_copy(deep=True)
        settings.rollout.token = stack.token
        settings.gateway.rollout_server_url = settings.gateway.rollout_server_url or stack.url
        file = _settings_file(folder, settings)
        children = [
            Child(node.id, file, folder / f"node-{node.id}.log", progress, stop_s=node.gateway_config.shutdown_s + STOP_S)
            for node in config.gateway.nodes
        ]
        try:
            for child in children:
                child.start()
            await unless(stop, _registered(stack, children))
            yield stack
        finally:
            await asyncio.gather(*(child.stop() for child in children))
            file.unlink(missing_ok=True)


async def _engines_up(config: PolarConfig, progress: Progress) -> None:
    """Each address is asked, and waited for, once, whatever number of nodes has it."""
    settings = [node.gateway_config for node in config.gateway.nodes]
    waits = {(name, str(engine)): (name, engine, own.engine_wait_s) for own in settings for name, engine in own.engines.items()}
    await asyncio.gather(*(engines_up({name: engine}, wait_s, progress) for name, engine, wait_s in waits.values()))


class Child:
    """One node's process, kept running until `stop`."""

    def __init__(self, node_id: str, settings: Path, log: Path, progress: Progress, *, stop_s: float = STOP_S) -> None:
        self.node_id = node_id
        self.log = log
        self.pid: int | None = None
        self.exit_code: int | None = None
        self._command = [sys.executable, "-m", "polar.cli", "serve_gateway", "--config", str(settings), "--node-id", node_id, "--child"]
        self._progress = progress
        self._stop_s = stop_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """Lets it drain, then ends it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        wait_s = FIRST_RESTART_S
        while True:
            began = time.monotonic()
            try:
                self.exit_code = await self._once()
                why = f"ended ({_ended(self.exit_code)})"
            except OSError as error:  # the machine has no process, no descriptor or no disk to give now
                why = f"could not be started ({error.strerror or error})"
            if time.monotonic() - began > LONGEST_RESTART_S:
                wait_s = FIRST_RESTART_S
            self._progress(f"node {self.node_id} {why}; it is started again, see {self.log}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RESTART_S)

    async def _once(self) -> int:
        with self.log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=asyncio.subprocess.STDOUT, start_new_session=True
            )
        self.pid = process.pid
        try:
            return await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), self._stop_s)
            except TimeoutError:
                process.kill()
                await process.wait()
            raise
        finally:
            self.pid = None

    def tail(self) -> str:
        return self.log.read_text(errors="replace").strip()[-1500:]


async def _registered(stack: Stack, children: list[Child]) -> None:
    deadline = time.monotonic() + NODE_START_S
    while True:
        known = {str(node["node_id"]) for node in stack.service.nodes()}
        missing = [child for child in children if child.node_id not in known]
        if not missing:
            return
        for child in missing:
            if child.exit_code is not None:
                raise SandboxError(f"node {child.node_id} did not come up ({_ended(child.exit_code)}); its log ends with:\n{child.tail()}")
        if time.monotonic() > deadline:
            raise SandboxError(
                f"node {missing[0].node_id} did not register in {NODE_START_S:.0f} s; its log ends with:\n{missing[0].tail()}"
            )
        await asyncio.sleep(0.05)


def _ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


def _settings_file(folder: Path, settings: PolarConfig) -> Path:
    """What the nodes read: with the token, so for its owner only."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "nodes.json"
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(settings.model_dump_json())
    return path
