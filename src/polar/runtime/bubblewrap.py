"""Backend `bubblewrap`: a sandbox without a daemon and without root. Its own users, mounts, processes, IPC, host name and network.

Inside there are: the machine's programs read-only (`/usr`, and `/bin`, `/lib...` as they are), or the root file system in the folder
`spec.image`, writable over an overlay; an `/etc` with the few files that programs need and no secrets; private `/tmp`, home and
workdir; `spec.mounts`; nothing else of the machine. All capabilities are dropped, setuid programs have no effect.

Network: `gateway` has the model API on 127.0.0.1 and nothing else (`polar.runtime.relay`); `none` nothing; `host` the machine's;
`bridge` the internet through `slirp4netns` where it is installed, and never the machine's own loopback.

Heeded: cpus (whole cores), memory_mb (each process), pids, storage_mb (checked every 2 s), workdir, env, mounts, image (a folder).
Started by root, each sandbox belongs to a user of its own, who owns nothing else on the machine; started by a user, to that user. Needs
unprivileged user namespaces either way.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from polar.errors import ConfigError, SandboxError
from polar.keeper import kernel
from polar.runtime import machine
from polar.runtime.base import Place, register
from polar.runtime.kept import Kept
from polar.runtime.nursery import PATH
from polar.runtime.relay import Relay
from polar.runtime.spec import DEFAULT_PIDS, RuntimeSpec

HOME, WORKDIR, UID = "/home/agent", "/workspace", 1000
_ETC = (
    "alternatives",
    "ca-certificates.conf",
    "debian_version",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "networks",
    "nsswitch.conf",
    "os-release",
    "pki",
    "profile",
    "protocols",
    "services",
    "ssl/certs",
    "ssl/openssl.cnf",
    "timezone",
)
_PROGRAMS = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
_WAIT = "echo; while :; do sleep 3600; done"
"""The first process inside: it cannot be signalled from there, collects what is left, and ends with bwrap."""


@register
class BubblewrapRuntime(Kept):
    """A sandbox made by `bwrap`."""

    backend = "bubblewrap"
    shows_host_files = True

    def __init__(self, spec: RuntimeSpec, place: Place) -> None:
        super().__init__(spec, place)
        self._uid = machine.new_uid() if machine.privileged() else None
        self._relay: Relay | None = None
        self._internet: subprocess.Popen[bytes] | None = None

    @classmethod
    async def unavailable(cls) -> str | None:
        if shutil.which("bwrap") is None:
            return "bwrap is not installed: apt-get install bubblewrap (or your distribution's package of that name)"
        return await asyncio.to_thread(_refused)

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        machine.refuse(
            spec,
            "bubblewrap",
            build_context="nothing can be built here; use docker",
            kwargs="this backend takes none",
            gpus="no devices are passed on; use docker",
        )
        machine.cores(spec.cpus)
        if spec.user not in (None, "agent", str(UID)):
            raise ConfigError(f"runtime bubblewrap: user {spec.user!r}: there is only the user agent")
        if spec.image is not None and (not Path(spec.image).is_dir() or set(spec.image) & set(":,\\")):
            raise ConfigError(
                f"runtime bubblewrap: image {spec.image!r} must be a root file system's folder, without ':' or ',' in its path"
            )
        if spec.effective_network == "bridge" and shutil.which("slirp4netns") is None:
            raise ConfigError("runtime bubblewrap: network bridge needs slirp4netns: install it, or use network gateway")

    @property
    def workdir(self) -> str:
        wanted = self.spec.workdir or WORKDIR
        return wanted if wanted.startswith("/") else f"{WORKDIR}/{wanted}"

    @property
    def home(self) -> str:
        return HOME

    @property
    def gateway_url(self) -> str:
        direct = self.place.gateway_url
        if self.spec.effective_network == "host" and direct is not None:
            return direct
        if self._relay is None:
            raise ConfigError("this sandbox has no way to a model API")
        return self._relay.url

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "USER": "agent", "LOGNAME": "agent"}

    async def start(self) -> None:
        await super().start()
        assert self.pid is not None
        network = self.spec.effective_network
        if network in ("gateway", "bridge") and self.place.gateway is not None:
            self._relay = await Relay.open(self.pid, self.place.gateway)
        if network == "bridge":
            connecting = asyncio.ensure_future(asyncio.to_thread(self._connect, self.pid))
            try:
                self._internet = await asyncio.shield(connecting)
            except asyncio.CancelledError:
                connecting.add_done_callback(_disconnected)  # it does not end with the network that it serves
                raise

    async def stop(self) -> None:
        if self._relay is not None:
            relay, self._relay = self._relay, None
            await relay.close()
        if self._internet is not None:
            internet, self._internet = self._internet, None
            internet.kill()
            await asyncio.to_thread(internet.wait)
        await super().stop()

    def configuration(self) -> dict[str, Any]:
        folder = self.place.folder
        layers = folder / "layers"
        binds: list[tuple[str, str, bool]] = [(str(folder / "root"), "/", False)]
        for one in (folder / "root", folder / "home", folder / "work", layers, layers / "upper", layers / "work", layers / "merged"):
            one.mkdir(exist_ok=True)
            one.chmod(0o755)
        (folder / "hosts").mkdir(exist_ok=True)
        options: list[str] = []
        if self.spec.image is None:
            for name in _PROGRAMS:
                if os.path.islink(f"/{name}"):
                    options += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
                elif os.path.isdir(f"/{name}"):
                    binds.append((f"/{name}", f"/{name}", True))
            binds += [(f"/etc/{name}", f"/etc/{name}", True) for name in _ETC if os.path.exists(f"/etc/{name}")]
        binds += self._etc(folder / "hosts")
        binds += [(str(folder / "home"), HOME, False), (str(folder / "work"), self._bound_workdir(), False)]
        binds += [(mount.source, mount.target, mount.read_only) for mount in self.spec.mounts]
        inner = folder / "work" / self.workdir.removeprefix(self._bound_workdir()).lstrip("/")
        inner.mkdir(parents=True, exist_ok=True)
        (folder / ("root" if self.spec.image is None else "layers/upper") / "tmp").mkdir(exist_ok=True)
        if self._uid is not None:
            self._give(folder, self._uid)
        (folder / ("root" if self.spec.image is None else "layers/upper") / "tmp").chmod(0o1777)
        return {
            "kind": "bubblewrap",
            "image": self.spec.image,
            "layers": str(layers),
            "binds": binds,
            "hide": [str(one) for one in self.place.hidden] if self.spec.image is None else [],
            "uid": self._uid,
            "argv": self._arguments(options),
            "uid_inside": UID if self._uid is not None else None,
            "confined": True,
            "data_bytes": None if self.spec.memory_mb is None else self.spec.memory_mb << 20,
            "processes": self.spec.pids or DEFAULT_PIDS,
            "cpus": machine.cores(self.spec.cpus),
        }

    def _bound_workdir(self) -> str:
        return WORKDIR if self.workdir == WORKDIR or self.workdir.startswith(f"{WORKDIR}/") else self.workdir

    def _give(self, folder: Path, uid: int) -> None:
        for top, folders, files in os.walk(folder):
            for name in (*folders, *files):
                os.chown(os.path.join(top, name), uid, uid, follow_symlinks=False)

    def _etc(self, hosts: Path) -> list[tuple[str, str, bool]]:
        passwd, group = machine.accounts(UID, UID, HOME, base=False)
        network = self.spec.effective_network
        resolve = Path("/etc/resolv.conf").read_text() if network == "host" and os.path.exists("/etc/resolv.conf") else ""
        files = {
            "passwd": passwd,
            "group": group,
            "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
            "hostname": "sandbox\n",
            "resolv.conf": "nameserver 10.0.2.3\n" if network == "bridge" else resolve,
        }
        for name, text in files.items():
            (hosts / name).write_text(text)
        return [(str(hosts / name), f"/etc/{name}", True) for name in files]

    def _arguments(self, options: list[str]) -> list[str]:
        network = [] if self.spec.effective_network == "host" else ["--unshare-net"]
        return [
            shutil.which("bwrap") or "bwrap",
            *("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", *network),
            *("--uid", str(UID), "--gid", str(UID), "--hostname", "sandbox"),
            *("--die-with-parent", "--new-session", "--as-pid-1"),
            "--BINDS--",
            *options,
            *("--proc", "/proc", "--dev", "/dev"),
            *("--clearenv", "--setenv", "PATH", PATH),
            *(part for key, value in self.marks().items() for part in ("--setenv", key, value)),
            *("--chdir", "/", "/bin/sh", "-c", _WAIT),
        ]

    def _connect(self, pid: int) -> subprocess.Popen[bytes]:
        """The internet, without the machine's loopback."""
        reading, writing = os.pipe()
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        owning = kernel.user_namespace_of(network)  # not the one of the sandbox's programs: bwrap nests theirs in it
        with (self.place.folder / "internet.log").open("ab") as log:
            child = subprocess.Popen(
                [
                    *("slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback", f"--ready-fd={writing}"),
                    *("--netns-type=path", f"--userns-path=/proc/self/fd/{owning}", f"/proc/self/fd/{network}", "tap0"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[writing, owning, network],
                env={"PATH": PATH, **self.marks()},
                start_new_session=True,
            )
        for fd in (writing, owning, network):
            os.close(fd)
        with os.fdopen(reading, "rb") as ready:
            if ready.read(1) != b"1":
                child.kill()
                child.wait()
                said = (self.place.folder / "internet.log").read_text(errors="replace").strip()
                raise SandboxError(f"slirp4netns could not connect the sandbox: {said[-300:]}")
        return child


def _disconnected(connecting: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    """Of a sandbox that nobody waits for any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().kill()


def _refused() -> str | None:
    """Why bwrap does not work here."""
    user = machine.new_uid() if machine.privileged() else None
    try:
        done = subprocess.run(
            ["bwrap", "--unshare-all", "--uid", "1000", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"],
            capture_output=True,
            timeout=30,
            check=False,
            cwd="/",
            env={"PATH": PATH},
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not work here: {error}"
    if done.returncode == 0:
        return None
    return (
        f"bwrap does not work here: {done.stderr.decode(errors='replace').strip()}. It needs unprivileged user namespaces "
        "(sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns, user.max_user_namespaces)"
    )
