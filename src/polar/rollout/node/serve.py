"""`polar serve_gateway`: one node as a process, with its gateway, until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from polar.errors import ConfigError, SandboxError
from polar.gateway.gateway import Gateway
from polar.gateway.serve import SWITCH_INTERVAL_S, serving, without_parent
from polar.gateway.waiting import engines_up, entered, unless
from polar.rollout import roots
from polar.rollout.config import NodeConfig, PolarConfig, Retry
from polar.rollout.node.node import Node
from polar.runtime import Owner
from polar.runtime.owner import owners
from polar.runtime.reaper import reap

Progress = Callable[[str], object]

LOCK = "node.lock"
"""In the node's `work_dir`, locked (flock) by the one process that may be this node."""
SANDBOXES = "sandboxes"
"""There, too: the folders of sandboxes, by owner."""
EARLIER_S = 60.0
"""Beyond `shutdown_s`: how long an earlier process of the node, which ends because its service was killed, is waited for."""


@asynccontextmanager
async def serving_node(
    config: NodeConfig,
    *,
    service_url: str | None = None,
    service_token: str | None = None,
    heartbeat_s: float = 5.0,
    retry: Retry | None = None,
    gateway: Gateway | None = None,
    progress: Progress = lambda line: None,
    noted: bool = False,
) -> AsyncIterator[Node]:
    """A started node on its gateway's listeners. `gateway` replaces the one that `config` describes. At the end what runs is given the
    gateway's `shutdown_s` to end by itself; the rest is lost, and said so to whoever waits for it. `noted`: `polar ps` and `polar gc` of
    this user find its sandboxes, until it ends with nothing left."""
    settings = config.gateway_config if gateway is None else gateway.config
    if gateway is None:
        if config.token is not None:
            settings.admin_token = config.token
        gateway = Gateway(settings)
    async with _alone(config, settings.shutdown_s + EARLIER_S, progress):
        root = config.work_path / SANDBOXES
        if noted:
            await asyncio.to_thread(roots.remember, root)
        owner = await asyncio.to_thread(Owner.open, root)
        try:
            async with serving(gateway, progress=progress, control_host=config.control_host):
                node = Node(config, gateway, owner, service_url, service_token, heartbeat_s, retry=retry)
                node.mount()
                await node.start()
                try:
                    yield node
                finally:
                    if not node.draining:
                        await node.drain(settings.shutdown_s)
                    await node.aclose()
        finally:
            await asyncio.to_thread(owner.close)
            if noted:
                await _forgotten(root)


async def _forgotten(root: Path) -> None:
    """Takes the note back if nothing is left below it. What resists stays noted, and is said by `polar gc`."""
    with contextlib.suppress(SandboxError):
        await reap(root)
        if not await asyncio.to_thread(owners, root):
            await asyncio.to_thread(roots.forget, root)


@asynccontextmanager
async def _alone(config: NodeConfig, patience_s: float, progress: Progress) -> AsyncIterator[None]:
    """Holds the lock of the node's folder, once no other process does. Raises `ConfigError`: two of one node would share what they owe."""
    folder = config.work_path
    lock = await asyncio.to_thread(_lock_file, folder)
    try:
        if not _locked(lock):
            progress(f"node {config.id}: waiting for an earlier process of this node to end")
            deadline = time.monotonic() + patience_s
            while not _locked(lock):
                if time.monotonic() > deadline:
                    raise ConfigError(f"node {config.id} runs already: another process uses {folder}; give this one another work_dir")
                await asyncio.sleep(0.1)
        yield
    finally:
        os.close(lock)


def _lock_file(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def run_node(
    config: PolarConfig,
    node_id: str | None = None,
    *,
    ready: Progress = lambda line: None,
    watch_parent: bool = False,
    with_service: bool = True,
) -> None:
    """Runs the node of that name until SIGINT or SIGTERM, once its engines answer (`gateway.engine_wait_s`); a second signal ends the
    waiting for what still runs. `ready` gets lines for people. With `watch_parent` it ends when its parent does, which has nobody else to
    tell it. Raises `KeyError` for an unknown node."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings = config.node(node_id)
    if settings.docker_host is not None:
        os.environ["DOCKER_HOST"] = settings.docker_host
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def signalled() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, signalled)
    watcher = asyncio.create_task(without_parent(stop)) if watch_parent else None
    try:
        own = settings.gateway_config
        if not await unless(stop, engines_up(own.engines, own.engine_wait_s, ready)):
            return
        starting = serving_node(
            settings,
            service_url=config.rollout_url if with_service else None,
            service_token=config.rollout.token if with_service else None,
            heartbeat_s=config.gateway.heartbeat_interval_seconds,
            retry=config.rollout.callback_retry,
            progress=ready,
            noted=True,
        )
        async with contextlib.AsyncExitStack() as stack:
            node = await entered(stack, starting, stop)
            if node is None:
                return
            ready(f"node {settings.id}: model API {node.gateway.config.model_url}, control API {node.registration().gateway_url}")
            await stop.wait()
            ready("shutting down: waiting for sessions that run")
            hurrying = asyncio.create_task(_hurry(hurry, node))
            await node.drain(node.gateway.config.shutdown_s)
            hurrying.cancel()
    finally:
        if watcher is not None:
            watcher.cancel()


async def _hurry(hurry: asyncio.Event, node: Node) -> None:
    await hurry.wait()
    for attempt in list(node.attempts):
        attempt.shut_down()
