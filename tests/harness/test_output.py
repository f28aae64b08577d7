"""What a harness prints: in files, as it comes, without the key, however it is cut."""

from __future__ import annotations

import tempfile
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.harness.home import Home
from polar.harness.output import Log, mask_files

SECRET = "abcab"


@given(st.lists(st.text("abc-", max_size=8), max_size=8))
def test_a_log_holds_everything_but_the_key_whatever_the_pieces(pieces: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Log(Path(folder) / "log", SECRET)
        heard = b"".join(log.write(piece.encode()) for piece in pieces) + log.close()
        content = log.path.read_bytes()
    whole = "".join(pieces).encode()
    assert content == heard
    assert SECRET.encode() not in content
    assert len(content) == len(whole)
    assert all(seen in (there, ord("*")) for seen, there in zip(content, whole, strict=True))


def test_an_end_that_cannot_begin_the_key_is_not_held_back(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", SECRET)
    assert log.write(b"hello\n") == b"hello\n"
    log.close()


def test_a_log_is_cut_at_its_limit_and_says_so(tmp_path: Path) -> None:
    log = Log(tmp_path / "log", SECRET, max_bytes=10)
    log.write(b"x" * 25)
    log.close()
    assert log.cut
    assert log.path.read_text() == "x" * 10 + "\n[polar: of this stream the first 10 bytes are kept]\n"


def test_files_are_masked_at_the_same_length_and_links_left_alone(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text(SECRET)
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "db").write_bytes(b"\0" + SECRET.encode() + b"\0")
    (inside / "link").symlink_to(tmp_path / "outside")
    mask_files(inside, SECRET)
    assert (inside / "db").read_bytes() == b"\0*****\0"
    assert (tmp_path / "outside").read_text() == SECRET


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "a/../../x", ""])
def test_a_home_takes_no_path_outside_itself(name: str) -> None:
    with pytest.raises(ValueError, match="below the home"):
        Home("/home/agent").write(name, "x")


def test_a_home_says_where_a_file_will_be() -> None:
    assert Home("/home/agent").write(".x/y.json", "{}") == PurePosixPath("/home/agent/.x/y.json")
