"""From a `RuntimeSpec` to what the Docker API takes to create a container. Knows no connection.

`kwargs` of the docker backend: `volumes` (a list of `source:target[:options]`, as the reference's), `docker_host`, `pull` (`missing`,
`never`, `always`), `init` (the daemon's own first process), `runtime` (an OCI runtime such as `runsc`), `shm_mb`, `cap_add`, `cap_drop`,
`security_opt`, `devices`, `ulimits`, `privileged`. Every other is refused.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar.errors import ConfigError
from polar.runtime.base import OWNER_LABEL, OWNER_VARIABLE, SANDBOX_LABEL, SANDBOX_VARIABLE, Place
from polar.runtime.container_processes import SLEEPER
from polar.runtime.spec import DEFAULT_PIDS, MountSpec, RuntimeSpec

FIRST_PROCESS = ["/bin/sh", "-c", f"while :; do {shlex.join(SLEEPER)}; [ $? = 127 ] && {{ read _ || exit; }}; done"]
"""What lives in a container that waits: a shell, which every image that can run an agent has, and which collects the dead of programs
that others left behind. `sleep` may be missing, then it reads from a stdin that never ends. Nothing inside can end it."""
NEEDLESS = ("MKNOD", "NET_RAW", "AUDIT_WRITE")
"""Capabilities that Docker gives by default and no coding task needs: devices, forged packets, the machine's audit log."""
DEFAULT_WORKDIR = "/workspace"
HOME = "/polar/home"
PODMAN_GPU_VERSION = (5, 0)
"""Podman's Docker API takes devices by their CDI names from here on."""


class Options(BaseModel):
    """The docker backend's `kwargs`."""

    model_config = ConfigDict(extra="forbid")

    volumes: list[str] = Field(default_factory=list)
    docker_host: str | None = None
    pull: Literal["missing", "never", "always"] = "missing"
    init: bool = False
    runtime: str | None = None
    shm_mb: int | None = Field(default=None, ge=1)
    cap_add: list[str] = Field(default_factory=list)
    cap_drop: list[str] = Field(default_factory=list)
    security_opt: list[str] = Field(default_factory=list)
    devices: list[str] = Field(default_factory=list)
    ulimits: dict[str, int] = Field(default_factory=dict)
    privileged: bool = False


def options(spec: RuntimeSpec) -> Options:
    """Raises `ConfigError` with every fault of `spec.kwargs` and of a combination that no daemon can heed."""
    try:
        found = Options.model_validate(spec.kwargs)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"runtime.kwargs of the docker backend: {faults}; there are: {', '.join(Options.model_fields)}") from None
    if spec.image and spec.build_context:
        raise ConfigError("runtime: image and build_context exclude each other")
    for mount in spec.mounts:
        if not mount.target.startswith("/"):
            raise ConfigError(f"runtime.mounts: {mount.target!r} is no absolute path")
    return found


def body(spec: RuntimeSpec, place: Place, *, image: str, workdir: str, podman: str | None) -> dict[str, Any]:
    """The JSON of `POST /containers/create`; `podman` is Podman's version, `None` for Docker. Raises `ConfigError` for what this daemon
    can't heed."""
    extra = options(spec)
    host: dict[str, Any] = {
        "NetworkMode": {"gateway": "none", "none": "none", "bridge": "bridge", "host": "host"}[spec.effective_network],
        "Mounts": [_mount(one, place) for one in spec.mounts],
        "Binds": extra.volumes,
        "Init": extra.init,
        "CapAdd": extra.cap_add,
        "CapDrop": [*(one for one in NEEDLESS if one not in extra.cap_add), *extra.cap_drop],
        "SecurityOpt": extra.security_opt,
        "Devices": [_device(one) for one in extra.devices],
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in extra.ulimits.items()],
        "Privileged": extra.privileged,
        "RestartPolicy": {"Name": "no"},
    }
    if spec.cpus is not None:
        host["NanoCpus"] = round(spec.cpus * 1e9)
    if spec.memory_mb is not None:
        # swap counts too: else a limit of memory only moves what is over it to the disk
        host["Memory"] = host["MemorySwap"] = spec.memory_mb << 20
    if spec.pids is not None or podman is None:  # Podman has a default of its own, where it can limit at all
        host["PidsLimit"] = spec.pids or DEFAULT_PIDS
    if spec.storage_mb is not None:
        host["StorageOpt"] = {"size": f"{spec.storage_mb}m"}
    if spec.gpus:
        host["DeviceRequests"] = [_gpus(spec.gpus, podman)]
    if extra.shm_mb is not None:
        host["ShmSize"] = extra.shm_mb << 20
    if extra.runtime is not None:
        host["Runtime"] = extra.runtime
    marks = {SANDBOX_VARIABLE: place.id, OWNER_VARIABLE: place.owner}
    whole: dict[str, Any] = {
        "Image": image,
        "Entrypoint": FIRST_PROCESS[:1],
        "Cmd": FIRST_PROCESS[1:],
        "Env": [f"{name}={value}" for name, value in {**spec.env, **marks}.items()],
        "Labels": {SANDBOX_LABEL: place.id, OWNER_LABEL: place.owner},
        "WorkingDir": workdir,
        "OpenStdin": True,
        "HostConfig": host,
    }
    if spec.effective_network != "host":
        whole["Hostname"] = "sandbox"
    if spec.user is not None:
        whole["User"] = spec.user
    return whole


def _mount(mount: MountSpec, place: Place) -> dict[str, Any]:
    source = Path(mount.source).expanduser()
    if not source.is_absolute() and place.task_folder is not None:
        source = place.task_folder / source
    return {"Type": "bind", "Source": str(source), "Target": mount.target, "ReadOnly": mount.read_only}


def _device(text: str) -> dict[str, str]:
    source, _, rest = text.partition(":")
    target, _, permissions = rest.partition(":")
    return {"PathOnHost": source, "PathInContainer": target or source, "CgroupPermissions": permissions or "rwm"}


def _gpus(count: int, podman: str | None) -> dict[str, Any]:
    if podman is None:
        return {"Driver": "", "Count": count, "Capabilities": [["gpu"]]}
    parts = tuple(int(one) for one in podman.split(".")[:2] if one.isdigit())
    if parts < PODMAN_GPU_VERSION:
        raise ConfigError(f"runtime.gpus: Podman gives GPUs by its Docker API from 5.0 on; this one is {podman}")
    return {"Driver": "cdi", "DeviceIDs": [f"nvidia.com/gpu={number}" for number in range(count)]}
