"""`polar ps` and `polar gc` over what is really there."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from polar.errors import SandboxError
from polar.runtime import Owner, reaper
from polar.runtime.owner import remove_tree, root_mark

Polar = Callable[..., Any]


def test_a_process_is_listed_whatever_its_arguments_say(polar: Polar, tmp_path: Path) -> None:
    """A sandbox's processes are called as agents like, as a closing tag of rich's markup too."""
    owner = Owner.open(tmp_path / "root")
    environment = {**os.environ, "POLAR_OWNER": owner.id, "POLAR_SANDBOX": "box"}
    command = ["/bin/sh", "-c", "read line # [/red] [bold]x"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) as hostile:
        try:
            assert "[/red] [bold]x" in polar("ps", "--root", tmp_path / "root").stdout
        finally:
            hostile.kill()
    owner.close()


def test_what_resists_below_one_root_keeps_no_other_from_being_cleaned(
    polar: Polar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [tmp_path / "first", tmp_path / "second"]
    left = []
    for root in roots:
        folder = root / f"{root_mark(root)}-0123abcd" / "box"
        folder.mkdir(parents=True)
        left.append(folder)

    def stubborn(folder: Path) -> None:
        if folder.is_relative_to(roots[0]):
            raise PermissionError(13, "Permission denied")
        remove_tree(folder)

    monkeypatch.setattr(reaper, "remove_tree", stubborn)
    with pytest.raises(SandboxError, match=rf"{roots[0]}: .*Permission denied"):
        polar("gc", "--root", roots[0], "--root", roots[1])
    assert [folder.exists() for folder in left] == [True, False]
    monkeypatch.undo()
    removed = orjson.loads(polar("gc", "--root", roots[0], "--root", roots[1], "--json").stdout)
    assert str(left[0]) in [one["name"] for one in removed]
