"""Where Polar keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`POLAR_CACHE`, else `polar` in `XDG_CACHE_HOME`, else `~/.cache/polar`. A relative `XDG_CACHE_HOME` is not looked at, as its
    specification has it (XDG Base Directory, 0.8)."""
    if configured := os.environ.get("POLAR_CACHE"):
        return Path(configured).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "polar"
