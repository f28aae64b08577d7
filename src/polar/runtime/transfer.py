"""Files between this machine and a sandbox, as tar streams that are trusted in neither direction.

What comes from inside is written to a folder where nothing else works, so only the stream can be hostile: every name is checked, parents
are folders that this stream made, links are made last of all (nothing is ever written through one) and only if they stay inside, whatever
other links they cross. Refused with `UnsafePath`: absolute names, `..`, names twice, links that leave, hard links to anything but an
earlier file, devices, pipes, setuid files, sparse files, more than `max_bytes` or a million entries; and what would cost this process more
than it is worth: folders deeper than `MAX_DEPTH` (below every recursion limit and path length further on), more than `MAX_NAME_BYTES` of
names, links that take more than `MAX_LINK_STEPS` to follow.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import tarfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from polar.errors import UnsafePath
from polar.keeper import archive
from polar.runtime.owner import remove_tree

MAX_ENTRIES = 1_000_000
MAX_DEPTH = 200
MAX_NAME_BYTES = 256 << 20
MAX_LINK_STEPS = 5_000_000
_TOO_LONG = (errno.ENAMETOOLONG, errno.EILSEQ, errno.ELOOP)
"""Of an error of this machine's file system: the name is at fault, and whoever gave it."""
_MAX_LINKS = 40
T = TypeVar("T")


def extract(stream: BinaryIO, target: Path, *, max_bytes: int = 1 << 30, strip: int = 0) -> None:
    """Writes an untrusted stream to `target`, a new path in a folder that only this process writes to. A stream whose one member is
    `.file` (after `strip` leading parts are cut off each name) becomes a file, any other a folder. On any error nothing is left.

    Raises `UnsafePath`, and `FileExistsError` where `target` stands already.
    """
    if os.path.lexists(target):
        raise FileExistsError(f"{target} stands already")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        _Extraction(target, max_bytes, strip).run(archive.Reader(stream))
    except archive.Refused as error:
        remove_tree(target)
        raise UnsafePath(str(error)) from error
    except OSError as error:
        remove_tree(target)
        if error.errno in _TOO_LONG:
            raise UnsafePath(f"{error.strerror}: {str(error.filename)[-200:]}") from error
        raise
    except BaseException:
        remove_tree(target)
        raise


class _Extraction:
    """Paths are kept as texts, "" for the top: as lists of parts a million of them would fill the memory."""

    def __init__(self, target: Path, max_bytes: int, strip: int) -> None:
        self._target = str(target)
        self._left = max_bytes
        self._max_bytes = max_bytes
        self._names_left = MAX_NAME_BYTES
        self._strip = strip
        self._folders: dict[str, int] = {}
        self._files: set[str] = set()
        self._links: dict[str, str] = {}

    def run(self, reader: archive.Reader) -> None:
        for count, member in enumerate(reader.members()):
            if count >= MAX_ENTRIES:
                raise archive.Refused(f"more than {MAX_ENTRIES:,} entries")
            self._left -= member.size
            if self._left < 0:
                raise archive.Refused(f"more than {self._max_bytes:,} bytes")
            self._names_left -= len(member.name) + len(member.link)
            if self._names_left < 0:
                raise archive.Refused(f"more than {MAX_NAME_BYTES:,} bytes of names")
            parts = _parts(member.name, self._strip)
            if len(parts) > MAX_DEPTH:
                raise archive.Refused(f"folders more than {MAX_DEPTH} deep")
            name = "/".join(parts)
            if member.kind == "folder":
                self._folder(name, member.mode)
            elif not parts:
                self._single(member, reader)
            else:
                self._add(name, member, reader)
        if not os.path.lexists(self._target):
            self._folder("", 0o755)
        self._make_links()
        for name, mode in sorted(self._folders.items(), reverse=True):
            os.chmod(self._path(name), mode & 0o777 | 0o700)

    def _path(self, name: str) -> str:
        return f"{self._target}/{name}" if name else self._target

    def _single(self, member: archive.Member, reader: archive.Reader) -> None:
        if member.kind != "file" or os.path.lexists(self._target):
            raise archive.Refused("a file and more under one name")
        self._files.add("")
        self._write("", member, reader)

    def _folder(self, name: str, mode: int | None) -> None:
        """Makes it with its parents, each of which must be a folder of this stream."""
        if name not in self._folders:
            if name in self._files or name in self._links:
                raise archive.Refused(f"{name[:200] or 'the top'} is a file or a link, and a folder")
            if name:
                self._folder(name.rpartition("/")[0], None)
            os.mkdir(self._path(name), mode=0o700)
            self._folders[name] = 0o755
        if mode is not None:
            self._folders[name] = mode

    def _add(self, name: str, member: archive.Member, reader: archive.Reader) -> None:
        self._folder(name.rpartition("/")[0], None)
        if name in self._files or name in self._links or name in self._folders:
            raise archive.Refused(f"{member.name[:200]} is there twice")
        if member.kind == "file":
            self._files.add(name)
            self._write(name, member, reader)
        elif member.kind == "symlink":
            self._links[name] = member.link
        else:
            original = "/".join(_parts(member.link, self._strip))
            if original not in self._files:
                raise archive.Refused(f"{member.name[:200]} is a hard link to {member.link[:200]}, which is no earlier file")
            self._files.add(name)
            os.link(self._path(original), self._path(name), follow_symlinks=False)

    def _write(self, name: str, member: archive.Member, reader: archive.Reader) -> None:
        if member.mode & (stat.S_ISUID | stat.S_ISGID):
            raise archive.Refused(f"{member.name[:200]} has the setuid or setgid bit")
        fd = os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            reader.copy(fd)
            os.fchmod(fd, member.mode & 0o777 | 0o600)
        finally:
            os.close(fd)

    def _make_links(self) -> None:
        links = {tuple(name.split("/")): link for name, link in self._links.items()}
        outside = leaving(links)
        if outside is not None:
            raise archive.Refused(f"the link {'/'.join(outside)[:200]} leaves the folder (to {links[outside][:200]})")
        for name, link in self._links.items():
            os.symlink(link, self._path(name))


Links = Mapping[tuple[str, ...], str]
"""The symbolic links of a tree: where each stands, and what it says."""


def leaving(links: Links) -> tuple[str, ...] | None:
    """The first of a tree's links that is not sure to stay inside; `None`: all do. Raises `archive.Refused` where that takes too long to
    find out."""
    steps = _Steps(MAX_LINK_STEPS)
    return next((parts for parts, link in links.items() if not stays_inside(parts, link, links, steps)), None)


@dataclass(slots=True)
class _Steps:
    left: int

    def take(self, count: int) -> None:
        self.left -= count
        if self.left < 0:
            raise archive.Refused("its links take too long to follow")


def stays_inside(parts: tuple[str, ...], link: str, links: Links, steps: _Steps | None = None) -> bool:
    """Whether following the symbolic link `link`, which stands at `parts` of a tree with all those `links`, never leaves the tree, at no
    step and whatever of it exists. `steps` bounds the work; a step costs as much as the path is deep."""
    steps = steps or _Steps(MAX_LINK_STEPS)
    at = list(parts[:-1])
    todo = _steps(link)
    if todo is None:
        return False
    followed = 0
    while todo:
        step = todo.pop()
        steps.take(1 + len(at) // 16)
        if step == "..":
            if not at:
                return False
            at.pop()
            continue
        at.append(step)
        if len(at) > 2 * MAX_DEPTH:
            return False
        further = links.get(tuple(at))
        if further is not None:
            followed += 1
            more = _steps(further)
            if more is None or followed > _MAX_LINKS:
                return False
            at.pop()
            todo += more
            steps.take(len(more))
    return True


def _steps(link: str) -> list[str] | None:
    """A link's parts, the last one first; `None` for an absolute or empty one."""
    if not link or link.startswith("/") or "\0" in link:
        return None
    return [part for part in reversed(link.split("/")) if part not in ("", ".")]


def _parts(name: str, strip: int) -> tuple[str, ...]:
    """A member's checked name, cut. `.file` after the cut, and the top itself, are `()`."""
    if not name or name.startswith("/") or "\0" in name:
        raise archive.Refused(f"the name {name[:200]!r} is empty or absolute")
    parts = tuple(part for part in name.split("/") if part not in ("", "."))
    if ".." in parts:
        raise archive.Refused(f"the name {name[:200]!r} has a '..'")
    parts = parts[strip:]
    return () if parts == (".file",) else parts


def pack(source: Path, stream: BinaryIO, *, prefix: str = "", single: str = ".file") -> None:
    """Writes a file (as the member `single`) or a folder's content as a stream, every name behind `prefix`. Symbolic links stay links; one
    that leaves `source` raises `UnsafePath`, as do devices. Raises `FileNotFoundError`."""
    sink = archive.Sink(stream)
    try:
        if source.is_file():
            _file(sink, source, f"{prefix}{single}")
        elif source.is_dir():
            entries = _walk(source)
            _check_links({one.relative_to(source).parts: os.readlink(one) for one in entries if one.is_symlink()})
            for one in entries:
                _entry(sink, one, f"{prefix}{one.relative_to(source).as_posix()}")
        else:
            raise FileNotFoundError(f"there is no file or folder {source}")
    except archive.Refused as error:
        raise UnsafePath(f"{source}: {error}") from error
    sink.end()


def _walk(source: Path) -> list[Path]:
    """Everything in the folder, parents first; devices are refused before anything is written."""
    found: list[Path] = []
    for top, folders, files in os.walk(source, followlinks=False):
        for name in sorted(folders + files):
            path = Path(top, name)
            mode = path.lstat().st_mode
            if stat.S_ISBLK(mode) or stat.S_ISCHR(mode):
                raise archive.Refused(f"{path.relative_to(source)} is a device")
            if stat.S_ISLNK(mode) or stat.S_ISDIR(mode) or stat.S_ISREG(mode):
                found.append(path)
    return found


def _check_links(links: Links) -> None:
    outside = leaving(links)
    if outside is not None:
        raise archive.Refused(f"the link {'/'.join(outside)} leaves it (to {links[outside]})")


def _entry(sink: archive.Sink, path: Path, name: str) -> None:
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        sink.header(name, tarfile.SYMTYPE, link=os.readlink(path), mode=0o777, mtime=info.st_mtime)
    elif stat.S_ISDIR(info.st_mode):
        sink.header(name, tarfile.DIRTYPE, mode=info.st_mode, mtime=info.st_mtime)
    else:
        _file(sink, path, name)


def _file(sink: archive.Sink, path: Path, name: str) -> None:
    with path.open("rb") as file:
        info = os.fstat(file.fileno())
        sink.header(name, tarfile.REGTYPE, size=info.st_size, mode=info.st_mode, mtime=info.st_mtime)
        sink.content(file.fileno(), info.st_size)


async def in_thread(work: Callable[[], T]) -> T:
    """Runs blocking work in a thread of its own: transfers wait for sandboxes and must not use up the shared pool. Cancelling returns at
    once; the work ends when its stream does."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work()
        except StopIteration as caught:  # no future takes one: this one would never end
            error = RuntimeError("StopIteration")
            error.__cause__ = caught
        except BaseException as caught:
            error = caught
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            return  # the loop is closed: nobody waits

    threading.Thread(target=run, name="polar-transfer", daemon=True).start()
    return await future
