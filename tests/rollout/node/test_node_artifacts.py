"""Artefacts: no key in any of them, no way out of their folder, kept as long and as large as configured."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.gateway.sessions import KEY_PREFIX
from polar.rollout.node import artifacts as module
from polar.rollout.node.artifacts import Artifacts

KEY = (KEY_PREFIX + "Ab_-9" * 8 + "xyz").encode()


@given(before=st.integers(0, 700), between=st.integers(0, 700), after=st.integers(0, 300), times=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_key_is_taken_out_wherever_it_lies(
    tmp_path_factory: pytest.TempPathFactory, before: int, between: int, after: int, times: int
) -> None:
    folder = tmp_path_factory.mktemp("scrub")
    file = folder / "log"
    file.write_bytes(b"." * before + (KEY + b" " * (between + 1)) * times + b"." * after)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", 300)
        Artifacts(folder.parent).scrub(folder)
    text = file.read_bytes()
    assert KEY_PREFIX.encode() + b"Ab" not in text
    assert text.count(module.SCRUBBED) == times
    assert text.replace(module.SCRUBBED, b"").count(b".") == before + after


def test_a_file_without_a_key_is_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"plain")
    inode = file.stat().st_ino
    Artifacts(tmp_path).scrub(tmp_path)
    assert file.stat().st_ino == inode


def test_scrubbing_never_follows_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(KEY)
    folder = tmp_path / "s" / "0"
    folder.mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    Artifacts(tmp_path).scrub(folder)
    assert outside.read_bytes() == KEY


@pytest.mark.parametrize(
    "path",
    ["../1/log", "..", ".", "", "/etc/passwd", "a/../../1/log", "link", "linked/secret", "folder", "pipe", "none", "a\0b", "folder//x"],
)
def test_only_regular_files_of_the_attempt_are_opened(tmp_path: Path, path: str) -> None:
    (tmp_path / "s" / "1").mkdir(parents=True)
    (tmp_path / "s" / "1" / "log").write_text("other attempt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "secret").write_text("secret")
    folder = tmp_path / "s" / "0"
    (folder / "folder").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "out" / "secret")
    (folder / "linked").symlink_to(tmp_path / "out")
    os.mkfifo(folder / "pipe")
    with pytest.raises(FileNotFoundError):
        Artifacts(tmp_path).open("s", 0, path)


def test_files_are_listed_and_opened(tmp_path: Path) -> None:
    store = Artifacts(tmp_path)
    folder = store.make("s", 2)
    (folder / "transcript").mkdir()
    (folder / "transcript" / "a.jsonl").write_text("{}")
    (folder / "link").symlink_to("/etc/passwd")
    assert [(one.path, one.size) for one in store.files("s", 2)] == [("transcript/a.jsonl", 2)]
    descriptor = store.open("s", 2, "transcript/a.jsonl")
    assert os.read(descriptor, 10) == b"{}"
    os.close(descriptor)
    assert store.latest("s") == 2
    assert store.latest("unknown") is None


def test_the_old_and_the_too_many_go_first(tmp_path: Path) -> None:
    store = Artifacts(tmp_path)
    now = time.time()
    for number, age_days in enumerate([40, 3, 2, 1]):
        folder = store.make("s", number)
        (folder / "log").write_bytes(b"x" * 400)
        os.utime(folder, (now - age_days * 86_400,) * 2)
    assert store.expire(days=30, gigabytes=900e-9, keep=[store.folder("s", 1)]) == 1
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == ["1", "2", "3"]
    assert store.expire(days=30, gigabytes=500e-9) == 2
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["3"]
    assert store.expire(days=0.5, gigabytes=1) == 1
    assert not (tmp_path / "s").exists()
