"""What a harness prints, written to files as it comes, without the session's key. Knows no sandbox."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from polar.runtime.base import Stream

MAX_BYTES = 64_000_000
"""Of each stream. What comes beyond is not kept, and the file says so at its end."""

BUFFER_BYTES = 512
"""Every write is flushed; the default buffers would be a fifth of the memory that an open session holds."""


def mask(data: bytes, secret: bytes) -> bytes:
    """`data` with the secret made unreadable, and as long as it was, so that no file's structure changes."""
    return data.replace(secret, b"*" * len(secret)) if secret else data


def mask_files(folder: Path, secret: str) -> None:
    """Masks the secret in every file below `folder`, in place and without reading a file as a whole. Links are not followed."""
    wanted = secret.encode()
    for path in list(_files(folder)):
        if wanted and path.stat().st_size:
            with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
                at = content.find(wanted)
                while at >= 0:
                    content[at : at + len(wanted)] = b"*" * len(wanted)
                    at = content.find(wanted, at + len(wanted))


def _files(folder: Path) -> Iterator[Path]:
    if folder.is_symlink():
        return
    if folder.is_file():
        yield folder
    elif folder.is_dir():
        for inner in folder.iterdir():
            yield from _files(inner)


class Log:
    """One stream's file. A secret that comes in two pieces is masked, too: an end that may begin one is held back until it is known."""

    def __init__(self, path: Path, secret: str, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self.cut = False
        self._secret = secret.encode()
        self._held = b""
        self._room = max_bytes
        self._max = max_bytes
        self._file: BinaryIO = path.open("wb", buffering=BUFFER_BYTES)
        path.chmod(0o600)

    def write(self, data: bytes) -> bytes:
        """Writes what is sure by now, and returns it."""
        data = mask(self._held + data, self._secret)
        keep = next((n for n in range(min(len(self._secret) - 1, len(data)), 0, -1) if self._secret.startswith(data[-n:])), 0)
        sure, self._held = (data[:-keep], data[-keep:]) if keep else (data, b"")
        self._put(sure)
        return sure

    def close(self) -> bytes:
        """Writes what was held back, and returns it."""
        rest, self._held = self._held, b""
        self._put(rest)
        if self.cut:
            self._file.write(f"\n[polar: of this stream the first {self._max} bytes are kept]\n".encode())
        self._file.close()
        return rest

    def _put(self, data: bytes) -> None:
        taken = data[: self._room]
        self._room -= len(taken)
        self.cut = self.cut or len(taken) < len(data)
        self._file.write(taken)
        self._file.flush()


class Output:
    """Both streams of a run, in `folder`: `harness.stdout` and `harness.stderr`."""

    def __init__(self, folder: Path, secret: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.logs: dict[Stream, Log] = {name: Log(folder / f"harness.{name}", secret) for name in ("stdout", "stderr")}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for log in self.logs.values():
            log.close()
