"""A sandbox: start, exec, upload, download, stop. The one interface between Polar and whatever isolates an agent.

Knows no harness, no task and no gateway (beyond the address of one). A new backend is one file beside this one: subclass `Runtime`,
decorate it with `@register`.

Every backend holds to this:

* paths inside are absolute POSIX paths as the program inside sees them, or relative to `workdir`;
* `exec` never raises for what the command did: its exit code, its output and whether its time ran out are in the result. It raises
  `SandboxError` where the sandbox itself failed, which is what tells infrastructure from policy (law 5);
* when `exec` returns after a timeout or is cancelled, no process that it started is running, wherever it moved itself;
* everything that exists for a sandbox (processes, containers, folders, images of its own) carries its id and its owner's id, in a label or
  the environment, so that `polar.runtime.reaper` finds it after any crash;
* nothing written by a program inside is trusted: archives and links cannot make the host read or write outside the sandbox.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Literal, Self, TypeVar

from polar.errors import ConfigError, UnsafePath
from polar.runtime.owner import remove_tree
from polar.runtime.spec import RuntimeSpec

Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], None]

SANDBOX_VARIABLE = "POLAR_SANDBOX"
"""In the environment of every process of a sandbox: its id."""
OWNER_VARIABLE = "POLAR_OWNER"
"""In the environment of every process of a sandbox: the id of the process that answers for it (`polar.runtime.owner`)."""
SANDBOX_LABEL, OWNER_LABEL = "polar.sandbox", "polar.owner"
"""The same, as labels of containers and images."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sandbox lives and whose it is. `id` is unique, at most 63 characters of `[a-z0-9-]`; `folder` is a private folder of its
    own on this machine, made by the owner and removed by it (`Owner.sandbox`)."""

    id: str
    owner: str
    folder: Path
    gateway: tuple[str, int] | None = None
    """Host and port of the model API as this machine reaches it; `None`: there is none to reach."""
    task_folder: Path | None = None
    """What relative sources of `prepare` steps are relative to."""
    hidden: tuple[Path, ...] = ()
    """Folders of this machine (the node's state, say) that are empty for programs inside, where a backend shows the machine's files."""

    @property
    def gateway_url(self) -> str | None:
        """The model API as this machine, and whatever shares its network, reaches it."""
        if self.gateway is None:
            return None
        host, port = self.gateway
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command ended. `exit_code` is 128 + n for a signal n, 124 where its time ran out. Of each stream the last `keep_bytes` are
    here; `truncated` says whether there was more."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    duration_s: float
    timed_out: bool = False
    truncated: bool = False
    out_of_memory: bool = False
    """Whether it is known that the sandbox's memory limit ended it. Only containers can tell: elsewhere each process is limited by its
    own, which shows as a failed allocation, and a 137 may be anybody's kill."""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")

    def tail(self, characters: int = 500) -> str:
        """The end of what it printed, for messages."""
        return (self.stderr or self.stdout).decode(errors="replace").strip()[-characters:]


class Runtime(ABC):
    """One sandbox, from `start` to `stop`. Use as an async context manager, or call both; `stop` may be called at any time, twice too."""

    backend: ClassVar[str]
    shares_host_network: ClassVar[bool] = False
    """True where `network: gateway` cannot be had: programs inside reach whatever this machine reaches."""
    shows_host_files: ClassVar[bool] = False
    """True where programs inside see files of this machine, so that it matters what `Place.hidden` names."""

    def __init__(self, spec: RuntimeSpec, place: Place) -> None:
        self.spec = spec
        self.place = place

    @classmethod
    @abstractmethod
    async def unavailable(cls) -> str | None:
        """Why this backend cannot be used on this machine and what to do about it; `None` where it can."""

    @classmethod
    def check(cls, spec: RuntimeSpec) -> None:
        """Raises `ConfigError` for a field that this backend cannot heed on this machine. `polar.runtime.create` asks; so may a
        submission. The default heeds everything."""
        return

    @classmethod
    async def find(cls) -> list[Left]:
        """What this backend made on this machine and did not yet remove, whoever owns it, as far as only the backend can know
        (containers, images). The reaper finds processes and folders itself."""
        return []

    @classmethod
    async def remove(cls, left: Left) -> None:
        """Removes what `find` found; nothing happens if it is gone already. Raises `SandboxError`."""
        return

    @property
    @abstractmethod
    def workdir(self) -> str:
        """Where commands run by default, and where the agent works. Exists after `start`."""

    @property
    @abstractmethod
    def home(self) -> str:
        """A private, writable folder inside, outside `workdir`: the harness's HOME. Exists after `start`."""

    @property
    @abstractmethod
    def gateway_url(self) -> str:
        """How a program inside reaches the model API, such as `http://127.0.0.1:8100`: no path. Raises `ConfigError` where it cannot."""

    @abstractmethod
    async def start(self) -> None:
        """Makes it and its network. Does not run `spec.prepare` (`polar.runtime.prepare` does). Raises `SandboxError`."""

    @abstractmethod
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
        """Runs a program (a sequence) or a shell line (a string: bash where there is one, else sh, with pipefail where the shell has it).

        The environment is `spec.env` and `env` over a small clean one: nothing of this process's. `on_output` gets everything as it comes.
        """

    @abstractmethod
    async def upload(self, source: Path, target: str) -> None:
        """Copies a file or a folder's content from this machine to `target` inside (a file's or a folder's own path); parents are made.
        Links in `source` that leave it raise `UnsafePath`."""

    @abstractmethod
    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30) -> None:
        """Copies a file or a folder out to `target` on this machine (a new path). Links are not followed: those that leave the folder,
        devices and absolute paths raise `UnsafePath`, as does more than `max_bytes`. A missing source raises `FileNotFoundError`."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends every process and removes everything but `place.folder`. Raises `SandboxError` if something is left."""

    async def end_processes(self) -> None:
        """Ends every process that commands left running inside, however it hides; files and the sandbox itself stay. The default is for
        backends with a process namespace of their own, where the first process cannot be signalled from inside."""
        await self.exec(["/bin/sh", "-c", "kill -9 -1"], timeout_s=30)

    async def write(self, path: str, content: bytes, *, mode: int = 0o644) -> None:
        """Writes one file inside; parents are made."""
        staged = self.place.folder / "staged"
        staged.mkdir(parents=True, exist_ok=True)
        file = staged / secrets.token_hex(8)
        file.write_bytes(content)
        file.chmod(mode)
        try:
            await self.upload(file, path)
        finally:
            file.unlink(missing_ok=True)

    async def read(self, path: str, *, max_bytes: int = 16 << 20) -> bytes:
        """One file's content. Raises `FileNotFoundError`, `UnsafePath` (a link, a folder, or larger than `max_bytes`)."""
        target = self.place.folder / f"read-{secrets.token_hex(8)}"
        await self.download(path, target, max_bytes=max_bytes)
        try:
            if target.is_dir():
                raise UnsafePath(f"{path} is a folder, not a file")
            return target.read_bytes()
        finally:
            remove_tree(target)

    async def snapshot(self) -> str | None:
        """Keeps the sandbox's present file system as an image that `RuntimeSpec.image` can name; `None` where the backend cannot. Its
        owner removes it again (`discard`)."""
        return None

    @classmethod
    async def discard(cls, image: str) -> None:
        """Removes an image that `snapshot` made."""
        return

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.stop()


@dataclass(frozen=True, slots=True)
class Left:
    """Something that a dead owner left: what kind (`process`, `container`, `folder`, `image`), which, and whose."""

    kind: str
    name: str
    sandbox: str
    owner: str
    detail: str = field(default="")


ALIASES = {"podman": "docker", "bwrap": "bubblewrap"}
"""Further names of backends."""
_REGISTRY: dict[str, type[Runtime]] = {}
R = TypeVar("R", bound=type[Runtime])


def register(cls: R) -> R:
    """Makes a backend known by its name."""
    _REGISTRY[cls.backend] = cls
    return cls


def registered() -> Mapping[str, type[Runtime]]:
    """All backends by name."""
    return _REGISTRY


def allowed(backend: str, names: Collection[str]) -> bool:
    """Whether a list of backends (empty: all) has that one, by the name it was asked for or its proper one."""
    return not names or backend in names or ALIASES.get(backend) in names


def named(backend: str) -> type[Runtime]:
    """Raises `ConfigError` for an unknown name."""
    try:
        return _REGISTRY[ALIASES.get(backend, backend)]
    except KeyError:
        raise ConfigError(f"no runtime is called {backend!r}; there are: {', '.join(_REGISTRY)}") from None
