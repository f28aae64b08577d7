"""The pictures in docs/trajectories.md are what the builder makes today, and the page shows all of them."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_pictures_are_current_and_all_shown() -> None:
    drawing = runpy.run_path(str(ROOT / "scripts" / "draw_trajectories.py"))
    drawn = {case.name: drawing["draw"](case) for case in drawing["cases"]()}
    stored = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "trajectories").glob("*.svg")}
    assert drawn == stored, "run: python scripts/draw_trajectories.py"
    shown = re.findall(r"\(trajectories/(\w+)\.svg\)", (ROOT / "docs" / "trajectories.md").read_text(encoding="utf-8"))
    assert sorted(shown) == sorted(drawn)
