"""Where Polar keeps its data, and what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def state_dir() -> Path:
    """The data: `POLAR_HOME`, else `polar` in `XDG_DATA_HOME`, else `~/.local/share/polar`."""
    return _folder("POLAR_HOME", "XDG_DATA_HOME", ".local/share")


def cache_dir() -> Path:
    """What can be made again: `POLAR_CACHE`, else `polar` in `XDG_CACHE_HOME`, else `~/.cache/polar`."""
    return _folder("POLAR_CACHE", "XDG_CACHE_HOME", ".cache")


def _folder(own: str, shared: str, usual: str) -> Path:
    """A relative path in `shared` is not looked at, as its specification has it (XDG Base Directory, 0.8)."""
    if configured := os.environ.get(own):
        return Path(configured).expanduser()
    base = Path(os.environ.get(shared, ""))
    return (base if base.is_absolute() else Path.home() / usual) / "polar"
