"""Patches as hostile input."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from evaluator_lab import Lab, git, work
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.evaluator.budget import Budget
from polar.evaluator.patches import apply, filtered, sections, touched, unsafe
from polar.harness.patch import WorkFolder

NAMES = st.lists(
    st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=8).filter(lambda name: name not in (".", "..")),
    min_size=1,
    max_size=3,
).map("/".join)
CONTENT = st.binary(max_size=60) | st.text(alphabet="ab+- @\n\r\\", max_size=60).map(str.encode)


def written(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError:  # a file where another name needs a folder
            continue


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(NAMES, CONTENT, max_size=4), st.dictionaries(NAMES, CONTENT, min_size=1, max_size=4))
def test_any_patch_of_gits_is_cut_into_its_files_and_is_their_sum(before: dict[str, bytes], after: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        git(folder, "init", "-q")
        written(folder, before)
        git(folder, "add", "-A", "-f")
        git(folder, "commit", "-q", "--allow-empty", "-m", "base")
        for name in before:
            if (folder / name).is_file():
                (folder / name).unlink()
        written(folder, after)
        git(folder, "add", "-A", "-f")
        patch = _raw(folder, "diff", "--cached", "--binary", "--no-renames", "HEAD")
        names = _raw(folder, "diff", "--cached", "--name-only", "-z", "--no-renames", "HEAD").split(b"\0")[:-1]
    assert sorted(touched(patch)) == sorted(name.decode() for name in names)
    assert b"".join(section.text for section in sections(patch)) == patch
    for name in touched(patch):
        kept, gone = filtered(patch, lambda path, name=name: path == name)
        assert name in gone
        assert name not in touched(kept)


def _raw(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=folder, check=True, capture_output=True, timeout=60).stdout


@given(st.binary(max_size=300))
def test_no_bytes_make_it_fail(patch: bytes) -> None:
    sections(b"diff --git a/x b/x\n" + patch)
    filtered(patch, lambda path: True)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ".git/hooks/x", "a/.GIT/config", "", "."])
def test_paths_that_leave_the_folder_or_reach_into_git_are_unsafe(path: str) -> None:
    assert unsafe(path)


@pytest.mark.parametrize("path", ["a", "a/b", ".gitignore", ".github/x", "a..b"])
def test_other_paths_are_not(path: str) -> None:
    assert not unsafe(path)


def test_renames_are_dropped_by_either_name() -> None:
    patch = b"diff --git a/tests/a.py b/b.py\nsimilarity index 100%\nrename from tests/a.py\nrename to b.py\n"
    assert touched(patch) == ("tests/a.py", "b.py")
    assert filtered(patch, lambda path: path.startswith("tests/"))[0] == b""


def test_a_header_within_a_hunk_is_content() -> None:
    patch = b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1 +1,2 @@\n-old\n+diff --git a/y b/y\n+++ b/z\n"
    assert touched(patch) == ("x",)


def test_a_link_above_a_protected_file_is_dropped() -> None:
    patch = b"diff --git a/tests b/tests\nnew file mode 120000\n--- /dev/null\n+++ b/tests\n@@ -0,0 +1 @@\n+evil\n"
    assert filtered(patch, lambda path: False, keep_clear=["tests/test_a.py"]) == (b"", ("tests",))
    assert filtered(patch, lambda path: False)[0] == patch


ATTRIBUTED = """
git init -q .; git config user.email t@example.com; git config user.name t; git config filter.shout.smudge 'tr a-z A-Z'
printf '*.txt text eol=crlf\n*.c ident\n*.md filter=shout\n' > .gitattributes
printf 'one\ntwo\n' > a.txt; printf '$Id$\n' > k.c; printf 'low\n' > r.md
git add -A; git commit -qm start
"""
CHANGED = r"printf 'three\n' >> a.txt; printf 'int x;\n' >> k.c; printf 'more\n' >> r.md; printf 'new\n' > b.txt"


async def test_what_was_recorded_byte_for_byte_is_applied_so(lab: Lab) -> None:
    async with lab.sandbox() as agent, lab.sandbox() as fresh:
        for runtime in (agent, fresh):
            await work(runtime, ATTRIBUTED)
        folder = WorkFolder(agent, f"{agent.home}/start.git")
        assert await folder.record() is None
        await work(agent, CHANGED)
        patch, warnings = await folder.patch(lab.root / "patch.diff")
        assert patch is not None
        assert not warnings
        assert (await apply(fresh, patch, fresh.workdir, budget=Budget(60))).ok
        for name in ("a.txt", "b.txt", "k.c", "r.md"):
            assert await fresh.read(name) == await agent.read(name)


async def test_a_patch_with_line_ends_as_committed_fits_a_checkout_with_others(lab: Lab) -> None:
    patch = b"diff --git a/a.txt b/a.txt\n--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,3 @@\n one\n two\n+three\n"
    async with lab.sandbox() as fresh:
        await work(fresh, f"{ATTRIBUTED}rm a.txt; git checkout -q a.txt")
        assert await fresh.read("a.txt") == b"one\r\ntwo\r\n"
        assert (await apply(fresh, patch, fresh.workdir, budget=Budget(60))).ok
        assert await fresh.read("a.txt") == b"one\r\ntwo\r\nthree\r\n"
