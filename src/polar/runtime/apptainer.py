"""`apptainer`: an instance of Apptainer (or Singularity), for clusters whose machines have no Docker.

Built to Apptainer's documented command line (apptainer.org, user guide, "Command line interface"): `instance start`, `exec instance://`,
`instance list --json`, `instance stop`. Everything the instance writes is in the sandbox's private folder: an overlay over the image, and
`/tmp` and the home beside it.

Heeds image (a path, or a URL such as `docker://debian`; a bare name is one of Docker's), env, mounts, workdir, cpus, memory_mb and pids
(these three need cgroups v2, and Apptainer says so where they can't be had), storage_mb (an overlay of that size), gpus (all or none are
visible; programs are told the first ones), user `root` (fakeroot), and network: `gateway` and `none` are Apptainer's `none`, the first with
a relay on 127.0.0.1; `host`; `bridge` where Apptainer is set up for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import posixpath
import re
import secrets
import shutil
import stat
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from polar.errors import ConfigError, SandboxError, UnsafePath
from polar.runtime import shell, transfer
from polar.runtime.base import OWNER_VARIABLE, SANDBOX_VARIABLE, ExecResult, Left, OnOutput, Place, Runtime, register
from polar.runtime.container_exec import CANNOT_BEGIN, TIMED_OUT, even_if_cancelled
from polar.runtime.container_files import move
from polar.runtime.container_processes import EXEC_VARIABLE, HostView, end, end_all
from polar.runtime.owner import remove_tree
from polar.runtime.program import run
from polar.runtime.relay import Relay
from polar.runtime.spec import RuntimeSpec
from polar.runtime.tail import BEGIN, Tail

HOME, WORKDIR, EXCHANGE = "/polar/home", "/workspace", "/polar/exchange"
START_S, STOP_S, COPY_S = 900.0, 60.0, 600.0
"""An image may have to be fetched and converted at the first start."""
_NAME = re.compile(r"polar-(?P<owner>[0-9a-f]{8}-[0-9a-f]+)-(?P<sandbox>[a-z0-9-]+)")
_MISSING, _NO_FILE = 44, 45
_PACK = f"""
[ -L "$2" ] && exit {_NO_FILE}
[ -e "$2" ] || exit {_MISSING}
[ -f "$2" ] || [ -d "$2" ] || exit {_NO_FILE}
exec tar -cf "$1" -C "$3" -- "$4"
"""


@register
class ApptainerRuntime(Runtime):
    """One instance."""

    backend = "apptainer"

    def __init__(self, spec: RuntimeSpec, place: Place) -> None:
        super().__init__(spec, place)
        self.check(spec)
        self._relay: Relay | None = None
        self._pid: int | None = None
        self._workdir = spec.workdir or WORKDIR

    @classmethod
    async def unavailable(cls) -> str | None:
        if program() is None:
            return "there is no program apptainer on this machine: install it, or set POLAR_APPTAINER_BIN to its path"
        return None

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        if spec.image is None:
            raise ConfigError("runtime apptainer: image: name one, a .sif file or a URL such as docker://debian:bookworm")
        if spec.build_context is not None:
            raise ConfigError("runtime apptainer: build_context: Apptainer builds from no Dockerfile; build an image elsewhere and name it")
        if spec.user not in (None, "root", "0"):
            raise ConfigError(f"runtime apptainer: user: an instance runs as you or, by fakeroot, as root, not as {spec.user!r}")
        if spec.kwargs.keys() - {"volumes", "extra_args"}:
            raise ConfigError(f"runtime apptainer: kwargs: there are volumes and extra_args, not {', '.join(sorted(spec.kwargs))}")

    @property
    def name(self) -> str:
        """The instance's name, which tells whose it is."""
        return f"polar-{self.place.owner}-{self.place.id}"

    @property
    def workdir(self) -> str:
        return self._workdir

    @property
    def home(self) -> str:
        return HOME

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
        await asyncio.to_thread(self._make_folders)
        if self.spec.storage_mb is not None:
            await _do(
                ["overlay", "create", "--size", str(self.spec.storage_mb), str(self._overlay)],
                f"making the overlay of the sandbox {self.place.id}",
            )
        await _do(self.start_arguments(), f"starting the sandbox {self.place.id}", timeout_s=START_S)
        self._pid = await self._find_pid()
        made = await self.exec(["mkdir", "-p", self._workdir], cwd="/", timeout_s=60)
        if not made.ok:
            raise SandboxError(f"the sandbox {self.place.id} has no place for {self._workdir}: {made.tail()}")
        if self.place.gateway is not None and self.spec.effective_network in ("gateway", "bridge"):
            self._relay = await Relay.open(self._pid, self.place.gateway)

    def start_arguments(self) -> list[str]:
        """The arguments of `instance start`."""
        spec, folder = self.spec, self.place.folder
        arguments = ["instance", "start", "--containall", "--cleanenv", "--no-eval", "--hostname", "sandbox"]
        arguments += ["--overlay", str(self._overlay), "--home", f"{folder / 'home'}:{HOME}", "--workdir", str(folder / "scratch")]
        arguments += {"gateway": ["--net", "--network", "none"], "none": ["--net", "--network", "none"], "host": []}.get(
            spec.effective_network, ["--net", "--network", "bridge"]
        )
        arguments += ["--bind", f"{folder / 'exchange'}:{EXCHANGE}:rw"]
        for mount in spec.mounts:
            source = Path(mount.source).expanduser()
            source = source if source.is_absolute() or self.place.task_folder is None else self.place.task_folder / source
            arguments += ["--bind", f"{source}:{mount.target}:{'ro' if mount.read_only else 'rw'}"]
        for volume in spec.kwargs.get("volumes", ()):
            arguments += ["--bind", str(volume)]
        arguments += ["--cpus", f"{spec.cpus:g}"] if spec.cpus is not None else []
        arguments += ["--memory", f"{spec.memory_mb}M", "--memory-swap", f"{spec.memory_mb}M"] if spec.memory_mb is not None else []
        arguments += ["--pids-limit", str(spec.pids)] if spec.pids is not None else []
        arguments += ["--nv"] if spec.gpus else []
        arguments += ["--fakeroot"] if spec.user is not None and os.geteuid() != 0 else []
        return [*arguments, *map(str, spec.kwargs.get("extra_args", ())), self._image, self.name]

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
        if user not in (None, self.spec.user):
            raise SandboxError(f"runtime apptainer: a command cannot run as {user!r}: an instance has one user")
        view = HostView(self._running, self.place.id)
        began, since, mark, word = time.monotonic(), await view.now(), secrets.token_hex(8), secrets.token_hex(8)
        tail = Tail(keep_bytes, on_output, word)
        argv = ["exec", "--cleanenv", "--no-eval", "--pwd", posixpath.join(self._workdir, cwd or ""), f"instance://{self.name}"]
        environment = self._environment({**self.spec.env, **(env or {}), EXEC_VARIABLE: mark})
        own_home = (env or {}).get("HOME", self.spec.env.get("HOME", HOME))
        homed = [] if own_home == HOME else ["env", f"HOME={own_home}"]  # Apptainer sets it itself, and takes no other by its variables
        whole = [program() or "apptainer", *argv, *BEGIN, word, *homed, *shell.arguments(command)]
        code = None
        try:
            code = await run(whole, env=environment, tail=tail, stdin=stdin, timeout_s=timeout_s)
        finally:
            if code is None:
                await even_if_cancelled(self._end(view, mark, since))
        if code is None:
            return tail.result(TIMED_OUT, began, timed_out=True)
        result = tail.result(code, began)
        if not tail.began:
            if self.name in await _instances() and "no such file or directory" in result.tail().lower():
                return tail.result(CANNOT_BEGIN, began)
            raise SandboxError(f"a command in the sandbox {self.place.id} could not be started: {result.tail()}")
        return result

    async def end_processes(self) -> None:
        left = await end_all(HostView(self._running, self.place.id))
        if left:
            raise SandboxError(f"the sandbox {self.place.id} has processes that cannot be ended: {left[:10]}")

    async def upload(self, source: Path, target: str) -> None:
        target = posixpath.join(self._workdir, target)
        folder = await asyncio.to_thread(source.is_dir)
        into, name = (target, ".file") if folder else (posixpath.dirname(target), posixpath.basename(target))
        async with self._exchanged() as (staged, inside):
            await transfer.in_thread(lambda: _packed(source, staged, name))
            unpack = ["/bin/sh", "-c", 'mkdir -p "$2" && exec tar -xf "$1" -C "$2"', "polar", inside, into]
            result = await self.exec(unpack, cwd="/", timeout_s=COPY_S)
        if not result.ok:
            raise SandboxError(f"{source} could not be copied to {target} in the sandbox {self.place.id}: {result.tail()}")

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        path = posixpath.normpath(posixpath.join(self._workdir, source))
        into = self.place.folder / f"coming-{secrets.token_hex(4)}"
        async with self._exchanged() as (staged, inside):
            pack = ["/bin/sh", "-c", _PACK, "polar", inside, path, posixpath.dirname(path), posixpath.basename(path) or "."]
            result = await self.exec(pack, cwd="/", timeout_s=COPY_S)
            if result.exit_code == _MISSING:
                raise FileNotFoundError(source)
            if result.exit_code == _NO_FILE:
                raise UnsafePath(f"{source} is a link, or neither a file nor a folder")
            if not result.ok:
                raise SandboxError(f"{source} could not be copied from the sandbox {self.place.id}: {result.tail()}")
            await transfer.in_thread(lambda: _unpacked(staged, into, max_bytes))
        try:
            await asyncio.to_thread(move, into, target)
        finally:
            await asyncio.to_thread(remove_tree, into)

    async def stop(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            await relay.close()
        if program() is not None and self.name in await _instances():
            await _stop(self.name)
        self._pid = None

    @classmethod
    async def find(cls) -> list[Left]:
        found = []
        for name in await _instances():
            if match := _NAME.fullmatch(name):
                found.append(Left("instance", name, match["sandbox"], match["owner"]))
        return found

    @classmethod
    async def remove(cls, left: Left) -> None:
        if left.kind == "instance" and left.name in await _instances():
            await _stop(left.name)

    @property
    def _running(self) -> int:
        if self._pid is None:
            raise SandboxError(f"the sandbox {self.place.id} is not running")
        return self._pid

    @property
    def _overlay(self) -> Path:
        return self.place.folder / ("overlay" if self.spec.storage_mb is None else "overlay.img")

    @property
    def _image(self) -> str:
        image = self.spec.image or ""
        return image if "://" in image or image.startswith(("/", ".", "~")) or image.endswith((".sif", ".img")) else f"docker://{image}"

    def _make_folders(self) -> None:
        for name in ("home", "scratch", "exchange", *(["overlay"] if self.spec.storage_mb is None else [])):
            (self.place.folder / name).mkdir(exist_ok=True)

    def _environment(self, inside: Mapping[str, str]) -> dict[str, str]:
        """The environment of the program `apptainer`: what it needs itself, and what it hands on under its prefix."""
        marks = {SANDBOX_VARIABLE: self.place.id, OWNER_VARIABLE: self.place.owner}
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(self.spec.gpus)))} if self.spec.gpus else {}
        handed = {f"APPTAINERENV_{name}": value for name, value in {**gpus, **inside, **marks}.items() if name != "HOME"}
        return {**_own_environment(), **handed}

    @asynccontextmanager
    async def _exchanged(self) -> AsyncIterator[tuple[Path, str]]:
        """A new name in the folder that both sides see, here and inside."""
        name = secrets.token_hex(8)
        staged = self.place.folder / "exchange" / name
        try:
            yield staged, f"{EXCHANGE}/{name}"
        finally:
            await asyncio.to_thread(staged.unlink, missing_ok=True)

    async def _end(self, view: HostView, mark: str, since: int) -> None:
        left = await end(view, mark, since=since)
        if left:
            raise SandboxError(f"a command in the sandbox {self.place.id} has processes that cannot be ended: {left[:10]}")

    async def _find_pid(self) -> int:
        pid = (await _instances()).get(self.name)
        if not pid:
            raise SandboxError(f"the sandbox {self.place.id} ended at once: apptainer lists no instance {self.name}")
        return pid


def program() -> str | None:
    """The path of Apptainer, or of Singularity."""
    return os.environ.get("POLAR_APPTAINER_BIN") or shutil.which("apptainer") or shutil.which("singularity")


def _own_environment() -> dict[str, str]:
    """What Apptainer itself needs of this process's environment: its paths, its cache and its settings, nothing for inside."""
    kept = ("PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")
    return {
        name: value
        for name, value in os.environ.items()
        if name in kept or (name.startswith(("APPTAINER_", "SINGULARITY_")) and "ENV_" not in name and "BIND" not in name)
    }


async def _do(arguments: Sequence[str], doing: str, *, timeout_s: float = 120.0) -> bytes:
    """What Apptainer prints. Raises `SandboxError` with its own words."""
    binary = program()
    if binary is None:
        raise SandboxError("there is no program apptainer on this machine")
    tail = Tail(4 << 20, None, "")
    code = await run([binary, *arguments], env=_own_environment(), tail=tail, timeout_s=timeout_s)
    if code is None:
        raise SandboxError(f"{doing}: apptainer was not done after {timeout_s:g} s")
    result = tail.result(code, 0.0)
    if code != 0:
        raise SandboxError(f"{doing}: apptainer {arguments[0]} failed with exit code {code}: {result.tail()}")
    return result.stdout


async def _instances() -> dict[str, int]:
    """The pids of this user's running instances, by name."""
    told = json.loads(await _do(["instance", "list", "--json"], "listing instances"))
    return {str(one["instance"]): int(one["pid"]) for one in told.get("instances") or ()}


async def _stop(name: str) -> None:
    await _do(["instance", "stop", "--force", "--timeout", "10", name], f"stopping {name}", timeout_s=STOP_S)
    if name in await _instances():
        raise SandboxError(f"the instance {name} does not end")


def _packed(source: Path, staged: Path, name: str) -> None:
    with staged.open("xb") as file:
        transfer.pack(source, file, single=name)


def _unpacked(staged: Path, into: Path, max_bytes: int) -> None:
    """The archive lies where a program inside may have put something else in its place."""
    handle = os.open(staged, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise UnsafePath("the copy is no file any more")
        transfer.extract(file, into, max_bytes=max_bytes, strip=1)
