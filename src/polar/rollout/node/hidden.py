"""What no sandbox that sees this machine's file system may see of it: stores, states, artefacts, the tests of bundled tasks."""

from __future__ import annotations

import sys
from pathlib import Path

from polar.folders import state_dir
from polar.rollout.config import NodeConfig
from polar.store.connect import sqlite_path

BUNDLED_TASKS = tuple(sorted((Path(__file__).parents[2] / "tasks").glob("bundled*")))
"""With their tests and solutions."""


def hidden_places(config: NodeConfig, store_url: str) -> tuple[Path, ...]:
    """Folders, absolute. The store's own folder is among them unless it is also the home of the user or of this Python."""
    folders = [state_dir(), config.work_path, config.artifacts_path]
    if "://" not in store_url or store_url.startswith("sqlite:"):
        folder = sqlite_path(store_url).parent
        if not any(place.resolve().is_relative_to(folder.resolve()) for place in (Path.home(), Path(sys.base_prefix), Path(sys.prefix))):
            folders.append(folder)
    return tuple(dict.fromkeys(folder.absolute().resolve() for folder in (*folders, *BUNDLED_TASKS)))
