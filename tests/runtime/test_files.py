"""Files into and out of real sandboxes, with programs inside that work against it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from sandboxes import Sandboxes

from polar.errors import SandboxError, UnsafePath


def contents(folder: Path) -> str:
    return "".join(one.read_text() for one in folder.rglob("*") if one.is_file() and not one.is_symlink())


async def test_a_folder_in_and_out(sandboxes: Sandboxes, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "big").write_bytes(os.urandom(3_000_000))
    (source / "link").symlink_to("sub/run.sh")
    (source / "näme with\nlines").write_text("x")
    runtime = await sandboxes.make()
    await runtime.upload(source, "made/here")
    assert (await runtime.exec("sh made/here/link")).stdout == b"ran\n"
    await runtime.download("made/here", tmp_path / "back")
    assert (tmp_path / "back" / "big").read_bytes() == (source / "big").read_bytes()
    assert sorted(os.listdir(tmp_path / "back")) == sorted(os.listdir(source))
    assert (tmp_path / "back" / "sub" / "empty").is_dir()
    assert os.readlink(tmp_path / "back" / "link") == "sub/run.sh"
    assert (tmp_path / "back" / "sub" / "run.sh").stat().st_mode & 0o777 == 0o755


@pytest.mark.parametrize("path", [".", "./", "{workdir}", "{workdir}/", "{workdir}/."])
async def test_a_folder_is_the_same_by_all_its_names(sandboxes: Sandboxes, tmp_path: Path, path: str) -> None:
    runtime = await sandboxes.make()
    await runtime.exec("echo 1 > only")
    await runtime.download(path.format(workdir=runtime.workdir), tmp_path / "back")
    assert (tmp_path / "back" / "only").read_text() == "1\n"


async def test_what_is_uploaded_belongs_to_the_sandbox(sandboxes: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("x")
    (tmp_path / "private").chmod(0o600)
    runtime = await sandboxes.make()
    await runtime.upload(tmp_path / "private", "given")
    assert (await runtime.exec("cat given && echo more >> given && cat given")).stdout == b"xxmore\n"


async def test_write_and_read(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    await asyncio.gather(*(runtime.write(f"many/{number}", str(number).encode()) for number in range(20)))
    assert await asyncio.gather(*(runtime.read(f"many/{number}") for number in range(20))) == [str(number).encode() for number in range(20)]
    await runtime.write("many/1", b"again", mode=0o755)
    assert await runtime.read("many/1") == b"again"


async def test_an_upload_replaces_files_and_keeps_the_rest(sandboxes: Sandboxes, tmp_path: Path) -> None:
    runtime = await sandboxes.make()
    await runtime.exec("mkdir d; echo old > d/a; echo kept > d/b; ln -s /etc/passwd d/c")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("a", "c"):
        (source / name).write_text("new")
    await runtime.upload(source, "d")
    assert (await runtime.exec("cat d/a d/b d/c")).stdout == b"newkept\nnew"


async def test_a_missing_source(sandboxes: Sandboxes, tmp_path: Path) -> None:
    runtime = await sandboxes.make()
    with pytest.raises(FileNotFoundError):
        await runtime.download("nothing", tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        await runtime.read("nothing")
    with pytest.raises(FileNotFoundError):
        await runtime.upload(tmp_path / "nothing", "x")


async def test_links_and_devices_that_would_leave(sandboxes: Sandboxes, tmp_path: Path) -> None:
    runtime = await sandboxes.make()
    await runtime.exec("mkdir a b c e; ln -s /etc/passwd a/x; ln -s ../../.. b/up; ln -s /etc/passwd file; echo x > c/x; chmod 4755 c/x")
    for name in ("a", "b", "c", "file"):
        with pytest.raises(UnsafePath):
            await runtime.download(name, tmp_path / name)
        assert name not in os.listdir(tmp_path)
    for name in ("file", "e"):
        with pytest.raises(UnsafePath):
            await runtime.read(name)


async def test_sockets_and_pipes_are_left_out_and_unreadable_files_are_read(sandboxes: Sandboxes, tmp_path: Path) -> None:
    runtime = await sandboxes.make()
    await runtime.exec("mkdir -p d/closed; echo x > d/closed/x; echo y > d/y; chmod 0 d/y d/closed/x d/closed")
    if sandboxes.name in ("local", "plain", "bubblewrap"):
        await runtime.exec("mkfifo d/pipe")
    await runtime.download("d", tmp_path / "d")
    assert sorted(os.listdir(tmp_path / "d")) == ["closed", "y"]
    assert (tmp_path / "d" / "closed" / "x").read_text() == "x\n"


async def test_more_than_allowed_is_refused_and_leaves_nothing(sandboxes: Sandboxes, tmp_path: Path) -> None:
    runtime = await sandboxes.make()
    await runtime.exec("truncate -s 1T sparse || truncate -s 10G sparse; head -c 2000 /dev/zero > small")
    for name in ("sparse", "small"):
        with pytest.raises(UnsafePath):
            await runtime.download(name, tmp_path / "x", max_bytes=1000)
    assert "x" not in os.listdir(tmp_path)
    assert [one for one in os.listdir(runtime.place.folder) if one.startswith("coming")] == []
    assert (await runtime.exec("echo well")).stdout == b"well\n"


async def test_a_program_that_swaps_folders_for_links_meanwhile(sandboxes: Sandboxes, tmp_path: Path) -> None:
    """It may spoil its own files, and reaches nothing with it that it does not reach anyway."""
    if sandboxes.name == "plain":
        pytest.skip("without namespaces a program inside may do what this user may")
    secrets_folder = tmp_path / "secrets"
    secrets_folder.mkdir(mode=0o700)
    (secrets_folder / "f1").write_text("SECRET")
    runtime = await sandboxes.make()
    swapping = (
        f"mkdir -p d/s && for n in $(seq 50); do echo $n > d/s/f$n; done; "
        f"while :; do mv d/s d/t; ln -s {secrets_folder} d/s; rm d/s; mv d/t d/s; done"
    )
    running = asyncio.create_task(runtime.exec(swapping, timeout_s=4))
    await asyncio.sleep(0.3)
    source = tmp_path / "source" / "s"
    source.mkdir(parents=True)
    (source / "f1").write_text("uploaded")
    for number in range(15):
        target = tmp_path / f"got-{number}"
        try:
            await runtime.download("d", target)
        except (UnsafePath, FileNotFoundError, SandboxError):
            continue
        assert "SECRET" not in contents(target)
    for _ in range(15):
        try:
            await runtime.upload(tmp_path / "source", "d")
        except SandboxError:
            continue
    await running
    assert (secrets_folder / "f1").read_text() == "SECRET"
    assert os.listdir(secrets_folder) == ["f1"]


async def test_an_upload_to_where_the_sandbox_may_not_write(sandboxes: Sandboxes, tmp_path: Path) -> None:
    if sandboxes.name not in ("local", "bubblewrap"):
        pytest.skip("here it may")
    (tmp_path / "x").write_text("x")
    runtime = await sandboxes.make()
    with pytest.raises(SandboxError, match="could not be copied"):
        await runtime.upload(tmp_path / "x", "/usr/bin/x")


async def test_a_stopped_sandbox(sandboxes: Sandboxes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(bytes(1_000_000))
    runtime = await sandboxes.make()
    await runtime.stop()
    with pytest.raises(SandboxError):
        await runtime.upload(tmp_path / "x", "x")
    with pytest.raises(SandboxError):
        await runtime.download("x", tmp_path / "y")
