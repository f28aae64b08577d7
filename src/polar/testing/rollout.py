"""A rollout service on a real listener, with stub nodes on theirs, all in the running event loop. For tests of its clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from polar.gateway.serve import bind, run_server, server_of
from polar.rollout.config import RolloutConfig
from polar.rollout.service import Service
from polar.testing.node import StubNode

TOKEN = "service-token"


@asynccontextmanager
async def listening(app: Callable[..., Any], port: int = 0) -> AsyncIterator[str]:
    """Serves the app on a loopback port (0: a free one); gives its URL."""
    sock = bind("127.0.0.1", port)
    server = server_of(app)
    server.config.timeout_graceful_shutdown = 1
    task = asyncio.create_task(run_server(server, sock))
    try:
        while not server.started:  # noqa: ASYNC110 - uvicorn sets a flag, no event
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)
        sock.close()


@asynccontextmanager
async def running_service(folder: Path, **settings: Any) -> AsyncIterator[tuple[Service, str]]:
    """A started service over `folder`, and its URL. Its polls and leases are quick; `settings` go over that."""
    defaults: dict[str, Any] = {
        "store": str(folder / "rollout.db"),
        "save_dir": str(folder / "saved"),
        "dispatch_poll_interval_seconds": 0.05,
        "callback_retry": {"first_seconds": 0.05, "longest_seconds": 0.2},
    }
    service = Service(RolloutConfig.model_validate({**defaults, **settings}), TOKEN)
    await service.start()
    try:
        async with listening(service.app, settings.get("port", 0)) as url:
            try:
                yield service, url
            finally:
                service.feed.close()
    finally:
        await service.aclose()


@asynccontextmanager
async def stub_rollouts(folder: Path, nodes: Sequence[StubNode] | None = None, **settings: Any) -> AsyncIterator[tuple[Service, str]]:
    """The same with nodes that have joined; by default one, at which every session succeeds."""
    async with AsyncExitStack() as stack:
        service, url = await stack.enter_async_context(running_service(folder, **settings))
        for node in [StubNode()] if nodes is None else nodes:
            own = await stack.enter_async_context(listening(node.app))
            await node.join(url, TOKEN, own)
            stack.push_async_callback(node.leave)
        yield service, url
