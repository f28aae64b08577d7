"""What a sandbox sees: the namespaces and mounts of backend `local`, and joining those that bubblewrap made.

Both leave the keeper itself inside the sandbox's mount, network and other namespaces but outside its process namespace: programs inside
can neither see nor signal it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import stat
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from polar.keeper import kernel


@dataclass(frozen=True, slots=True)
class Bind:
    """A host path seen inside."""

    source: str
    target: str
    read_only: bool


@dataclass(frozen=True, slots=True)
class View:
    """What was made. `reaper` is the first process of the process namespace (`None`: there is none of its own)."""

    reaper: int | None
    user_namespace: int | None = None
    network_pid: int | None = None
    """A process in the sandbox's network namespace, as this machine numbers it."""


class Failed(Exception):
    """The sandbox could not be made; the message is for the user."""


def own_user(flags: int) -> None:
    """Enters new namespaces inside a new user namespace, where this user keeps its own number."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def enter(flags: int) -> None:
    """Enters new namespaces, in a user namespace of its own where this process may not do it otherwise."""
    if kernel.may_administer():
        kernel.unshare(flags)
    else:
        own_user(flags)
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)


# --- local ---


def local(config: Mapping[str, object]) -> View:
    """The machine as it is, read-only, with the sandbox's own folders over it: `root` (a folder of this sandbox) becomes `/`, the
    machine's top folders are seen in it, `/tmp` and `/var/tmp` are the sandbox's own, `hide` is empty, processes are its own."""
    root = str(config["root"])
    binds = _binds(config)
    hide = [str(one) for one in _items(config["hide"])]
    flags = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWIPC
    if config["private_network"]:
        flags |= kernel.CLONE_NEWNET
    sources = [bind.source for bind in binds]
    try:
        enter(flags)
        if config["private_network"]:
            kernel.loopback_up()
        handles = [os.open(source, os.O_PATH | os.O_CLOEXEC) for source in sources]
        kernel.mount(root, root, flags=kernel.MS_BIND)
        _machine(root, str(config["temporary"]))
        for path in hide:
            if os.path.isdir(root + path):
                kernel.mount("tmpfs", root + path, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=64k,mode=755")
        maker = _Mountpoints(root, str(config["shadows"]))
        for bind, handle in zip(binds, handles, strict=True):
            _bind(handle, root + maker.ready(bind.target, stat.S_ISDIR(os.fstat(handle).st_mode)), bind.read_only)
            os.close(handle)
    except OSError as error:
        raise Failed(f"the sandbox's view of the machine could not be made: {error}") from error
    return View(_first_process(root))


def _machine(root: str, temporary: str) -> None:
    for entry in sorted(os.listdir("/")):
        source, target = f"/{entry}", f"{root}/{entry}"
        if entry in ("proc", "tmp", "lost+found") or os.path.lexists(target):
            continue
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif os.path.isdir(source):
            os.mkdir(target)
            kernel.mount(source, target, flags=kernel.MS_BIND | kernel.MS_REC)
            if entry != "dev":
                kernel.read_only(target)
    for shared in ("/dev/shm",):
        if os.path.isdir(root + shared):
            kernel.mount("tmpfs", root + shared, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=1777")
    os.makedirs(f"{root}/tmp", exist_ok=True)
    for own in ("/tmp", "/var/tmp"):
        if os.path.isdir(root + own):
            kernel.mount(temporary, root + own, flags=kernel.MS_BIND)
    os.makedirs(f"{root}/proc", exist_ok=True)


def _bind(handle: int, target: str, read_only: bool) -> None:
    kernel.mount(f"/proc/self/fd/{handle}", target, flags=kernel.MS_BIND | kernel.MS_REC)
    if read_only:
        kernel.read_only(target)


class _Mountpoints:
    """Makes places to mount on. Where the machine's own read-only folders are in the way, the deepest one that exists is replaced by a
    copy made of mounts, to which a name can be added."""

    def __init__(self, root: str, shadows: str) -> None:
        self._root = root
        self._shadows = shadows
        self._made = 0

    def ready(self, target: str, folder: bool) -> str:
        path = ""
        parts = [part for part in target.split("/") if part]
        for number, part in enumerate(parts):
            here = f"{path}/{part}"
            if not os.path.exists(self._root + here):
                if not os.access(self._root + (path or "/"), os.W_OK) or self._is_machine(path):
                    self._shadow(path)
                last = number == len(parts) - 1
                if folder or not last:
                    os.mkdir(self._root + here)
                else:
                    os.close(os.open(self._root + here, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            path = here
        return path

    def _is_machine(self, path: str) -> bool:
        return bool(os.statvfs(self._root + path).f_flag & os.ST_RDONLY)

    def _shadow(self, path: str) -> None:
        self._made += 1
        copy = f"{self._shadows}/{self._made}"
        os.makedirs(copy)
        original = self._root + path
        for entry in os.listdir(original):
            source, target = f"{original}/{entry}", f"{copy}/{entry}"
            if os.path.islink(source):
                os.symlink(os.readlink(source), target)
                continue
            if os.path.isdir(source):
                os.mkdir(target)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
            kernel.mount(source, target, flags=kernel.MS_BIND | kernel.MS_REC)
        kernel.mount(copy, original, flags=kernel.MS_BIND | kernel.MS_REC)


def _first_process(root: str) -> int:
    """Process 1 of the new process namespace: mounts `/proc`, turns `root` into `/`, then reaps. It ends with the keeper, and all with
    it."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _reap_for_ever(root, writing)
    os.close(writing)
    said = os.read(reading, 4096)
    os.close(reading)
    if said != b"ready":
        raise Failed(f"the sandbox's first process failed: {said.decode(errors='replace') or 'it ended'}")
    os.chdir("/")
    return pid


def _reap_for_ever(root: str, writing: int) -> NoReturn:
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        kernel.mount("proc", f"{root}/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
        os.chdir(root)
        kernel.pivot_root(".", ".")
        kernel.unmount(".")
        os.chdir("/")
        os.write(writing, b"ready")
        os.closerange(0, 1 << 10)
        while True:
            try:
                os.wait()
            except ChildProcessError:
                signal.sigwaitinfo([signal.SIGCHLD])
    except OSError as error:
        os.write(writing, str(error).encode())
    finally:
        os._exit(1)


# --- bubblewrap ---


def bubblewrap(config: Mapping[str, object]) -> tuple[View, subprocess.Popen[bytes]]:
    """Runs `bwrap` as the user that the sandbox belongs to, in a mount namespace where everything that it shall see lies under `/tmp`
    (it may not be able to reach the places themselves), and joins what it made."""
    binds = _binds(config)
    try:
        privileged = kernel.may_administer()
        enter(kernel.CLONE_NEWNS)
        image, layers = config["image"], str(config["layers"])
        handles = [os.open(bind.source, os.O_PATH | os.O_CLOEXEC) for bind in binds]
        if image is not None:
            merged = f"{layers}/merged"
            where = f"lowerdir={image},upperdir={layers}/upper,workdir={layers}/work"
            kernel.mount("overlay", merged, "overlay", kernel.MS_NOSUID | kernel.MS_NODEV, where if privileged else f"{where},userxattr")
            os.close(handles[0])
            handles[0] = os.open(merged, os.O_PATH | os.O_CLOEXEC)
            if privileged:
                for bind, handle in zip(binds[1:], handles[1:], strict=True):
                    _place_for(merged, bind.target, stat.S_ISDIR(os.fstat(handle).st_mode))
        kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
        arguments: list[str] = []
        for number, (bind, handle) in enumerate(zip(binds, handles, strict=True)):
            staged = f"/tmp/{number}"
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                os.mkdir(staged)
            else:
                os.close(os.open(staged, os.O_CREAT | os.O_WRONLY, 0o644))
            _bind(handle, staged, False)
            os.close(handle)
            arguments += ["--ro-bind" if bind.read_only else "--bind", staged, bind.target]
        for path in (str(one) for one in _items(config["hide"])):
            if os.path.isdir(path) and any(path.startswith(f"{bind.target}/") for bind in binds):
                arguments += ["--tmpfs", path]
    except OSError as error:
        raise Failed(f"the mounts for bubblewrap could not be made: {error}") from error
    return _join(config, arguments)


def _place_for(top: str, target: str, folder: bool) -> None:
    """Makes what `target` will be mounted on, in folders of the image that the sandbox's user may not write to. Follows no link; where one
    is in the way, bwrap has to manage."""
    parts = [part for part in target.split("/") if part]
    here = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parts):
            if folder or number < len(parts) - 1:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o755, dir_fd=here)
                inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=here)
                os.close(here)
                here = inner
            else:
                os.close(os.open(part, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=here))
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR):
            raise
    finally:
        os.close(here)


def _join(config: Mapping[str, object], binds: list[str]) -> tuple[View, subprocess.Popen[bytes]]:
    program, *options = (str(one) for one in _items(config["argv"]))
    place = options.index("--BINDS--")
    info_read, info_write = os.pipe2(os.O_CLOEXEC)
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    problems_read, problems_write = os.pipe2(os.O_CLOEXEC)
    uid = config["uid"]
    child = subprocess.Popen(
        [program, "--info-fd", str(info_write), *options[:place], *binds, *options[place + 1 :]],
        stdin=subprocess.DEVNULL,
        stdout=ready_write,
        stderr=problems_write,
        pass_fds=[info_write],
        cwd="/",
        env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **_marks(config)},
        user=uid if isinstance(uid, int) else None,
        group=uid if isinstance(uid, int) else None,
        extra_groups=[] if isinstance(uid, int) else None,
    )
    for fd in (info_write, ready_write, problems_write):
        os.close(fd)
    try:
        if not _line(ready_read, 30.0):
            child.kill()
            child.wait()
            raise Failed(f"bwrap: {os.read(problems_read, 4096).decode(errors='replace').strip() or 'it ended without a word'}")
        pid = int(json.loads(os.read(info_read, 4096))["child-pid"])
        return _enter_made(pid), child
    except OSError as error:
        child.kill()
        child.wait()
        raise Failed(f"the namespaces that bwrap made could not be entered: {error}") from error
    finally:
        for fd in (info_read, ready_read, problems_read):
            os.close(fd)


def _marks(config: Mapping[str, object]) -> dict[str, str]:
    marks = config["marks"]
    return {str(key): str(one) for key, one in marks.items()} if isinstance(marks, dict) else {}


def _enter_made(pid: int) -> View:
    """Joins the mount namespace's user namespace first where this process has no rights otherwise; the commands' own, which bubblewrap
    nests in it, each command joins by itself."""
    kinds = {
        "mnt": kernel.CLONE_NEWNS,
        "net": kernel.CLONE_NEWNET,
        "ipc": kernel.CLONE_NEWIPC,
        "uts": kernel.CLONE_NEWUTS,
        "pid": kernel.CLONE_NEWPID,
    }
    user = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    handles = {kind: os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds}
    if os.geteuid() != 0 or not kernel.may_administer():
        owning = kernel.user_namespace_of(handles["mnt"])
        kernel.setns(owning, kernel.CLONE_NEWUSER)
        if os.path.samestat(os.fstat(owning), os.fstat(user)):
            os.close(user)
            user = -1
        os.close(owning)
    for kind, flag in kinds.items():
        kernel.setns(handles[kind], flag)
        os.close(handles[kind])
    os.chdir("/")
    return View(pid, user_namespace=None if user < 0 else user, network_pid=pid)


def _line(fd: int, within_s: float) -> bool:
    """Whether a byte comes in time."""
    deadline = time.monotonic() + within_s
    with contextlib.suppress(OSError):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        return bool(ready) and bool(os.read(fd, 1))
    return False


def _items(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("a list is expected")
    return value


def _binds(config: Mapping[str, object]) -> list[Bind]:
    found = []
    for one in _items(config["binds"]):
        source, target, read_only = _items(one)
        found.append(Bind(str(source), str(target), bool(read_only)))
    return found
