"""Backend `local`: this machine itself, for agents that are trusted not to attack it. Starts in 50 ms, needs nothing installed.

Where the kernel allows namespaces (root, or unprivileged user namespaces), the machine is seen read-only, processes are the sandbox's own,
and as root each sandbox runs as a user of its own. Elsewhere (`plain`) it is a folder and a process tree.

| what                                    | as root            | as a user, namespaces | plain                    |
|-----------------------------------------|--------------------|-----------------------|--------------------------|
| processes end with a timeout and `stop` | yes, by the kernel | yes, by the kernel    | yes, unless they kill us |
| other processes are invisible           | yes                | yes                   | no                       |
| other sandboxes' folders                | unreachable        | hidden                | readable (same user)     |
| the store, the node's secrets           | unreachable        | hidden (Place.hidden) | readable (same user)     |
| files that only root may read           | unreadable         | as for the user       | as for the user          |
| files that everybody may read           | readable           | readable              | readable                 |
| the user's own files                    | (another user)     | readable              | readable and writable    |
| writing outside the sandbox's folders   | no                 | no                    | as the user may          |
| any path as workdir, target or mount    | yes                | yes                   | inside its folder only   |
| the machine's network, its loopback too | reachable          | reachable             | reachable                |
| ... with `network: none`                | nothing            | nothing               | reachable                |
| memory_mb                               | each process       | each process          | each process             |
| pids                                    | yes                | yes                   | refused                  |
| cpus (whole cores)                      | yes                | yes                   | yes                      |
| storage_mb (checked every 2 s)          | yes                | yes                   | yes                      |

"Other sandboxes" of another root (a second installation of the same user's) are among "the user's own files" where namespaces are made as a
user, unless they lie in /tmp: only as root has each sandbox a user of its own.

So the control API stands on the network that a program inside reaches: it asks for its token. For what is not to be trusted, use
`bubblewrap` or `docker`.
"""

from __future__ import annotations

import os
import pwd
import sys
from pathlib import Path
from typing import Any

from polar.errors import ConfigError
from polar.runtime import machine
from polar.runtime.base import Place, register
from polar.runtime.kept import Kept
from polar.runtime.spec import DEFAULT_PIDS, RuntimeSpec

HOME, WORKDIR = "/home/agent", "/workspace"


@register
class LocalRuntime(Kept):
    """One folder, one process tree, of a user of its own where possible."""

    backend = "local"
    shares_host_network = True
    shows_host_files = True

    def __init__(self, spec: RuntimeSpec, place: Place) -> None:
        super().__init__(spec, place)
        self._plain = machine.namespaces() is not None
        self._uid = machine.new_uid() if machine.privileged() and not self._plain else None

    @classmethod
    async def unavailable(cls) -> str | None:
        return None if sys.platform == "linux" else "backend local needs Linux (it reads /proc); use backend docker"

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        machine.refuse(
            spec,
            "local",
            image="there are no images here, programs are this machine's; use bubblewrap or docker",
            build_context="nothing can be built here; use docker",
            kwargs="this backend takes none",
            gpus="this backend cannot divide GPUs; use docker",
        )
        machine.cores(spec.cpus)
        _user(spec.user)
        problem = machine.namespaces()
        if problem is None:
            return
        machine.refuse(spec, "local", pids=f"without namespaces a user's processes can only be counted together ({problem})")
        if spec.workdir is not None and spec.workdir.startswith("/"):
            raise ConfigError(f"runtime local: workdir {spec.workdir}: without namespaces ({problem}) only a relative one")
        for mount in spec.mounts:
            if mount.source != mount.target:
                raise ConfigError(f"runtime local: mount {mount.target}: without namespaces ({problem}) only at its own path")

    @property
    def contained(self) -> bool:
        return not self._plain

    @property
    def workdir(self) -> str:
        if self._plain:
            return str(self.place.folder / "work" / (self.spec.workdir or ""))
        wanted = self.spec.workdir or WORKDIR
        return wanted if wanted.startswith("/") else f"{WORKDIR}/{wanted}"

    @property
    def home(self) -> str:
        return str(self.place.folder / "home") if self._plain else HOME

    @property
    def gateway_url(self) -> str:
        direct = self.place.gateway_url
        if direct is None or (self.spec.effective_network == "none" and not self._plain):
            raise ConfigError("this sandbox has no way to a model API")
        return direct

    def environment(self) -> dict[str, str]:
        mine = {**super().environment(), "USER": "agent", "LOGNAME": "agent"}
        if self._plain:
            mine["TMPDIR"] = str(self.place.folder / "tmp")
        if self.spec.gpus == 0:
            mine["CUDA_VISIBLE_DEVICES"] = ""
        return mine

    def rights(self, user: str | None) -> dict[str, int]:
        return _user(user)

    def configuration(self) -> dict[str, Any]:
        folder = self.place.folder
        uid, gid = (os.geteuid(), os.getegid()) if self._uid is None else (self._uid, self._uid)
        for name, mode in (("home", 0o755), ("work", 0o755), ("tmp", 0o1777), ("root", 0o755), ("shadows", 0o755), ("etc", 0o755)):
            (folder / name).mkdir(exist_ok=True)
            (folder / name).chmod(mode)
            if self._uid is not None and name in ("home", "work", "root"):
                os.chown(folder / name, uid, gid)
        limits = {
            "uid_inside": self._uid,
            "confined": not self._plain,
            "data_bytes": None if self.spec.memory_mb is None else self.spec.memory_mb << 20,
            "processes": None if self._plain else self.spec.pids or DEFAULT_PIDS,
            "cpus": machine.cores(self.spec.cpus),
        }
        if self._plain:
            Path(self.workdir).mkdir(parents=True, exist_ok=True)
            return {"kind": "plain", **limits}
        work = self.workdir
        binds = [(str(folder / "home"), HOME, False), (str(folder / "work"), WORKDIR if self._in_default() else work, False)]
        if self._in_default() and work != WORKDIR:
            inner = folder / "work" / work.removeprefix(f"{WORKDIR}/")
            inner.mkdir(parents=True, exist_ok=True)
            os.chown(inner, uid, gid)
        for name, text in zip(("passwd", "group"), machine.accounts(uid, gid, HOME, base=True), strict=True):
            (folder / "etc" / name).write_text(text)
            binds.append((str(folder / "etc" / name), f"/etc/{name}", True))
        binds += [(mount.source, mount.target, mount.read_only) for mount in self.spec.mounts]
        return {
            "kind": "local",
            "root": str(folder / "root"),
            "temporary": str(folder / "tmp"),
            "shadows": str(folder / "shadows"),
            "binds": binds,
            "hide": [str(one) for one in self._hidden()],
            "private_network": self.spec.effective_network == "none",
            **limits,
        }

    def _hidden(self) -> list[Path]:
        """The folders of all owners and sandboxes of this root, and what else the place names."""
        folder = self.place.folder
        return [folder.parent.parent if folder.parent.name == self.place.owner else folder, *self.place.hidden]

    def _in_default(self) -> bool:
        return self.workdir == WORKDIR or self.workdir.startswith(f"{WORKDIR}/")


def _user(name: str | None) -> dict[str, int]:
    """The rights of a named user of this machine. Raises `ConfigError` where this process cannot become that user."""
    if name is None or name == "agent":
        return {}
    try:
        entry = pwd.getpwuid(int(name)) if name.isdigit() else pwd.getpwnam(name)
    except KeyError:
        raise ConfigError(f"runtime local: user {name!r}: this machine has no such user") from None
    if entry.pw_uid == os.geteuid() != 0:
        return {}
    if not machine.privileged():
        raise ConfigError(f"runtime local: user {name!r}: only root can run programs as somebody else")
    return {"uid": entry.pw_uid, "gid": entry.pw_gid}
