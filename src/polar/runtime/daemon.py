"""The daemon that speaks Docker's API, Docker's or Podman's: which one, and a connection to it. Knows no sandbox.

An address is `unix:///path.sock`, `tcp://host:port` (no TLS: such a daemon must not be reachable by others anyway), or `podman`: the
service that Polar starts itself where only the program is installed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Self

import aiodocker
import aiohttp

from polar.errors import SandboxError
from polar.runtime.podman import service

OWN_PODMAN = "podman"
"""The address of the service that Polar starts itself."""
REQUEST_S = 300.0
"""How long one request may take; builds, pulls and commits are not limited here."""


def candidates(explicit: str | None, *, podman: bool) -> Iterator[str]:
    """Addresses to try, best first. An explicit one, or one named in the environment, is the only one; `podman` prefers Podman's."""
    docker_host, podman_host = os.environ.get("DOCKER_HOST"), os.environ.get("CONTAINER_HOST")
    named = explicit or (podman_host or docker_host if podman else docker_host or podman_host)
    if named:
        yield named
        return
    home, run = Path.home(), Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}")
    dockers = [Path("/var/run/docker.sock"), run / "docker.sock", home / ".docker/run/docker.sock", home / ".docker/desktop/docker.sock"]
    podmans = [run / "podman/podman.sock", *([Path("/run/podman/podman.sock")] if os.geteuid() == 0 else [])]
    own = [OWN_PODMAN] if shutil.which("podman") else []
    sockets = [f"unix://{path}" for path in dockers if os.access(path, os.R_OK | os.W_OK)]
    podman_sockets = [f"unix://{path}" for path in podmans if os.access(path, os.R_OK | os.W_OK)]
    yield from [*podman_sockets, *own] if podman else [*sockets, *podman_sockets, *own]


async def discover(explicit: str | None = None, *, podman: bool = False) -> str:
    """The address of the daemon to use. Raises `SandboxError` that says what was tried and what to do."""
    tried = []
    for address in candidates(explicit, podman=podman):
        if address == OWN_PODMAN or await answers(address):
            return address
        tried.append(address)
    if tried:
        raise SandboxError(f"no Docker daemon answers at {', '.join(tried)}: start it, or set DOCKER_HOST to where one listens")
    what = "Podman" if podman else "Docker or Podman"
    raise SandboxError(f"there is no {what} here: install it, or set DOCKER_HOST to where a daemon listens (unix:///..., tcp://...)")


async def answers(address: str) -> bool:
    """Whether a daemon answers there."""
    return await ping(address) is not None


async def ping(address: str, *, timeout_s: float = 10.0) -> Mapping[str, str] | None:
    """The headers of the answer to `GET /_ping`, `None` where nobody answers. They tell whose daemon it is and its API's version at once
    (`/version` has Podman ask the package manager, which takes seconds). Raises `SandboxError` for what is no address."""
    kind, _, rest = address.partition("://")
    if kind not in ("unix", "tcp"):
        raise SandboxError(f"{address!r} is no address of a Docker daemon that Polar can use: write unix:///path.sock or tcp://host:port")
    connector = aiohttp.UnixConnector(rest) if kind == "unix" else None
    url = "http://localhost/_ping" if kind == "unix" else f"http://{rest.rstrip('/')}/_ping"
    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as session, session.get(url) as response:
            return response.headers if response.status == 200 else None
    except (aiohttp.ClientError, OSError, TimeoutError):
        return None


@contextmanager
def said(doing: str) -> Iterator[None]:
    """Turns what a daemon answers into `SandboxError`, in its own words, with what was being done."""
    try:
        yield
    except aiodocker.DockerError as error:
        raise SandboxError(f"{doing}: {error.message}") from error
    except (aiohttp.ClientError, OSError, TimeoutError, EOFError) as error:
        raise SandboxError(f"{doing}: the daemon does not answer ({error or type(error).__name__})") from error


class Daemon:
    """A connection to one daemon. Belongs to the event loop that opened it."""

    def __init__(self, address: str, docker: aiodocker.Docker, *, api: str, podman: str | None) -> None:
        self.address = address
        self.docker = docker
        self.api = api
        """The API's version, such as `v1.41`."""
        self.podman = podman
        """Podman's version, `None` for Docker."""

    @classmethod
    async def open(cls, address: str, *, folder: Path, lock: Path | None = None, owner: str = "") -> Daemon:
        """Connects; for `podman` starts the service in `folder` where it does not run. Raises `SandboxError`."""
        url = await service(folder, lock=lock, owner=owner) if address == OWN_PODMAN else address
        told = await ping(url)
        if told is None:
            raise SandboxError(f"no Docker daemon answers at {url}")
        api = f"v{told.get('Api-Version', '1.41')}"
        docker = aiodocker.Docker(url=url, api_version=api, timeout=aiohttp.ClientTimeout(total=REQUEST_S, sock_connect=10.0))
        return cls(url, docker, api=api, podman=told.get("Libpod-Api-Version"))

    @property
    def local(self) -> bool:
        """Whether its containers' processes may be this machine's own (else they are in another, or in a virtual one)."""
        return self.address.startswith("unix://")

    async def aclose(self) -> None:
        await self.docker.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    @asynccontextmanager
    async def request(self, method: str, path: str, **kwargs: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        """A request whose body or answer is streamed, which the library would hold in memory. Raises `aiodocker.DockerError` for a
        refusal. `path` is relative to the versioned API; `libpod/...` is Podman's own."""
        version = "v4.0.0" if path.startswith("libpod/") else self.api
        url = f"{self.docker.docker_host}/{version}/{path}"
        limit = aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=REQUEST_S)
        async with self.docker.session.request(method, url, timeout=limit, **kwargs) as response:
            if response.status >= 400:
                raise aiodocker.DockerError(response.status, _message(await response.read()))
            yield response


def _message(body: bytes) -> str:
    """The `message` of an error's body."""
    try:
        found = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()
    return str(found.get("message", found)) if isinstance(found, dict) else str(found)
