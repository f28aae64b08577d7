"""The patch: what changed in the work folder, whatever the agent did to its own repository; applied, it gives the same folder."""

from __future__ import annotations

import asyncio
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from harness_sandboxes import RealCommands, sandbox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.harness import patch as patches
from polar.harness.patch import WorkFolder
from polar.testing.runtime import FakeRuntime

Change = Callable[[Path], None]


def git(folder: Path, *words: str) -> None:
    settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
    subprocess.run(("git", *settings, *words), cwd=folder, check=True, capture_output=True, timeout=30)


def repository(work: Path) -> None:
    (work / "kept.txt").write_text("kept\n")
    (work / "old.txt").write_text("one\ntwo\n")
    (work / "sub").mkdir()
    (work / "sub" / "deep.py").write_text("print(1)\n")
    (work / ".gitignore").write_text("*.log\nbuild/\n")
    git(work, "init", "-q")
    git(work, "add", "-A")
    git(work, "commit", "-qm", "base")


def taken(folder: Path, before: Change, after: Change) -> tuple[bytes | None, list[str]]:
    """The patch between two states of a work folder, and the warnings."""

    async def scenario() -> tuple[bytes | None, list[str]]:
        box: RealCommands = sandbox(folder / "box")
        async with box:
            before(Path(box.workdir))
            work = WorkFolder(box, f"{box.home}/.polar/start.git")
            warning = await work.record()
            after(Path(box.workdir))
            patch, warnings = await work.patch(folder / "patch.diff")
            return patch, ([warning] if warning else []) + warnings

    return asyncio.run(scenario())


def applied(folder: Path, before: Change, patch: bytes) -> Path:
    """A fresh copy of the start state with the patch on it."""
    fresh = folder / "fresh"
    fresh.mkdir()
    before(fresh)
    if patch:
        subprocess.run(("git", "apply", "--whitespace=nowarn", "-"), cwd=fresh, input=patch, check=True, capture_output=True, timeout=30)
    return fresh


def listing(folder: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if ".git" in path.parts:
            continue
        if path.is_symlink():
            found[name] = ("link", os.readlink(path))
        elif path.is_file():
            found[name] = (path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return found


def test_an_untouched_folder_gives_an_empty_patch(tmp_path: Path) -> None:
    assert taken(tmp_path, repository, lambda work: None) == (b"", [])


def test_changed_new_deleted_renamed_binary_link_and_mode_come_back_by_applying_it(tmp_path: Path) -> None:
    def change(work: Path) -> None:
        (work / "old.txt").write_text("one\n2\n")
        (work / "new ü.txt").write_text("new\n")
        (work / "data.bin").write_bytes(bytes(range(256)) * 40)
        (work / "sub" / "deep.py").rename(work / "sub" / "moved.py")
        (work / "kept.txt").chmod(0o755)
        (work / "link").symlink_to("kept.txt")
        (work / "no newline").write_text("end")

    patch, warnings = taken(tmp_path, repository, change)
    assert patch
    assert warnings == []
    wanted = tmp_path / "box" / "wanted"
    wanted.mkdir()
    repository(wanted)
    change(wanted)
    assert listing(applied(tmp_path, repository, patch)) == listing(wanted)


def test_it_does_not_depend_on_the_agents_own_git(tmp_path: Path) -> None:
    def change(work: Path) -> None:
        (work / "old.txt").write_text("changed\n")
        git(work, "add", "-A")
        git(work, "commit", "-qm", "mine")
        subprocess.run(("rm", "-rf", ".git"), cwd=work, check=True)

    patch, warnings = taken(tmp_path, repository, change)
    assert b"+changed" in (patch or b"")
    assert warnings == []


def test_it_is_against_the_state_handed_over_and_not_against_a_commit(tmp_path: Path) -> None:
    def dirty(work: Path) -> None:
        repository(work)
        (work / "old.txt").write_text("dirty before the agent\n")
        (work / "untracked.txt").write_text("there before\n")

    patch, _ = taken(tmp_path, dirty, lambda work: (work / "mine.txt").write_text("x\n") and None)
    assert (patch or b"").count(b"diff --git") == 1


def test_ignored_files_stay_out_unless_the_agent_forced_them_in(tmp_path: Path) -> None:
    def change(work: Path) -> None:
        (work / "noise.log").write_text("noise\n")
        (work / "build").mkdir()
        (work / "build" / "out.txt").write_text("built\n")
        (work / "wanted.log").write_text("forced\n")
        git(work, "add", "-f", "wanted.log")

    patch = taken(tmp_path, repository, change)[0] or b""
    assert b"wanted.log" in patch
    assert b"noise.log" not in patch
    assert b"out.txt" not in patch


def test_a_file_that_was_there_counts_even_if_the_agent_ignores_it_later(tmp_path: Path) -> None:
    def change(work: Path) -> None:
        (work / ".gitignore").write_text("old.txt\n")
        (work / "old.txt").write_text("hidden change\n")

    assert b"+hidden change" in (taken(tmp_path, repository, change)[0] or b"")


def test_a_tracked_file_that_is_ignored_counts_from_the_start(tmp_path: Path) -> None:
    def before(work: Path) -> None:
        repository(work)
        (work / "tracked.log").write_text("a\n")
        git(work, "add", "-f", "tracked.log")

    patch = taken(tmp_path, before, lambda work: (work / "tracked.log").write_text("b\n") and None)[0] or b""
    assert b"-a\n+b\n" in patch


@pytest.mark.parametrize("committed", [True, False])
def test_a_repository_inside_the_folder_is_plain_files(tmp_path: Path, committed: bool) -> None:
    def change(work: Path) -> None:
        inner = work / "vendor" / "inner"
        inner.mkdir(parents=True)
        (inner / "a.txt").write_text("inner file\n")
        git(inner, "init", "-q")
        if committed:
            git(inner, "add", "-A")
            git(inner, "commit", "-qm", "inner")

    patch, warnings = taken(tmp_path, repository, change)
    assert b"vendor/inner/a.txt" in (patch or b"")
    assert warnings == []


def test_a_change_in_a_repository_that_was_inside_from_the_start(tmp_path: Path) -> None:
    def before(work: Path) -> None:
        repository(work)
        (work / "inner").mkdir()
        repository(work / "inner")

    def change(work: Path) -> None:
        (work / "inner" / "old.txt").write_text("changed inside\n")
        (work / "inner" / "more.txt").write_text("new inside\n")

    patch = taken(tmp_path, before, change)[0] or b""
    assert b"+changed inside" in patch
    assert b"+new inside" in patch


def test_a_folder_without_any_repository_works_the_same(tmp_path: Path) -> None:
    patch, warnings = taken(tmp_path, lambda work: None, lambda work: (work / "a.txt").write_text("a\n") and None)
    assert b"+a\n" in (patch or b"")
    assert warnings == []


def test_attributes_of_the_folder_change_no_byte(tmp_path: Path) -> None:
    def before(work: Path) -> None:
        (work / ".gitattributes").write_text("* text=auto eol=crlf\n*.x filter=evil diff=evil -diff\n")

    def change(work: Path) -> None:
        (work / "dos.txt").write_bytes(b"one\r\ntwo\r\n")
        (work / "a.x").write_text("plain\n")

    patch = taken(tmp_path, before, change)[0] or b""
    assert b"+one\r\n+two\r\n" in patch
    assert b"+plain" in patch


def test_huge_files_are_left_out_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "MAX_FILE_BYTES", 1000)

    def change(work: Path) -> None:
        (work / "huge.bin").write_bytes(b"x" * 2000)
        (work / "small.txt").write_text("small\n")

    def before(work: Path) -> None:
        (work / "was-huge.bin").write_bytes(b"x" * 2000)

    patch, warnings = taken(tmp_path, before, change)
    assert b"small.txt" in (patch or b"")
    assert b"huge.bin" not in (patch or b"")
    assert warnings == ["left out of the patch, each larger than 1000 bytes: huge.bin"]


def test_something_that_git_refuses_costs_only_itself(tmp_path: Path) -> None:
    def change(work: Path) -> None:
        (work / "old.txt").unlink()
        os.mkfifo(work / "old.txt")
        (work / "new.txt").write_text("new\n")

    patch, warnings = taken(tmp_path, repository, change)
    assert b"+new" in (patch or b"")
    assert len(warnings) == 1


def test_a_start_state_that_the_agent_removed_is_told(tmp_path: Path) -> None:
    patch, warnings = taken(
        tmp_path, repository, lambda work: subprocess.run(("rm", "-rf", "../home/.polar"), cwd=work, check=True) and None
    )
    assert patch is None
    assert "no patch" in warnings[0]


def test_without_git_there_is_a_warning_and_no_patch(tmp_path: Path) -> None:
    class NoGit(RealCommands):
        async def exec(self, command: object, **more: object) -> object:  # type: ignore[override]
            return await FakeRuntime.exec(self, ["git"], timeout_s=1)

        @staticmethod
        def script(command: object) -> int:  # type: ignore[override]
            return 127

    box = sandbox(tmp_path / "box")
    box.__class__ = NoGit

    async def scenario() -> str | None:
        async with box:
            return await WorkFolder(box, f"{box.home}/g").record()

    assert "no git" in (asyncio.run(scenario()) or "")


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=("Cs",)), min_size=1, max_size=8).filter(
    lambda name: (
        name not in (".", "..") and name.lower() not in (".git", ".gitignore", ".gitattributes", ".gitmodules") and len(name.encode()) < 200
    )
)
TREES = st.dictionaries(NAMES, st.binary(max_size=60), max_size=5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TREES, TREES)
def test_start_state_and_patch_give_the_end_state_for_any_files(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    def write(work: Path, tree: dict[str, bytes]) -> None:
        for path in list(work.iterdir()):
            if path.name != ".git":
                path.unlink()
        for name, content in tree.items():
            (work / name).write_bytes(content)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        patch, warnings = taken(folder, lambda work: write(work, before), lambda work: write(work, after))
        assert warnings == []
        assert patch is not None
        fresh = applied(folder, lambda work: write(work, before), patch)
        assert {path.name: path.read_bytes() for path in fresh.iterdir()} == after
