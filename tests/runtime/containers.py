"""What the tests of containers share: one owner, sandboxes that are stopped and removed again, a stand-in for the model API."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polar.runtime import Owner, Place, RuntimeSpec
from polar.runtime.docker import DockerRuntime


class Containers:
    """Makes started containers. Each has its own folder; `owner.close` ends the Podman service that Polar started for them."""

    def __init__(self, owner: Owner, gateway: tuple[str, int]) -> None:
        self.owner = owner
        self.gateway = gateway
        self.made: list[DockerRuntime] = []

    def place(self) -> Place:
        sandbox_id = f"test-{secrets.token_hex(4)}"
        return Place(sandbox_id, self.owner.id, self.owner.sandbox(sandbox_id), self.gateway)

    def runtime(self, **spec: Any) -> DockerRuntime:
        made = DockerRuntime(RuntimeSpec(**{"backend": "docker", "network": "none", **spec}), self.place())
        self.made.append(made)
        return made

    async def start(self, **spec: Any) -> DockerRuntime:
        made = self.runtime(**spec)
        await made.start()
        return made


async def _hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        request = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nhello " + request.split()[1])
        await writer.drain()
    except asyncio.IncompleteReadError:
        pass  # somebody looked whether anybody listens
    finally:
        writer.close()


@asynccontextmanager
async def containers_of(root: Path) -> AsyncIterator[Containers]:
    problem = await DockerRuntime.unavailable()
    if problem is not None:
        pytest.skip(problem)
    owner = Owner.open(root)
    server = await asyncio.start_server(_hello, "127.0.0.1", 0)
    containers = Containers(owner, server.sockets[0].getsockname()[:2])
    try:
        yield containers
    finally:
        await asyncio.gather(*(one.stop() for one in containers.made))
        server.close()
        owner.close()


@pytest.fixture
async def containers(tmp_path: Path) -> AsyncIterator[Containers]:
    async with containers_of(tmp_path / "sandboxes") as made:
        yield made
