"""Tar streams that are trusted in neither direction."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.errors import UnsafePath
from polar.runtime import transfer


def packed(source: Path) -> io.BytesIO:
    stream = io.BytesIO()
    transfer.pack(source, stream)
    stream.seek(0)
    return stream


def stream_of(*members: tuple[str, bytes, dict[str, object]], form: int = tarfile.PAX_FORMAT) -> io.BytesIO:
    """A stream of (name, content, attributes of TarInfo)."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=form) as tar:
        for name, content, attributes in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in attributes.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(content))
    stream.seek(0)
    return stream


def tree(folder: Path) -> dict[str, tuple[str, object]]:
    """All that is in a folder."""
    found: dict[str, tuple[str, object]] = {}
    for one in folder.rglob("*"):
        name = str(one.relative_to(folder))
        if one.is_symlink():
            found[name] = ("link", os.readlink(one))
        elif one.is_dir():
            found[name] = ("folder", None)
        else:
            found[name] = ("file", (one.read_bytes(), stat.S_IMODE(one.stat().st_mode)))
    return found


NAMES = st.text(alphabet=st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=60).filter(
    lambda name: name not in (".", "..", ".file") and len(name.encode()) < 250
)


@given(
    files=st.dictionaries(
        st.lists(NAMES, min_size=1, max_size=4).map(tuple),
        st.tuples(st.binary(max_size=2000), st.sampled_from([0o644, 0o755, 0o600])),
        max_size=8,
    ),
    folders=st.lists(st.lists(NAMES, min_size=1, max_size=4).map(tuple), max_size=4),
)
@settings(deadline=None, max_examples=60)
def test_what_is_packed_is_what_comes_out(files: dict[tuple[str, ...], tuple[bytes, int]], folders: list[tuple[str, ...]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        source = Path(place, "source")
        source.mkdir()
        for parts in folders:
            source.joinpath(*parts).mkdir(parents=True, exist_ok=True)
        for parts, (content, mode) in files.items():
            path = source.joinpath(*parts)
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                path.chmod(mode)
            except OSError:
                continue  # a file where another name needs a folder
        transfer.extract(packed(source), Path(place, "target"))
        assert tree(Path(place, "target")) == tree(source)


@given(
    links=st.dictionaries(
        st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple),
        st.lists(st.sampled_from(["a", "b", "c", "..", "."]), min_size=1, max_size=5).map("/".join),
        max_size=5,
    ),
    folders=st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(tuple), max_size=5),
)
@settings(deadline=None, max_examples=300)
def test_a_link_that_is_let_through_stays_inside(links: dict[tuple[str, ...], str], folders: list[tuple[str, ...]]) -> None:
    """The check, which reads names only, against the kernel, which follows."""
    with tempfile.TemporaryDirectory() as place:
        top = Path(place).resolve() / "deep" / "top"
        top.mkdir(parents=True)
        made: dict[tuple[str, ...], str] = {}
        for parts in folders:
            top.joinpath(*parts).mkdir(parents=True, exist_ok=True)
        for parts, link in links.items():
            path = top.joinpath(*parts)
            if path.parent.is_dir() and not any(one.is_symlink() for one in path.parents) and not os.path.lexists(path):
                path.symlink_to(link)
                made[parts] = link
        for parts, link in made.items():
            if all(transfer.stays_inside(one, to, made) for one, to in made.items()):
                resolved = Path(os.path.realpath(top.joinpath(*parts)))
                assert resolved.is_relative_to(top), (parts, link)


def test_links_inside_survive_and_are_never_written_through(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a" / "file").write_text("x")
    (source / "b").symlink_to("a/file")
    (source / "a" / "up").symlink_to("../a")
    (source / "dangling").symlink_to("a/nothing")
    transfer.extract(packed(source), tmp_path / "target")
    assert tree(tmp_path / "target") == tree(source)


def test_a_file_comes_out_as_a_file(tmp_path: Path) -> None:
    source = tmp_path / "one"
    source.write_bytes(b"content")
    source.chmod(0o755)
    transfer.extract(packed(source), tmp_path / "deep" / "target")
    assert (tmp_path / "deep" / "target").read_bytes() == b"content"
    assert stat.S_IMODE((tmp_path / "deep" / "target").stat().st_mode) == 0o755


LINK, HARD = {"type": tarfile.SYMTYPE}, {"type": tarfile.LNKTYPE}
TRICKS = {
    "absolute name": [("/etc/passwd", b"x", {})],
    "dots": [("../out", b"x", {})],
    "dots within": [("a/../../out", b"x", {})],
    "absolute link": [("a", b"", {**LINK, "linkname": "/etc/passwd"})],
    "link that leaves": [("a/b", b"", {**LINK, "linkname": "../../out"})],
    "link over a link": [("a", b"", {**LINK, "linkname": "b/../../.."}), ("b", b"", {**LINK, "linkname": "c/d"}), ("c/d/x", b"", {})],
    "link in a circle": [("a", b"", {**LINK, "linkname": "b"}), ("b", b"", {**LINK, "linkname": "a"})],
    "empty link": [("a", b"", {**LINK, "linkname": ""})],
    "written through a link": [("a", b"", {**LINK, "linkname": "b"}), ("a/x", b"x", {})],
    "written through a link that came as a file": [("a", b"x", {}), ("a/x", b"x", {})],
    "folder over a link": [("a", b"", {**LINK, "linkname": "b"}), ("a", b"", {"type": tarfile.DIRTYPE})],
    "twice": [("a", b"x", {}), ("a", b"y", {})],
    "twice by another spelling": [("a/b", b"x", {}), ("a/./b", b"y", {})],
    "hard link to outside": [("a", b"", {**HARD, "linkname": "/etc/passwd"})],
    "hard link to a link": [("l", b"", {**LINK, "linkname": "b"}), ("a", b"", {**HARD, "linkname": "l"})],
    "hard link to a later file": [("a", b"", {**HARD, "linkname": "b"}), ("b", b"x", {})],
    "device": [("a", b"", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3})],
    "disk": [("a", b"", {"type": tarfile.BLKTYPE, "devmajor": 8, "devminor": 0})],
    "pipe": [("a", b"", {"type": tarfile.FIFOTYPE})],
    "setuid": [("a", b"x", {"mode": 0o4755})],
    "setgid": [("a", b"x", {"mode": 0o2755})],
    "too large": [("a", b"x" * 600, {}), ("b", b"x" * 600, {})],
    "top is a link": [(".", b"", {**LINK, "linkname": "/etc"})],
    "file and more": [(".file", b"x", {}), ("a", b"x", {})],
    "unknown type": [("a", b"", {"type": b"Z"})],
    "sparse": [("a", b"x", {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1000000000000"}})],
}


@pytest.mark.parametrize("name", list(TRICKS))
def test_a_trick_is_refused_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with pytest.raises(UnsafePath):
        transfer.extract(stream_of(*TRICKS[name]), target, max_bytes=1000)  # type: ignore[arg-type]
    assert not os.path.lexists(target)
    assert list(tmp_path.iterdir()) == [tmp_path / "deep"]


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("huge")
    info.size = 1 << 50
    with pytest.raises(UnsafePath, match="bytes"):
        transfer.extract(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT)), tmp_path / "target")


def test_a_huge_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 40
    with pytest.raises(UnsafePath, match="header"):
        transfer.extract(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT)), tmp_path / "target")


@given(data=st.binary(max_size=3000), cut=st.integers(0, 4000), flip=st.integers(0, 4000))
@settings(deadline=None, max_examples=150)
def test_a_damaged_stream_is_unsafe_or_whole_never_another_error(data: bytes, cut: int, flip: int) -> None:
    stream = bytearray(stream_of(("a/b", data, {}), ("a/" + "long" * 40, b"x", {})).getvalue())
    stream[flip % len(stream)] ^= 0xFF
    with tempfile.TemporaryDirectory() as place:
        target = Path(place, "target")
        try:
            transfer.extract(io.BytesIO(bytes(stream[: max(1, len(stream) - cut)])), target)
        except UnsafePath:
            assert not target.exists()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_format_with_its_long_names(form: int, tmp_path: Path) -> None:
    name = "/".join(["d" * 50] * 4) + "/f"
    transfer.extract(stream_of((name, b"x", {}), form=form), tmp_path / "target")
    assert (tmp_path / "target" / name).read_bytes() == b"x"


def test_hard_links_to_earlier_files_are_files(tmp_path: Path) -> None:
    transfer.extract(stream_of(("a", b"x", {}), ("b", b"", {**HARD, "linkname": "a"})), tmp_path / "target")
    assert (tmp_path / "target" / "b").read_bytes() == b"x"


def test_leading_parts_are_cut(tmp_path: Path) -> None:
    transfer.extract(stream_of(("top", b"", {"type": tarfile.DIRTYPE}), ("top/a", b"x", {})), tmp_path / "target", strip=1)
    assert tree(tmp_path / "target") == {"a": ("file", (b"x", 0o644))}


def test_a_target_that_stands_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("mine")
    with pytest.raises(FileExistsError):
        transfer.extract(stream_of(("a", b"x", {})), tmp_path / "target")
    assert (tmp_path / "target").read_text() == "mine"


def test_a_source_with_a_link_that_leaves_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("x")
    (source / "z").symlink_to("/etc/passwd")
    stream = io.BytesIO()
    with pytest.raises(UnsafePath, match="leaves"):
        transfer.pack(source, stream)
    assert stream.getvalue() == b""


def test_a_missing_source(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        transfer.pack(tmp_path / "nothing", io.BytesIO())


@pytest.mark.parametrize("depth", [201, 2500])
def test_folders_that_are_too_deep_are_refused(tmp_path: Path, depth: int) -> None:
    """Deeper than this machine's paths, or than what walks them later, can be."""
    with pytest.raises(UnsafePath, match="deep"):
        transfer.extract(stream_of(("/".join(["a"] * depth), b"", {"type": tarfile.DIRTYPE})), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_path_too_long_for_this_machine_is_the_streams_fault(tmp_path: Path) -> None:
    with pytest.raises(UnsafePath, match="too long"):
        transfer.extract(stream_of(("/".join(["a" * 250] * 20), b"", {"type": tarfile.DIRTYPE})), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_names_that_would_fill_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_NAME_BYTES", 10_000)
    members = [(f"{'a' * 100}{number}", b"", {"type": tarfile.SYMTYPE, "linkname": "b" * 100}) for number in range(60)]
    with pytest.raises(UnsafePath, match="of names"):
        transfer.extract(stream_of(*members), tmp_path / "out")


def test_links_that_take_for_ever_to_follow_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "MAX_LINK_STEPS", 100_000)
    members = [(f"l{number}", b"", {"type": tarfile.SYMTYPE, "linkname": "/".join(["x", ".."] * 500)}) for number in range(1000)]
    with pytest.raises(UnsafePath, match="too long to follow"):
        transfer.extract(stream_of(*members), tmp_path / "out")
    assert not (tmp_path / "out").exists()
