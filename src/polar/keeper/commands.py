"""Starting one command inside: a stub that collects whatever descends from it, and the command itself, with no rights left."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, NoReturn

from polar.keeper import archive, kernel

NOT_FOUND, REFUSED, BROKEN = 3, 4, 5
"""Exit codes of a copy: no such source, what may not be copied, anything else."""
_STATUS = struct.Struct("i")


@dataclass(frozen=True, slots=True)
class Rights:
    """What a command runs with. `uid` is as seen inside; `None`: this process's own. `user_namespace` is joined last."""

    uid: int | None = None
    gid: int | None = None
    user_namespace: int | None = None
    confined: bool = True
    """Whether capabilities are dropped and setuid programs lose their effect."""
    data_bytes: int | None = None
    processes: int | None = None
    cpus: frozenset[int] | None = None


def start(
    request: Mapping[str, object],
    fds: Sequence[int],
    rights: Rights,
    close: Callable[[], None],
) -> tuple[int, int]:
    """Forks the stub. Gives its pid and a pipe on which 4 bytes come when the command ends (a wait status), and the end when nothing that
    descends from it is left. `close` closes what belongs to the keeper alone."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    try:
        close()
        os.close(reading)
        _stub(request, fds, rights, writing)
    finally:
        os._exit(70)


def _stub(request: Mapping[str, object], fds: Sequence[int], rights: Rights, writing: int) -> NoReturn:
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    main = os.fork()
    if main == 0:
        try:
            _command(request, fds, rights)
        finally:
            os._exit(126)
    for fd in fds:
        os.close(fd)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid == main:
            with contextlib.suppress(OSError):
                os.write(writing, _STATUS.pack(status))


def status_of(data: bytes) -> int:
    """The exit code (128 + n for a signal n) from what the stub wrote."""
    code = os.waitstatus_to_exitcode(_STATUS.unpack(data)[0])
    return code if code >= 0 else 128 - code


def _command(request: Mapping[str, object], fds: Sequence[int], rights: Rights) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    for target, fd in enumerate(fds):
        os.dup2(fd, target)
    kept = rights.user_namespace
    _close_others({kept} if kept is not None else set())
    _confine(rights)
    os.umask(0o022)
    call = request.get("call")
    if call is not None:
        _copy(str(call), str(request["path"]))
    argv, env = [str(one) for one in _list(request["argv"])], _strings(request["env"])
    cwd = str(request["cwd"])
    try:
        os.chdir(cwd)
    except OSError as error:
        _say(f"cannot work in {cwd}: {error.strerror}")
        os._exit(126)
    try:
        os.execvpe(argv[0], argv, env)
    except (FileNotFoundError, NotADirectoryError):
        _say(f"{argv[0]}: command not found")
        os._exit(127)
    except OSError as error:
        _say(f"{argv[0][:200]}: {error.strerror}")
        os._exit(126)
    except ValueError as error:  # a NUL, or no text of any kind: the kernel takes neither
        _say(f"{argv[0][:200]}: its arguments or its environment cannot be handed over: {error}")
        os._exit(126)


def _confine(rights: Rights) -> None:
    if rights.data_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (rights.data_bytes, rights.data_bytes))
    if rights.cpus is not None:
        os.sched_setaffinity(0, rights.cpus)
    if rights.uid is not None:
        os.setgroups([])
    if rights.user_namespace is not None:
        kernel.setns(rights.user_namespace, kernel.CLONE_NEWUSER)
        os.close(rights.user_namespace)
    if rights.confined:
        kernel.bound_capabilities()
    if rights.processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (rights.processes, rights.processes))
    if rights.uid is not None:
        gid = rights.gid if rights.gid is not None else rights.uid
        os.setresgid(gid, gid, gid)
        os.setresuid(rights.uid, rights.uid, rights.uid)
    if rights.confined:
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS)


def _copy(call: str, path: str) -> NoReturn:
    """Packs to standard output, or unpacks from standard input."""
    try:
        if call == "pack":
            with os.fdopen(1, "wb", closefd=False) as out:
                archive.pack(path, out)
        else:
            with os.fdopen(0, "rb", closefd=False) as stream:
                archive.unpack_inside(path, stream)
    except FileNotFoundError as error:
        _say(str(error.filename or error))
        os._exit(NOT_FOUND)
    except archive.Refused as error:
        _say(str(error))
        os._exit(REFUSED)
    except MemoryError:
        _say("more than the sandbox's memory can hold")
        os._exit(REFUSED)
    except BrokenPipeError:
        os._exit(BROKEN)
    except OSError as error:
        _say(f"{error.filename or path}: {error.strerror}")
        os._exit(BROKEN)
    os._exit(0)


def _say(message: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"{message}\n".encode(errors="surrogateescape"))


def _close_others(kept: set[int]) -> None:
    low = 3
    for fd in sorted(kept):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, max(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024) if sys.platform != "linux" else 1 << 16)


def _list(value: object) -> list[object]:
    if not isinstance(value, list):
        raise TypeError("a command is a list")
    return value


def _strings(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError("an environment is an object")
    return {str(key): str(one) for key, one in value.items()}


def read_all(fd: int) -> bytes:
    """A memory file's whole content."""
    with os.fdopen(fd, "rb") as file:
        stream: BinaryIO = file
        stream.seek(0)
        return stream.read()
