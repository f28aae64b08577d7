"""How a harness gets into a sandbox: mounted from this machine, copied in, or there already. Knows no task and no gateway.

mount     the installation and its Node.js, read-only, below `ROOT`: their own paths may lie in a folder that is closed to the sandbox's
          user, and tell of this machine. Where a backend can show a folder only at its own path, there
copy      the same, uploaded into the sandbox's home
present   the program on the PATH of the image; its version is whatever it is, and recorded
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Literal

from polar.errors import ConfigError, HarnessError
from polar.harness.base import Harness
from polar.harness.install import Installation, Progress, install, portable
from polar.runtime import backend_of
from polar.runtime.base import ExecResult, Runtime
from polar.runtime.spec import MountSpec, RuntimeSpec
from polar.runtime.transfer import in_thread

Way = Literal["mount", "copy", "present"]
ROOT = "/opt/polar"
_VERSION_TIMEOUT_S = 120.0
_VERSION = re.compile(r"\d+(?:\.\d+)+(?:[-+][\w.]+)?")
_LIBRARIES = """
for one in /lib/ld-musl-*; do [ -e "$one" ] && echo musl; done
for one in /lib64/ld-linux-* /lib/ld-linux-*; do [ -e "$one" ] && echo glibc; done
true
"""


@dataclass(frozen=True, slots=True)
class Placed:
    """A harness in a sandbox: the beginning of its command line there, the folders that PATH needs, and the version that it says."""

    program: tuple[str, ...]
    path: tuple[str, ...]
    version: str | None


class Placement:
    """One harness, one way in. `install` on the node, then `mounts` before the sandbox starts, then `place` in it."""

    def __init__(self, harness: Harness, way: Way) -> None:
        self.harness = harness
        self.way = way
        self._installation: Installation | None = None

    @property
    def needs_install(self) -> bool:
        return self.harness.package is not None and self.way != "present"

    async def install(self, progress: Progress) -> None:
        """Into the node's cache, where it is not there yet. In a thread of its own: many may wait minutes for one installation, and
        would use up the threads that all else of the node shares. Raises `HarnessError`."""
        if self.needs_install:
            self._installation = await in_thread(lambda: _install(self.harness, progress))

    def mounts(self, spec: RuntimeSpec | None = None) -> list[MountSpec]:
        """Empty unless the way is `mount`. `spec` is the sandbox's own. Raises `HarnessError` before `install`."""
        if not self.needs_install or self.way != "mount":
            return []
        wanted = [MountSpec(source=source, target=target) for source, target in self._targets().items()]
        if spec is None or _takes(spec, wanted):
            return wanted
        return [MountSpec(source=mount.source, target=mount.source) for mount in wanted]

    def _targets(self) -> dict[str, str]:
        """Where in a sandbox the installation's folder and its Node.js go, by where they are here. Of the latter the file alone: the
        folder around it may hold more."""
        installation = self._installed()
        found: dict[str, str] = {}
        if installation.folder is not None:
            found[str(installation.folder)] = f"{ROOT}/{self.harness.name}"
        if installation.node is not None:
            found[str(installation.node)] = f"{ROOT}/node/node"
        if installation.python is not None:
            found[str(installation.python)] = f"{ROOT}/python"
        return found

    async def place(self, runtime: Runtime, path: str, *, version: str | None = None) -> Placed:
        """Puts it in, and runs it once to see that it runs there, unless `version` tells that it did. `path` is the sandbox's own PATH.

        Raises `HarnessError` that says why it cannot run in this image, `SandboxError` where the sandbox failed.
        """
        if self.harness.package is None:
            return Placed((), (), None)
        if self.way == "present":
            placed = await self._found(runtime)
        elif self.way == "copy":
            placed = await self._copied(runtime)
        else:
            placed = self._at({mount.source: mount.target for mount in runtime.spec.mounts if mount.source in self._targets()})
        return replace(placed, version=version or await self._version(runtime, placed, path))

    def _installed(self) -> Installation:
        if self._installation is None:
            raise HarnessError(f"{self.harness.name} is not installed on this node: AgentRun.install comes first")
        return self._installation

    async def _found(self, runtime: Runtime) -> Placed:
        name = self.harness.executable
        found = await runtime.exec(["/bin/sh", "-c", f"command -v {shlex.quote(name)}"], timeout_s=30)
        program = found.text.strip().splitlines()[-1:] if found.ok else []
        if not program:
            raise HarnessError(
                f"agent.install is 'present', but {name!r} is not on the PATH of this image: install it there, or use 'mount' or 'copy'"
            )
        return Placed((program[0],), (), None)

    async def _copied(self, runtime: Runtime) -> Placed:
        moved = {source: f"{runtime.home}/.polar{target.removeprefix(ROOT)}" for source, target in self._targets().items()}
        for source, target in moved.items():
            await runtime.upload(_real(source), target)
        return self._at(moved)

    def _at(self, moved: dict[str, str]) -> Placed:
        """The installation where `moved` has put its parts, each at its own path where it says nothing."""
        installation = self._installed()
        program = tuple(_moved(word, moved) for word in installation.program)
        path = (str(PurePosixPath(program[0]).parent),) if installation.node is not None else ()
        return Placed(program, path, None)

    async def _version(self, runtime: Runtime, placed: Placed, path: str) -> str:
        words = self.harness.version_command(placed.program)
        env = {"PATH": ":".join((*placed.path, path)), "HOME": runtime.home}
        done = await runtime.exec(words, env=env, timeout_s=_VERSION_TIMEOUT_S)
        said = _VERSION.search(done.text) if done.ok else None
        if said is not None:
            return said[0]
        if done.ok:
            return self.harness.version
        raise HarnessError(await self._why_not(runtime, placed, done))

    async def _why_not(self, runtime: Runtime, placed: Placed, done: ExecResult) -> str:
        name = f"{self.harness.title} ({' '.join(placed.program)})"
        said = f"exit code {done.exit_code}" + (f": {done.tail(300)}" if done.tail(1) else "")
        if done.timed_out:
            return f"{name} did not start in this sandbox: no end after {_VERSION_TIMEOUT_S:.0f} s"
        parts = [word for word in placed.program if word.startswith("/")]
        line = " && ".join(f"[ -e {shlex.quote(part)} ]" for part in parts) or "true"
        there = await runtime.exec(["/bin/sh", "-c", line], timeout_s=30)
        libraries = (await runtime.exec(["/bin/sh", "-c", _LIBRARIES], timeout_s=30)).text.split()
        if not there.ok:
            return f"{name} is not in this sandbox: its mount is missing, or what it needs of this machine is not in the image ({said})"
        if "musl" in libraries and "glibc" not in libraries:
            return f"{name} needs glibc, and this image has musl: use one with glibc, or with the program in it (install: present) ({said})"
        if not libraries:
            return f"{name} needs glibc, and this image has no C library: use an image with glibc ({said})"
        return f"{name} cannot run in this image: {said}"


def _install(harness: Harness, progress: Progress) -> Installation:
    return portable(harness, install(harness, progress=progress), progress=progress)


def _real(path: str) -> Path:
    return Path(path).resolve()


def _takes(spec: RuntimeSpec, mounts: list[MountSpec]) -> bool:
    try:
        backend_of(spec).check(spec.model_copy(update={"mounts": [*spec.mounts, *mounts]}))
    except ConfigError:
        return False
    return True


def _moved(word: str, moved: dict[str, str]) -> str:
    for old, new in moved.items():
        word = re.sub(rf"{re.escape(old)}(?=/|$)", new.replace("\\", r"\\"), word)
    return word
