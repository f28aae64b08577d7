"""The environment that every harness starts in, wherever it runs: made from nothing, all of it below its home. Knows no preset."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def clean(home: Path | PurePosixPath, path: Sequence[str], system_path: str) -> dict[str, str]:
    """`path` are the folders of the harness and of its Node.js; they come before `system_path`."""
    return {
        "HOME": str(home),
        "PATH": ":".join((*path, system_path)),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "NO_COLOR": "1",
        "NO_PROXY": "127.0.0.1,localhost",
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".local" / "share"),
        "XDG_STATE_HOME": str(home / ".local" / "state"),
        "XDG_CACHE_HOME": str(home / ".cache"),
        "DO_NOT_TRACK": "1",
    }
