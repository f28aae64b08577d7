"""The private home folder of a harness: what will be in it, before it exists anywhere.

Pure: presets fill one, and whoever runs the harness puts its files on this machine's disk or into a sandbox. Invariant: every file lies
below the home, and is readable by its owner only, since it may hold a key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

MODE = 0o600


class Home:
    """`path` is where the home will be, as the harness sees it. `write` returns a file's own path there."""

    def __init__(self, path: str | PurePosixPath | Path) -> None:
        self.path = PurePosixPath(path)
        self._files: dict[PurePosixPath, bytes] = {}

    @property
    def files(self) -> Mapping[PurePosixPath, bytes]:
        """What was written, by path relative to the home."""
        return self._files

    def write(self, relative: str, text: str) -> PurePosixPath:
        """Puts a file there, in place of one of that name. Raises `ValueError` for a path that is not below the home."""
        name = PurePosixPath(relative)
        if name.is_absolute() or ".." in name.parts or not name.parts:
            raise ValueError(f"{relative!r} is not a path below the home")
        self._files[name] = text.encode()
        return self.path / name

    def write_json(self, relative: str, value: object) -> PurePosixPath:
        return self.write(relative, json.dumps(value, indent=2))

    def save(self, folder: Path) -> None:
        """Writes all files below `folder` on this machine; folders are made."""
        for name, content in self._files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, MODE)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
            path.chmod(MODE)
