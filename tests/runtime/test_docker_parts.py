"""The parts of the docker backend that need no daemon."""

from __future__ import annotations

import asyncio
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError, SandboxError
from polar.runtime import MountSpec, Place, RuntimeSpec, base_image, container_processes, daemon, podman
from polar.runtime.attach import Attached
from polar.runtime.container_config import body, options
from polar.runtime.container_processes import HostView, Process, parsed, started_by
from polar.runtime.docker import DockerRuntime
from polar.runtime.folder_hash import folder_hash
from polar.runtime.images import no_such_image, tagged
from polar.runtime.spec import DEFAULT_PIDS
from polar.runtime.tail import Tail

PLACE = Place("box", "0123abcd-ef", Path("/nowhere"), ("127.0.0.1", 8100), Path("/task"))


def made(podman: str | None = None, **spec: Any) -> dict[str, Any]:
    return body(RuntimeSpec(backend="docker", **spec), PLACE, image="i", workdir="/w", podman=podman)


# -- what the daemon is asked for


def test_every_field_is_in_the_request() -> None:
    spec = {"cpus": 1.5, "memory_mb": 64, "pids": 10, "storage_mb": 200, "gpus": 2, "user": "u", "env": {"A": "é\n="}}
    whole = made(**spec, mounts=[MountSpec(source="data", target="/d")], kwargs={"volumes": ["/a:/b:ro"], "shm_mb": 2, "runtime": "runsc"})
    host = whole["HostConfig"]
    assert (host["NanoCpus"], host["Memory"], host["MemorySwap"], host["PidsLimit"]) == (1_500_000_000, 64 << 20, 64 << 20, 10)
    assert (host["StorageOpt"], host["ShmSize"], host["Runtime"], host["Binds"]) == ({"size": "200m"}, 2 << 20, "runsc", ["/a:/b:ro"])
    assert host["DeviceRequests"] == [{"Driver": "", "Count": 2, "Capabilities": [["gpu"]]}]
    assert host["Mounts"] == [{"Type": "bind", "Source": "/task/data", "Target": "/d", "ReadOnly": True}]
    assert whole["User"] == "u"
    assert "A=é\n=" in whole["Env"]
    assert whole["Labels"] == {"polar.sandbox": "box", "polar.owner": "0123abcd-ef"}


@pytest.mark.parametrize(
    ("network", "internet", "mode"),
    [
        ("gateway", False, "none"),
        ("gateway", True, "bridge"),
        ("none", False, "none"),
        ("bridge", False, "bridge"),
        ("host", False, "host"),
    ],
)
def test_networks(network: str, internet: bool, mode: str) -> None:
    assert made(network=network, allow_internet=internet)["HostConfig"]["NetworkMode"] == mode


def test_processes_are_limited_unless_the_daemon_limits_them() -> None:
    assert made()["HostConfig"]["PidsLimit"] == DEFAULT_PIDS
    assert "PidsLimit" not in made(podman="5.4.0")["HostConfig"]


def test_the_marks_cannot_be_changed_by_a_task() -> None:
    assert "POLAR_OWNER=0123abcd-ef" in made(env={"POLAR_OWNER": "other", "POLAR_SANDBOX": "other"})["Env"]
    assert not any(one.endswith("=other") for one in made(env={"POLAR_OWNER": "other"})["Env"])


def test_gpus_of_podman() -> None:
    assert made(podman="5.2.1", gpus=2)["HostConfig"]["DeviceRequests"] == [
        {"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]}
    ]
    with pytest.raises(ConfigError, match="from 5"):
        made(podman="4.3.1", gpus=1)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"kwargs": {"volume": []}}, "volumes"),
        ({"kwargs": {"pull": "sometimes"}}, "pull"),
        ({"image": "a", "build_context": "."}, "exclude each other"),
        ({"mounts": [MountSpec(source="/a", target="b")]}, "no absolute path"),
    ],
)
def test_what_cannot_be_heeded_is_refused(spec: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        options(RuntimeSpec(backend="docker", **spec))


@pytest.mark.parametrize(
    ("image", "whole"), [("debian", "debian:latest"), ("a:5000/b", "a:5000/b:latest"), ("a/b:1", "a/b:1"), ("a@sha256:1", "a@sha256:1")]
)
def test_one_tag_is_pulled_not_all(image: str, whole: str) -> None:
    assert tagged(image) == whole


# -- which daemon


def test_the_environment_names_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://d:1")
    monkeypatch.setenv("CONTAINER_HOST", "unix:///p")
    assert list(daemon.candidates(None, podman=False)) == ["tcp://d:1"]
    assert list(daemon.candidates(None, podman=True)) == ["unix:///p"]
    assert list(daemon.candidates("tcp://mine:2", podman=True)) == ["tcp://mine:2"]


async def test_a_daemon_that_does_not_answer_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    assert "DOCKER_HOST" in str(await DockerRuntime.unavailable())
    runtime = DockerRuntime(RuntimeSpec(backend="docker"), Place("box", "o", tmp_path))
    with pytest.raises(SandboxError, match=r"nothing\.sock"):
        await runtime.start()
    await runtime.stop()


async def test_a_machine_without_any_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "candidates", lambda explicit, podman: iter(()))
    assert "install it" in str(await DockerRuntime.unavailable())


async def test_an_address_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "ssh://host")
    with pytest.raises(SandboxError, match="unix:///path"):
        await daemon.discover()


def test_podman_s_limits_are_lowered_only_where_they_must_be() -> None:
    assert podman.containers_conf(1000, 1000, podman_default=True) is None
    conf = podman.containers_conf(20_000, 96_365, podman_default=False)
    assert conf is not None
    assert 'default_ulimits = ["nofile=20000:20000", "nproc=32768:32768"]' in conf


def test_a_socket_s_path_is_short_enough_and_private(tmp_path: Path) -> None:
    assert podman.socket_path(tmp_path) == tmp_path / "podman.sock"
    long = podman.socket_path(tmp_path / ("x" * 120))
    assert len(os.fsencode(long)) <= podman.SOCKET_PATH_BYTES
    assert long.parent.stat().st_mode & 0o077 == 0
    long.parent.rmdir()


def test_without_root_the_base_image_is_built_by_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert base_image.cannot_debootstrap() == "debootstrap needs root"


# -- what a command prints


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(min_size=1, max_size=50)), max_size=20), st.integers(1, 7), st.booleans())
async def test_frames_are_read_whole_however_they_are_cut(frames: list[tuple[int, bytes]], step: int, cut_off: bool) -> None:
    data = b"".join(struct.pack(">BxxxL", stream, len(content)) + content for stream, content in frames)
    reader = asyncio.StreamReader()
    for start in range(0, len(data), step):
        reader.feed_data(data[start : start + step])
    reader.feed_data(b"\x01\x00\x00" if cut_off else b"")
    reader.feed_eof()
    read = [one async for one in Attached(reader, None).frames()]  # type: ignore[arg-type]
    assert read == [("stderr" if stream == 2 else "stdout", content) for stream, content in frames]


@given(st.lists(st.binary(min_size=1, max_size=30), max_size=20), st.integers(0, 40))
def test_the_end_of_each_stream_is_kept_and_the_secret_word_is_not(chunks: list[bytes], keep: int) -> None:
    passed: list[bytes] = []
    tail = Tail(keep, lambda stream, data: passed.append(data), "secret")
    whole = b"".join(chunks)
    for data in [b"sec", b"ret", *chunks]:
        tail.add("stdout", data)
    result = tail.result(0, 0.0)
    assert tail.began
    assert b"".join(passed) == whole
    assert result.stdout == (whole[-keep:] if keep else b"")
    assert result.truncated == (len(whole) > keep)


def test_a_command_that_never_began_is_known() -> None:
    tail = Tail(100, None, "secret")
    tail.add("stderr", b"secretly printed by nobody")
    tail.add("stdout", b"sorry")
    assert not tail.began
    assert tail.result(127, 0.0).stdout == b"sorry"


# -- whose a process is


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[Process], dict[int, str]]:
    """Processes of two commands and of before, each of which may have lost its mark but not its parent, and the truth."""
    truth: dict[int, str] = {}
    found = [Process(1, 0, 0, "", sleeper=False)]
    for pid in range(2, draw(st.integers(2, 14))):
        parent = draw(st.sampled_from([0, *truth]))
        whose = truth[parent] if parent else draw(st.sampled_from(["a", "b", "before"]))
        started = 5 if whose == "before" else 10 + pid
        # the root of a command carries its mark: it is what the daemon started
        mark = "" if whose == "before" or (parent and draw(st.booleans())) else whose
        truth[pid] = whose
        found.append(Process(pid, parent, started, mark, sleeper=False))
    return found, truth


@given(forests())
def test_all_that_a_command_started_is_found_and_nothing_of_others(case: tuple[list[Process], dict[int, str]]) -> None:
    found, truth = case
    chosen = {one.pid for one in started_by(found, "a", since=10, first=1)}
    assert chosen == {pid for pid, whose in truth.items() if whose == "a"}


def test_one_that_cleared_everything_is_found_by_its_time() -> None:
    hidden = Process(9, 1, 20, "", sleeper=False)
    older = Process(8, 1, 9, "", sleeper=False)
    assert started_by([Process(1, 0, 0, "", sleeper=False), hidden, older], "a", since=10, first=1) == [hidden]


def test_names_with_brackets_and_line_ends_do_not_confuse() -> None:
    stat = b"7 (evil) S 1 (x\n) S 3 " + b"0 " * 17 + b"99 0 0"
    assert parsed(7, stat, b"A=1\0POLAR_EXEC=m\0", b"sleep\x002147483647\0") == Process(7, 3, 99, "m", sleeper=True)
    nonsense = parsed(7, b"7 (evil", b"", b"")
    assert nonsense is not None
    assert nonsense.started > 1 << 60  # counts as begun just now: it is ended rather than spared
    assert parsed(7, b"7 (dead) Z 1 " + b"0 " * 20, b"", b"") is None


async def test_in_our_own_pid_namespace_nothing_unmarked_is_ever_seen() -> None:
    assert await HostView(os.getpid(), "no-such-sandbox").processes() == []
    assert container_processes.belongs(os.getpid(), "no-such-sandbox") is False


# -- what is in a folder


def test_a_folder_s_hash_is_of_its_content(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "file").write_text("x")
        (folder / "link").symlink_to("sub/file")
    assert folder_hash(one) == folder_hash(other)
    before = folder_hash(one)
    os.utime(one / "sub" / "file", (0, 0))
    assert folder_hash(one) == before
    (one / "sub" / "file").chmod(0o755)
    assert folder_hash(one) != before
    (other / "link").unlink()
    (other / "link").symlink_to("sub")
    assert folder_hash(other) != before


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        ("manifest for nope:1 not found: manifest unknown: manifest unknown", True),
        ("pull access denied for nope, repository does not exist or may require 'docker login': denied", True),
        ("reading manifest latest in docker.io/library/nope: requested access to the resource is denied", True),
        ('short-name "nope" did not resolve to an alias and no unqualified-search registries are defined', True),
        ('failed to resolve reference "docker.io/library/alpine:9": docker.io/library/alpine:9: not found', True),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries", True),
        ("toomanyrequests: You have reached your pull rate limit", False),
        ("Get https://registry-1.docker.io/v2/: dial tcp: lookup registry-1.docker.io: no such host", False),
        ("received unexpected HTTP status: 503 Service Unavailable", False),
        ("pulling the image x: the daemon does not answer (Connection reset)", False),
    ],
)  # fmt: skip
def test_an_image_that_is_not_there_is_told_from_a_registry_that_is_not(said: str, missing: bool) -> None:
    assert no_such_image(f"pulling the image nope: {said}") is missing
