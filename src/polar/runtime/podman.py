"""Podman where no service of it runs: Polar starts `podman system service` on a private socket, which ends with its owner.

Knows the program `podman`, no container. The service is a translator only: containers live on without it, and any later service of the
same user sees them. It is started by a shell that waits for the owner's lock to be free, so that it ends after `kill -9` too.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import os
import resource
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from polar.errors import SandboxError
from polar.runtime.base import OWNER_VARIABLE

PODMAN_NOFILE = 1_048_576
"""Open files that Podman gives a container by default; as root it fails where this machine's hard limit is lower."""
CAP_SYS_RESOURCE = 24
SOCKET_PATH_BYTES = 100
"""A Unix socket's path takes 107 bytes; the kernel counts them, not characters."""
IDLE_S = 60
"""A service without an owner's lock to wait for ends after so long without a request."""
START_S = 30.0

_KEEP = 'podman system service --time="$3" "unix://$1" & [ -z "$2" ] || { flock -s "$2" true; kill $!; }; wait'
"""$1 socket, $2 the owner's lock file or empty, $3 seconds of idling allowed."""


async def service(folder: Path, *, lock: Path | None, owner: str = "") -> str:
    """The address of a running service whose files are in `folder`; started if none answers. `lock` is a file that the owner holds an
    exclusive flock on: the service ends when it is let go. Raises `SandboxError` with Podman's own words."""
    if shutil.which("podman") is None:
        raise SandboxError("there is no program podman on this machine")
    return f"unix://{await asyncio.to_thread(_start, folder, lock, owner)}"


def socket_path(folder: Path) -> Path:
    """Where the socket of `folder`'s service is: in it, or in a private folder with a short name where its path is too long for one."""
    path = folder / "podman.sock"
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        return path
    short = Path(tempfile.gettempdir()) / f"polar-{os.getuid()}-{hashlib.sha256(os.fsencode(folder)).hexdigest()[:16]}"
    short.mkdir(mode=0o700, exist_ok=True)
    if short.is_symlink() or short.stat().st_uid != os.getuid():
        raise SandboxError(f"{short} belongs to somebody else: no socket can be put there")
    return short / "podman.sock"


def containers_conf(hard_nofile: int, hard_nproc: int, *, podman_default: bool) -> str | None:
    """A containers.conf with limits that this machine allows, or `None` where Podman's own work. -1 is unlimited."""
    if podman_default:
        return None
    nofile = PODMAN_NOFILE if hard_nofile < 0 else min(hard_nofile, PODMAN_NOFILE)
    nproc = 32_768 if hard_nproc < 0 else min(hard_nproc, 32_768)
    runtime = "" if shutil.which("crun") or not shutil.which("runc") else 'runtime = "runc"\n'
    return f'[containers]\ndefault_ulimits = ["nofile={nofile}:{nofile}", "nproc={nproc}:{nproc}"]\n[engine]\n{runtime}'


def limits_suffice() -> bool:
    """Whether Podman can give containers its default limits: rootless it takes this user's, as root it raises them, if it may."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if os.geteuid() != 0 or hard == resource.RLIM_INFINITY or hard >= PODMAN_NOFILE:
        return True
    status = Path("/proc/self/status").read_text()
    effective = next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff"))
    return bool(effective >> CAP_SYS_RESOURCE & 1)


def environment(folder: Path, owner: str) -> dict[str, str]:
    """The service's environment: this process's, the owner's mark, and limits where the machine's are too low for Podman's."""
    env = {**os.environ}
    if owner:
        env[OWNER_VARIABLE] = owner
    if "CONTAINERS_CONF" not in env:
        hard = (resource.getrlimit(resource.RLIMIT_NOFILE)[1], resource.getrlimit(resource.RLIMIT_NPROC)[1])
        conf = containers_conf(*hard, podman_default=limits_suffice())
        if conf is not None:
            file = folder / "containers.conf"
            file.write_text(conf)
            env["CONTAINERS_CONF"] = str(file)
    return env


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _start(folder: Path, lock: Path | None, owner: str) -> Path:
    """Starts the service once, whoever else tries at the same time, waits until it answers and returns its socket."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = socket_path(folder)
    log_path = folder / "podman.log"
    with _locked(folder / "podman.lock"):
        if _answers(path):
            return path
        path.unlink(missing_ok=True)
        with log_path.open("wb") as log:
            # the outer shell returns at once: the service is nobody's child, so no process of ours has to wait for it
            subprocess.run(
                ["sh", "-c", f"({_KEEP}) </dev/null &", "polar-podman", str(path), str(lock or ""), "0" if lock else str(IDLE_S)],
                env=environment(folder, owner),
                cwd=folder,  # where its monitors note that memory ran out, as a file named "oom"
                stdout=log,
                stderr=log,
                start_new_session=True,
                check=True,
                timeout=START_S,
            )
        deadline = time.monotonic() + START_S
        while not _answers(path):
            if time.monotonic() > deadline:
                said = log_path.read_text(errors="replace").strip()[-500:] or "it said nothing"
                raise SandboxError(f"podman system service does not answer on {path}: {said}")
            time.sleep(0.05)
        return path


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5.0)
        try:
            client.connect(str(path))
            client.sendall(b"GET /_ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b" 200 " in client.recv(64)
        except OSError:
            return False


def end_monitors(container: str) -> None:
    """Ends what Podman leaves on this machine of a container that is gone: for each command that was run in it, processes (conmon) which
    wait five minutes for somebody to ask how the command ended. Blocks."""
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                arguments = Path(entry.path, "cmdline").read_bytes().split(b"\0")
                if os.path.basename(arguments[0]) == b"conmon" and _watches(arguments, os.fsencode(container)):
                    os.kill(int(entry.name), signal.SIGKILL)


def _watches(arguments: list[bytes], container: bytes) -> bool:
    """Whether these are the arguments of a command's monitor, not of the container's own: then what is run is not the container."""
    given = dict(itertools.pairwise(arguments))
    return given.get(b"-n") == container and given.get(b"-c") != given.get(b"-u")
