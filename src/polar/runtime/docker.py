"""`docker`: a container by the Docker API, of Docker or Podman, rootless too.

Heeds every field of `RuntimeSpec`: image, build_context, env, mounts, cpus, memory_mb, pids, gpus, user, workdir, network, and
storage_mb where the daemon's storage can (overlay on xfs with quotas, btrfs, zfs; else the daemon refuses in its own words).

* `gateway` is Docker's `none` network and a relay that Polar starts on 127.0.0.1 inside the container's network namespace, from outside;
  `bridge` adds the daemon's own network; `host` shares this machine's. A relay needs the namespace to be reachable: as root, or as the
  user whose rootless daemon it is, on the machine where the daemon runs.
* A container is called `polar-<sandbox id>` and labelled, so that it is found again without any memory of it.
* `home` is the image's own: what its build put there (caches, settings) is what its tools look for, and there may be no network to fetch
  it again. Only where that can't be written, or is in the working folder, is it `/polar/home`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import posixpath
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import aiodocker

from polar.errors import ConfigError, SandboxError
from polar.folders import cache_dir
from polar.runtime import container_files
from polar.runtime.base import OWNER_LABEL, SANDBOX_LABEL, ExecResult, Left, OnOutput, Place, Runtime, register
from polar.runtime.container_config import DEFAULT_WORKDIR, HOME, body, options
from polar.runtime.container_exec import Container, even_if_cancelled
from polar.runtime.daemon import OWN_PODMAN, Daemon, answers, candidates, discover, said
from polar.runtime.images import ensure
from polar.runtime.owner import LOCK
from polar.runtime.podman import end_monitors
from polar.runtime.relay import Relay
from polar.runtime.spec import RuntimeSpec

LISTINGS = 10
REMOVALS = 50
"""How often a removal is tried, five times a second, before it is given up."""
SNAPSHOTS = "localhost/polar-snapshot"


@register
class DockerRuntime(Runtime):
    """One container."""

    backend = "docker"

    def __init__(self, spec: RuntimeSpec, place: Place) -> None:
        super().__init__(spec, place)
        self._options = options(spec)
        self._daemon: Daemon | None = None
        self._container: Container | None = None
        self._kept = False
        """Whether a container of ours may be there still, though a stop has let go of its daemon."""
        self._relay: Relay | None = None
        self._workdir = spec.workdir or DEFAULT_WORKDIR

    @classmethod
    async def unavailable(cls) -> str | None:
        try:
            await discover()
        except SandboxError as error:
            return str(error)
        return None

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        options(spec)

    @property
    def name(self) -> str:
        """The container's name."""
        return f"polar-{self.place.id}"

    @property
    def workdir(self) -> str:
        return self._workdir

    @property
    def home(self) -> str:
        return HOME if self._container is None else self._container.home

    @property
    def gateway_url(self) -> str:
        direct = self.place.gateway_url
        if direct is None or self.spec.effective_network == "none":
            raise ConfigError(f"sandbox {self.place.id} has no way to the model API (network: {self.spec.effective_network})")
        if self.spec.effective_network == "host":
            return direct
        if self._relay is None:
            raise ConfigError(f"sandbox {self.place.id} is not started: its way to the model API does not exist yet")
        return self._relay.url

    async def start(self) -> None:
        daemon = await self._connect()
        self._container = await self._made(daemon)
        await self._container.settle(self._workdir, self.spec.env.get("HOME", HOME))
        if self.place.gateway is not None and self.spec.effective_network in ("gateway", "bridge"):
            self._relay = await self._joined(daemon, self._container, self.place.gateway)

    async def exec(
        self,
        command: str | Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
        timeout_s: float | None = None,
        on_output: OnOutput | None = None,
        keep_bytes: int = 1_000_000,
        user: str | None = None,
    ) -> ExecResult:
        return await self._running.run(
            command,
            cwd=posixpath.join(self._workdir, cwd or ""),
            env=env,
            stdin=stdin,
            timeout_s=timeout_s,
            on_output=on_output,
            keep_bytes=keep_bytes,
            user=user,
        )

    async def end_processes(self) -> None:
        await self._running.end_all()

    async def upload(self, source: Path, target: str) -> None:
        await container_files.upload(self._running, source, self._inside(target))

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        await container_files.download(self._running, self._inside(source), target, max_bytes=max_bytes)

    def _inside(self, path: str) -> str:
        """As one path, without `.` and `/` at its end: by the last part daemons name what they send, and with that name it is taken off."""
        return str(PurePosixPath(self._workdir, path))

    async def stop(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            await relay.close()
        daemon, self._daemon, self._container = self._daemon, None, None
        if daemon is None and self._kept:  # an earlier stop failed
            daemon = await self._connect()
            self._daemon = None
        if daemon is not None:
            self._kept = True
            try:
                if not await answers(daemon.address):  # it may have ended; another one knows its containers
                    await daemon.aclose()
                    daemon = await self._connect()
                    self._daemon = None
                await even_if_cancelled(_gone(daemon, self.name))
                self._kept = False
            finally:
                await daemon.aclose()

    async def snapshot(self) -> str | None:
        """As the base says; `None` too where a prepare step left a process running, which an image would not have."""
        container = self._running
        if await container.busy():
            return None
        reference = f"{SNAPSHOTS}:{self.place.id}"
        with said(f"keeping the sandbox {self.place.id} as an image"):
            # the labels come from the container; Podman wants a body, if only an empty one
            kept = container.daemon.docker.containers.container(container.id)
            await even_if_cancelled(kept.commit(repository=SNAPSHOTS, tag=self.place.id, config={}))
        return reference

    @classmethod
    async def discard(cls, image: str) -> None:
        async for daemon in _daemons():
            await _remove_image(daemon, image)

    @classmethod
    async def find(cls) -> list[Left]:
        found = []
        async for daemon in _daemons():
            for one in await _labelled(daemon, "containers"):
                labels, names = one["Labels"], one["Names"]
                name = names[0].lstrip("/") if names else one["Id"]
                found.append(Left("container", name, labels.get(SANDBOX_LABEL, ""), labels[OWNER_LABEL], str(one["State"])))
            for one in await _labelled(daemon, "images"):
                labels = one.get("Labels") or {}
                for tag in one.get("RepoTags") or [one["Id"]]:
                    found.append(Left("image", tag, labels.get(SANDBOX_LABEL, ""), labels.get(OWNER_LABEL, "")))
        return found

    @classmethod
    async def remove(cls, left: Left) -> None:
        async for daemon in _daemons():
            if left.kind == "container":
                await _gone(daemon, left.name)
            else:
                await _remove_image(daemon, left.name)

    @property
    def _running(self) -> Container:
        if self._container is None:
            raise SandboxError(f"the sandbox {self.place.id} is not running")
        return self._container

    async def _made(self, daemon: Daemon) -> Container:
        """The container, made and started."""
        context = self.spec.build_context
        folder = None if context is None else (self.place.task_folder or Path()) / context
        image = await ensure(daemon, self.spec.image, folder, pull=self._options.pull)
        with said(f"starting the sandbox {self.place.id} from {image}"):
            config = (await daemon.docker.images.inspect(image)).get("Config") or {}
            self._workdir = self.spec.workdir or _useful(config.get("WorkingDir")) or DEFAULT_WORKDIR
            wanted = body(self.spec, self.place, image=image, workdir=self._workdir, podman=daemon.podman)
            # a daemon whose client goes away in the middle may keep half a container, which it then can neither use nor remove
            container = await even_if_cancelled(_started(daemon, wanted, self.name))
            state = (await container.show())["State"]
        if not state.get("Running"):
            why = state.get("Error") or f"{state.get('Status')}, exit code {state.get('ExitCode')}"
            raise SandboxError(f"the sandbox {self.place.id} ended at once ({why}): has the image {image} a /bin/sh?")
        return Container(daemon, container.id, self.place, first=int(state.get("Pid") or 0))

    async def _joined(self, daemon: Daemon, container: Container, gateway: tuple[str, int]) -> Relay:
        if not container.here:
            raise SandboxError(
                f"network: {self.spec.effective_network}: the containers of the daemon at {daemon.address} cannot be reached from here; "
                "run Polar as root or with a rootless daemon of your own, on the daemon's machine, or use network: host"
            )
        return await Relay.open(container.first, gateway)

    async def _connect(self) -> Daemon:
        address = await discover(self._options.docker_host, podman=self.spec.backend == "podman")
        folder = self.place.folder.parent
        lock = folder / LOCK
        held = lock if await asyncio.to_thread(lock.is_file) else None
        self._daemon = await Daemon.open(address, folder=(folder if held else self.place.folder), lock=held, owner=self.place.owner)
        return self._daemon


async def _started(daemon: Daemon, wanted: dict[str, Any], name: str) -> aiodocker.containers.DockerContainer:
    container = await daemon.docker.containers.create(wanted, name=name)
    await container.start()
    return container


def _useful(workdir: str | None) -> str | None:
    return workdir if workdir and workdir != "/" else None


async def _daemons() -> AsyncIterator[Daemon]:
    """Every daemon on this machine that sandboxes may be at, one connection after the other."""
    folder = cache_dir() / "podman"
    addresses = dict.fromkeys([*candidates(None, podman=False), *candidates(None, podman=True)])
    for address in addresses:
        if address == OWN_PODMAN or await answers(address):
            async with await Daemon.open(address, folder=folder) as daemon:
                yield daemon


async def _labelled(daemon: Daemon, what: str) -> list[dict[str, Any]]:
    """All containers or images with an owner's label. Asked again where something that others remove meanwhile upsets the list."""
    filters = json.dumps({"label": [OWNER_LABEL]})
    with said("looking for what is left"):
        for _ in range(LISTINGS):
            try:
                async with daemon.request("GET", f"{what}/json", params={"all": "1", "filters": filters}) as response:
                    return list(await response.json())
            except aiodocker.DockerError as error:
                if error.status != 500:
                    raise
                problem = error
            await asyncio.sleep(0.2)
        raise problem


async def _gone(daemon: Daemon, name: str) -> None:
    """Ends and removes a container. Raises `SandboxError` if it is still there."""
    container = daemon.docker.containers.container(name)
    problem = "the daemon says nothing"
    with said(f"removing the container {name}"):
        for _ in range(REMOVALS):
            with contextlib.suppress(aiodocker.DockerError):  # it has ended, or is gone
                await container.kill(signal="SIGKILL")
            try:
                await container.delete(force=True, v=True)
            except aiodocker.DockerError as error:
                if error.status not in (404, 409, 500):
                    raise
                problem = error.message
            try:
                await container.show()
            except aiodocker.DockerError as error:
                if error.status == 404:
                    break
                raise
            await asyncio.sleep(0.2)
        else:
            raise SandboxError(f"the container {name} could not be removed: {problem}")
    if daemon.podman and daemon.local:
        await asyncio.to_thread(end_monitors, name)


async def _remove_image(daemon: Daemon, image: str) -> None:
    with said(f"removing the image {image}"):
        try:
            await daemon.docker.images.delete(image)
        except aiodocker.DockerError as error:
            if error.status != 404:
                raise
