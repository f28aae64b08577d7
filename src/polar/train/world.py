"""What a live run rolls out in: a rollout service with its node and engine, started for the run or running elsewhere. Knows no torch."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from polar.errors import ConfigError
from polar.rollout.client import AsyncClient
from polar.rollout.config import NodeConfig, NodesConfig, PolarConfig, RolloutConfig
from polar.train.config import TrainConfig
from polar.train.disk import saving

FIRST_ANSWER_S = 5.0
"""How long a service elsewhere may take for its first answer."""
NODE_SHUTDOWN_S = 2.0
"""A run that is stopped goes on later, and its sessions are run again then: they are not waited for."""


@dataclass(frozen=True, slots=True)
class World:
    """A rollout service that answers. `url`, `token`: of its API, which spreads pauses and versions to all nodes."""

    client: AsyncClient
    url: str
    token: str | None


@asynccontextmanager
async def entered(
    config: TrainConfig, model: str, harnesses: Sequence[str], folder: Path, progress: Callable[[str], None]
) -> AsyncIterator[World]:
    """The service at `rollout.url`, or one of the run's own below `folder`, whose books are kept there: a run that goes on finds what its
    sessions came to. `folder` is there, if empty, before a service elsewhere can be asked for anything, too. `model` is what an embedded
    engine is started with. Raises `ConfigError` where sandboxes cannot be had here."""
    rollout = config.rollout
    if rollout.url is not None:
        async with AsyncClient(rollout.url, rollout.token, patience_s=FIRST_ANSWER_S) as first:
            await first.status()
        await asyncio.to_thread(_made, folder)
        async with AsyncClient(rollout.url, rollout.token) as client:
            yield World(client, client.url, _token(rollout.token))
        return
    from polar.engine.child import running_engine
    from polar.harness import install, registered
    from polar.rollout.stack import serving

    await _ready(rollout.runtime.backend)
    await asyncio.to_thread(_made, folder)
    installing = [
        asyncio.create_task(asyncio.to_thread(install, name, progress=progress))
        for name in harnesses
        if name in registered() and registered()[name].package is not None
    ]
    async with AsyncExitStack() as stack:
        urls = config.engine.urls
        if config.engine.embedded:
            progress(f"starting polar engine {model}")
            urls = [await stack.enter_async_context(running_engine(model, folder))]
        running = await stack.enter_async_context(serving(node_config(config, urls, folder), folder / "node", progress=progress))
        for task in installing:
            await task
        client = await stack.enter_async_context(AsyncClient(running.url, running.token))
        yield World(client, running.url, running.token)


def node_config(config: TrainConfig, urls: list[str], folder: Path) -> PolarConfig:
    """A service and one node on free ports, with everything in `folder`."""
    at_once = config.rollout.at_once
    node = NodeConfig(
        id="local",
        port=0,
        control_port=0,
        engines={"default": config.engine.for_gateway(urls)},
        gateway={"store": str(folder / "polar.db"), "shutdown_s": NODE_SHUTDOWN_S},
        max_init_workers=max(2, at_once),
        max_run_workers=at_once,
        max_postrun_workers=max(2, at_once),
        work_dir=str(folder / "node" / "work"),
        artifacts_dir=str(folder / "artifacts"),
        token=secrets.token_urlsafe(24),
    )
    service = RolloutConfig(port=0, store=str(folder / "rollout.db"), save_dir=str(folder / "results"), token=secrets.token_urlsafe(24))
    return PolarConfig(rollout=service, gateway=NodesConfig(nodes=[node], heartbeat_interval_seconds=1.0))


def _made(folder: Path) -> None:
    """Raises `SaveFailed`."""
    with saving("the rollouts' folder", folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)


async def _ready(backend: str) -> None:
    from polar.runtime import named

    why = await named(backend).unavailable()
    if why is not None:
        raise ConfigError(f"rollout.runtime: {backend}: {why}")


def _token(given: str | None) -> str | None:
    from polar.rollout.client import service_token

    return service_token(given)
