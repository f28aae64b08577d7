"""Which folders of this user have held sandboxes: what `polar ps` and `polar gc` look through.

One small file a root in the state directory, made when a node starts there. Knows nothing of sandboxes.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from polar.folders import state_dir
from polar.runtime.owner import root_mark


def remember(root: Path) -> None:
    """Notes that sandboxes live below `root`."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    root = root.absolute().resolve()
    temporary = folder / f".{root_mark(root)}.{os.getpid()}"
    temporary.write_bytes(os.fsencode(root))
    temporary.replace(folder / root_mark(root))


def known() -> list[Path]:
    """All roots noted, in order of name; one whose folder is gone too, since a container of it may still be there."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for file in sorted(_folder().iterdir()):
            if not file.name.startswith("."):
                found.append(Path(os.fsdecode(file.read_bytes())))
    return found


def forget(root: Path) -> None:
    """Takes a note back, once nothing of that root is left."""
    (_folder() / root_mark(root)).unlink(missing_ok=True)


def _folder() -> Path:
    return state_dir() / "roots"
