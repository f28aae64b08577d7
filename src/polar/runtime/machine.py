"""What this machine allows sandboxes of Polar's own: asked once, by trying. And what they are given of it: a user, cores, an `/etc`."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import subprocess
import tempfile
from pathlib import Path

from polar.errors import ConfigError
from polar.keeper import kernel
from polar.runtime.nursery import python
from polar.runtime.spec import RuntimeSpec

_FIRST_UID, _LAST_UID = 0x70000000, 0x7FFFFFF0
"""Users of sandboxes: a range that systemd's list of well-known ranges leaves unused."""


def privileged() -> bool:
    """Whether this process is root with the right to make namespaces and change users: then each sandbox runs as a user of its own."""
    return os.geteuid() == 0 and kernel.may_administer()


def new_uid() -> int:
    """A user (and group) number for one sandbox; that two living ones share it is as likely as 1 in 268 million a pair."""
    return _FIRST_UID + secrets.randbelow(_LAST_UID - _FIRST_UID)


@functools.cache
def namespaces() -> str | None:
    """Why `local` can have no namespaces here, or `None` where it can. Tries it, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="polar-probe-") as folder:
        for name in ("root", "temporary", "shadows"):
            Path(folder, name).mkdir()
        config = (
            f"dict(root={folder + '/root'!r}, temporary={folder + '/temporary'!r}, shadows={folder + '/shadows'!r}, "
            "binds=[], hide=[], private_network=True)"
        )
        try:
            command = python(f"from polar.keeper import views; views.local({config})")
            done = subprocess.run(command, capture_output=True, timeout=30, check=False, cwd="/")
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    if done.returncode == 0:
        return None
    return done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"


def cores(cpus: float | None) -> list[int] | None:
    """Which cores a sandbox may use; `None`: all. Raises `ConfigError` for a part of a core, which only a container backend can give."""
    if cpus is None:
        return None
    if cpus != int(cpus):
        raise ConfigError(f"cpus: {cpus:g}: this backend gives whole cores; write {max(1, round(cpus))}, or use backend docker")
    mine = sorted(os.sched_getaffinity(0))
    return None if cpus >= len(mine) else sorted(random.sample(mine, int(cpus)))


def refuse(spec: RuntimeSpec, backend: str, **why: str) -> None:
    """Raises `ConfigError` for each given field that the spec sets."""
    for name, reason in why.items():
        if getattr(spec, name):
            raise ConfigError(f"runtime {backend}: {name}: {reason}")


def accounts(uid: int, gid: int, home: str, *, base: bool) -> tuple[str, str]:
    """`/etc/passwd` and `/etc/group` in which that user is called `agent` (programs ask for their user's name); with `base`, after the
    machine's own lines as far as they can be read."""
    passwd = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
    group = "root:x:0:\nnogroup:x:65534:\n"
    if base:
        with contextlib.suppress(OSError):
            passwd, group = Path("/etc/passwd").read_text(errors="replace"), Path("/etc/group").read_text(errors="replace")
    shell = "/bin/bash" if Path("/bin/bash").exists() else "/bin/sh"
    return f"agent:x:{uid}:{gid}::{home}:{shell}\n{passwd}", f"agent:x:{gid}:\n{group}"
