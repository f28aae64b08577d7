"""Files as a tar stream, packed and unpacked without trusting either side.

Used twice: by the keeper inside a sandbox, with the rights of the program there, and by Polar outside, for streams that came from inside.
`members` reads only what this needs of the format (regular files, folders, symbolic and hard links, long names) and refuses the rest.
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

BLOCK = 512
CHUNK = 1 << 18
MOST = 1_000_000
"""Entries of one folder."""
_MAX_EXTENSION = 1 << 16
"""Bytes of a header extension (long names): a path has 4,096 at most."""


class Refused(Exception):
    """The stream or the folder holds what may not be copied."""


class Sink:
    """What `pack` writes to."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def header(self, name: str, kind: bytes, size: int = 0, mode: int = 0o644, link: str = "", mtime: float = 0.0) -> None:
        info = tarfile.TarInfo(name)
        info.type, info.size, info.mode, info.linkname, info.mtime = kind, size, mode & 0o777, link, int(mtime)
        self._stream.write(info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape"))

    def content(self, fd: int, size: int) -> None:
        """Exactly `size` bytes and the padding: a file that grows or shrinks meanwhile is cut or filled with zeros."""
        left = size
        while left:
            data = os.read(fd, min(CHUNK, left))
            if not data:
                break
            self._stream.write(data)
            left -= len(data)
        while left:
            zeros = min(CHUNK, left)
            self._stream.write(bytes(zeros))
            left -= zeros
        self._stream.write(bytes(-size % BLOCK))

    def end(self) -> None:
        self._stream.write(bytes(2 * BLOCK))
        self._stream.flush()


def pack(source: str, stream: BinaryIO) -> None:
    """Writes a file (as the single member `.file`) or a folder's content. Follows no link. Sockets and pipes are left out: they mean
    nothing elsewhere. Raises `FileNotFoundError`, and `Refused` for devices and for what cannot be read."""
    sink = Sink(stream)
    top = os.lstat(source)
    if stat.S_ISREG(top.st_mode):
        _pack_file(sink, source, ".file")
    elif stat.S_ISDIR(top.st_mode):
        _pack_folder(sink, source)
    else:
        raise Refused(f"{source} is neither a file nor a folder")
    sink.end()


def _pack_folder(sink: Sink, source: str) -> None:
    todo = [""]
    while todo:
        inner = todo.pop()
        folder = os.path.join(source, inner) if inner else source
        for entry in _entries(folder):
            name = f"{inner}/{entry.name}" if inner else entry.name
            try:
                info = entry.stat(follow_symlinks=False)
                link = os.readlink(entry.path) if stat.S_ISLNK(info.st_mode) else ""
            except FileNotFoundError:
                continue  # gone meanwhile
            except OSError as error:  # a path that is too long for the kernel
                raise Refused(f"{name[-200:]}: {error.strerror}") from error
            if stat.S_ISLNK(info.st_mode):
                sink.header(name, tarfile.SYMTYPE, link=link, mode=0o777, mtime=info.st_mtime)
            elif stat.S_ISDIR(info.st_mode):
                sink.header(name, tarfile.DIRTYPE, mode=stat.S_IMODE(info.st_mode) | 0o700, mtime=info.st_mtime)
                todo.append(name)
            elif stat.S_ISREG(info.st_mode):
                _pack_file(sink, entry.path, name)
            elif stat.S_ISBLK(info.st_mode) or stat.S_ISCHR(info.st_mode):
                raise Refused(f"{name} is a device")


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        if os.path.islink(folder):
            raise Refused(f"{folder} became a link meanwhile")
        with os.scandir(folder) as entries:
            return _sorted(entries)
    except PermissionError:
        return _with_rights(folder, 0o700)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise Refused(f"{folder[:200]}: {error.strerror}") from error


def _sorted(entries: Iterable[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    found = sorted(itertools.islice(entries, MOST + 1), key=lambda entry: entry.name)
    if len(found) > MOST:
        raise Refused(f"a folder with more than {MOST:,} entries")
    return found


def _with_rights(folder: str, mode: int) -> list[os.DirEntry[str]]:
    try:
        os.chmod(folder, mode)
        with os.scandir(folder) as entries:
            return _sorted(entries)
    except OSError as error:
        raise Refused(f"{folder[:200]}: {error.strerror}") from error


def _pack_file(sink: Sink, path: str, name: str) -> None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            fd = os.open(path, flags)
        except PermissionError:
            os.chmod(path, 0o600)
            fd = os.open(path, flags)
    except OSError as error:
        raise Refused(f"{name[:200]}: {error.strerror}") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise Refused(f"{name} became something else meanwhile")
        if info.st_mode & (stat.S_ISUID | stat.S_ISGID):
            raise Refused(f"{name} has the setuid or setgid bit")
        sink.header(name, tarfile.REGTYPE, size=info.st_size, mode=info.st_mode, mtime=info.st_mtime)
        sink.content(fd, info.st_size)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of a stream. `name` is as written there; `content` follows in the stream for files (read it with `copy`)."""

    name: str
    kind: str
    """`file`, `folder`, `symlink` or `hardlink`."""
    size: int
    mode: int
    link: str


class Reader:
    """The members of a tar stream, in order; the content of each is read, or skipped, before the next."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._left = 0
        self._padding = 0

    def _exactly(self, size: int) -> bytes:
        data = self._stream.read(size)
        if len(data) != size:
            raise Refused("the archive ends in the middle")
        return data

    def copy(self, fd: int | None) -> None:
        """Writes the present member's content to `fd`, or skips it."""
        while self._left:
            data = self._exactly(min(CHUNK, self._left))
            self._left -= len(data)
            if fd is not None:
                view = memoryview(data)
                while view:
                    view = view[os.write(fd, view) :]
        self._exactly(self._padding)
        self._padding = 0

    def members(self) -> Iterator[Member]:
        """Raises `Refused` for anything but files, folders and links, for sparse files and for a damaged stream."""
        long: dict[str, str] = {}
        while True:
            self.copy(None)
            block = self._exactly(BLOCK)
            if not block.strip(b"\0"):
                return
            try:
                info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError as error:
                raise Refused(f"damaged archive: {error}") from error
            if info.size < 0:
                raise Refused("damaged archive: a negative size")
            if info.type in (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                long.update(self._extension(info))
                continue
            if "size" in long:
                info.size = int(long["size"])
            name, link = long.get("path", info.name), long.get("linkpath", info.linkname)
            if any(key.startswith("GNU.sparse") for key in long):
                raise Refused(f"{name} is a sparse file")
            long = {}
            yield self._member(info, name, link)

    def _member(self, info: tarfile.TarInfo, name: str, link: str) -> Member:
        if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            if name.endswith("/"):
                return Member(name.rstrip("/"), "folder", 0, info.mode, "")
            self._left, self._padding = info.size, -info.size % BLOCK
            return Member(name, "file", info.size, info.mode, "")
        self._left, self._padding = 0, 0
        if info.type == tarfile.DIRTYPE:
            return Member(name.rstrip("/") or ".", "folder", 0, info.mode, "")
        if info.type == tarfile.SYMTYPE:
            return Member(name, "symlink", 0, info.mode, link)
        if info.type == tarfile.LNKTYPE:
            return Member(name, "hardlink", 0, info.mode, link)
        what = {
            tarfile.CHRTYPE: "a device",
            tarfile.BLKTYPE: "a device",
            tarfile.FIFOTYPE: "a pipe",
            tarfile.GNUTYPE_SPARSE: "a sparse file",
        }
        raise Refused(f"{name} is {what.get(info.type, f'of the unknown type {info.type!r}')}")

    def _extension(self, info: tarfile.TarInfo) -> dict[str, str]:
        if info.size > _MAX_EXTENSION:
            raise Refused("damaged archive: a header of more than 64 KiB")
        data = self._exactly(info.size)
        self._exactly(-info.size % BLOCK)
        if info.type == tarfile.GNUTYPE_LONGNAME:
            return {"path": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        if info.type == tarfile.GNUTYPE_LONGLINK:
            return {"linkpath": data.rstrip(b"\0").decode("utf-8", "surrogateescape")}
        return {} if info.type == tarfile.XGLTYPE else _records(data)


def _records(data: bytes) -> dict[str, str]:
    """A pax header's records: `<length> <key>=<value>\\n`."""
    records: dict[str, str] = {}
    while data.strip(b"\0"):
        length, space, _ = data.partition(b" ")
        if not space or not length.isdigit() or not 0 < int(length) <= len(data):
            raise Refused("damaged archive: a broken header extension")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        records[key.decode("utf-8", "surrogateescape")] = value.decode("utf-8", "surrogateescape")
        data = data[int(length) :]
    if not records.get("size", "0").isdigit():
        raise Refused("damaged archive: a broken size")
    return records


def unpack_inside(target: str, stream: BinaryIO) -> None:
    """Writes a stream that Polar made to `target`, with the rights of the program that works here: what it may not write, this may not."""
    reader = Reader(stream)
    for member in reader.members():
        path = target if member.name == ".file" else os.path.join(target, member.name)
        if member.kind == "folder":
            _folder(path, member.mode)
            continue
        _folder(os.path.dirname(path) or "/", None)
        if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
            os.unlink(path)
        if member.kind == "symlink":
            os.symlink(member.link, path)
            continue
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            reader.copy(fd)
            os.fchmod(fd, member.mode & 0o777)
        finally:
            os.close(fd)


def _folder(path: str, mode: int | None) -> None:
    os.makedirs(path, exist_ok=True)
    if mode is not None:
        try:
            os.chmod(path, mode & 0o777)
        except PermissionError:
            pass  # someone else's folder that was there before: it keeps its rights
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
