"""Small Harbor folders, made for one test each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from task_folders import MakeTask

PASS_IF_DONE = """#!/bin/sh
mkdir -p "$VERIFIER_LOGS"
if [ -f done.txt ]; then echo 1; else echo 0; fi > "$VERIFIER_LOGS/reward.txt"
"""


@pytest.fixture
def make_task(tmp_path: Path) -> MakeTask:
    """Writes a task folder that is solved by making `done.txt`; `files` replaces or adds files, `None` leaves one out."""

    def make(name: str = "sample", files: Mapping[str, str | None] | None = None) -> Path:
        folder = tmp_path / "tasks" / name
        texts: dict[str, str | None] = {
            "task.toml": "[agent]\ntimeout_sec = 60.0\n[verifier]\ntimeout_sec = 30.0\n",
            "instruction.md": "Make the file done.txt.\n",
            "tests/test.sh": PASS_IF_DONE,
            "solution/solve.sh": "touch done.txt\n",
            **(files or {}),
        }
        for path, text in texts.items():
            if text is not None:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)
        return folder

    return make
