"""Files of results that are forgotten."""

from __future__ import annotations

from pathlib import Path

from polar.rollout.saving import remove_files


def test_a_file_that_resists_keeps_no_other_and_not_the_database(tmp_path: Path) -> None:
    """Somebody may have put something else in its place; what was to be forgotten would be kept for ever."""
    kept, gone = tmp_path / "task_a", tmp_path / "task_b"
    for folder in (kept, gone):
        folder.mkdir()
        (folder / "ses_2.json").write_text("{}")
    (kept / "ses_1.json").mkdir()
    (kept / "ses_1.json" / "mine").write_text("somebody's")
    remove_files([str(folder / name) for folder in (kept, gone) for name in ("ses_1.json", "ses_2.json")])
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["task_a", "ses_1.json", "mine"]
