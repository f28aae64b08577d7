"""What is in a file or a folder, as one hash: paths, modes, links and bytes; nothing of owners and times."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path


def folder_hash(source: Path) -> str:
    """24 hex digits. Links inside are hashed as links; `source` itself may be one. Blocks. Raises `OSError`."""
    whole = hashlib.sha256()
    source = source.resolve(strict=True)
    for path in [source, *inside(source)]:
        mode = path.lstat().st_mode
        whole.update(f"{path.relative_to(source)}\0{mode:o}\0".encode(errors="surrogateescape"))
        if stat.S_ISLNK(mode):
            whole.update(os.fsencode(os.readlink(path)) + b"\0")
        elif stat.S_ISREG(mode):
            with path.open("rb") as file:
                whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:24]


def inside(folder: Path) -> Iterator[Path]:
    """All files, links and folders below, sorted; links are not followed; sockets, pipes and devices are no content."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode) or stat.S_ISLNK(mode) or stat.S_ISDIR(mode):
            yield path
