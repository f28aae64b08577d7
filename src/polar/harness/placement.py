"""How a harness gets into a sandbox: mounted from this machine, copied in, or there already. Knows no task and no gateway.

mount     the installation and its Node.js, read-only, at the paths that they have on this machine
copy      the same, uploaded into the sandbox's home
present   the program on the PATH of the image; its version is whatever it is, and recorded
"""

from __future__ import annotations

import asyncio
import re
import shlex
from dataclasses import dataclass, replace
from typing import Literal

from polar.errors import HarnessError
from polar.harness.base import Harness
from polar.harness.install import Installation, Progress, install, portable
from polar.runtime.base import ExecResult, Runtime
from polar.runtime.spec import MountSpec

Way = Literal["mount", "copy", "present"]
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
        """Into the node's cache, where it is not there yet. Raises `HarnessError`."""
        if self.needs_install:
            self._installation = await asyncio.to_thread(_install, self.harness.name, progress)

    def mounts(self) -> list[MountSpec]:
        """Empty unless the way is `mount`. Raises `HarnessError` before `install`."""
        if not self.needs_install or self.way != "mount":
            return []
        installation = self._installed()
        sources = [installation.folder, installation.node]  # the file alone: its folder may hold more
        return [MountSpec(source=str(source), target=str(source)) for source in sources if source is not None]

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
            installation = self._installed()
            placed = Placed(installation.program, installation.path, installation.version)
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
        installation = self._installed()
        root = f"{runtime.home}/.polar"
        moved: dict[str, str] = {}
        if installation.folder is not None:
            moved[str(installation.folder)] = f"{root}/{self.harness.name}"
            await runtime.upload(installation.folder, moved[str(installation.folder)])
        if installation.node is not None:
            moved[str(installation.node)] = f"{root}/node/node"
            await runtime.upload(installation.node.resolve(), moved[str(installation.node)])
        program = tuple(_moved(word, moved) for word in installation.program)
        path = (f"{root}/node",) if installation.node is not None else ()
        return Placed(program, path, installation.version)

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
        name = f"{self.harness.title} ({placed.program[0]})"
        said = f"exit code {done.exit_code}" + (f": {done.tail(300)}" if done.tail(1) else "")
        if done.timed_out:
            return f"{name} did not start in this sandbox: no end after {_VERSION_TIMEOUT_S:.0f} s"
        there = await runtime.exec(["/bin/sh", "-c", f"[ -e {shlex.quote(placed.program[0])} ]"], timeout_s=30)
        libraries = (await runtime.exec(["/bin/sh", "-c", _LIBRARIES], timeout_s=30)).text.split()
        if not there.ok:
            return f"{name} is not in this sandbox: its mount is missing, or what it needs of this machine is not in the image ({said})"
        if "musl" in libraries and "glibc" not in libraries:
            return f"{name} needs glibc, and this image has musl: use one with glibc, or with the program in it (install: present) ({said})"
        if not libraries:
            return f"{name} needs glibc, and this image has no C library: use an image with glibc ({said})"
        return f"{name} cannot run in this image: {said}"


def _install(name: str, progress: Progress) -> Installation:
    return portable(install(name, progress=progress), progress=progress)


def _moved(word: str, moved: dict[str, str]) -> str:
    for old, new in moved.items():
        if word == old or word.startswith(old + "/"):
            return new + word[len(old) :]
    return word
