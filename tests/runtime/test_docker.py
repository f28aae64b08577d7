"""Real containers, by Docker or Podman, whatever this machine has."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from containers import Containers, containers  # noqa: F401 - a fixture

from polar.errors import ConfigError, SandboxError, UnsafePath
from polar.runtime import MountSpec
from polar.runtime.container_exec import Container
from polar.runtime.docker import DockerRuntime
from polar.runtime.processes import find as found_processes
from polar.runtime.reaper import reap

pytestmark = pytest.mark.real

LEAVERS = """
(setsid env -i /bin/sh -c 'while :; do sleep 0.05; done' </dev/null >/dev/null 2>&1 &)
(env -i setsid /bin/sh -c 'cd /; exec sleep 71' </dev/null >/dev/null 2>&1 &)
sh -c 'trap "" TERM INT HUP; sleep 72 & while :; do sleep 0.1; done' &
sleep 73
"""
"""Processes that leave their session, parent and environment behind, and two that go on forking."""
CONNECT = "import socket,sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5); print('connected')"


async def processes(runtime: DockerRuntime) -> list[str]:
    """The command lines inside, without the first process, what it waits for and the listing."""
    listed = await runtime.exec("ps -eo pid,args --no-headers")
    lines = [line.split(None, 1)[1].strip() for line in listed.text.splitlines() if line.split()[0] != "1"]
    return [line for line in lines if "ps -eo" not in line and line != "sleep 2147483647"]


async def test_exit_codes_are_exact(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    codes = [(await runtime.exec(line)).exit_code for line in ("true", "exit 3", "kill -9 $$", "kill -TERM $$", "sh -c 'exit 4' | cat")]
    assert codes == [0, 3, 137, 143, 4]


async def test_a_command_that_pretends_to_have_failed_to_start_is_believed_nothing(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    result = await runtime.exec("echo 'Error: runc: exec failed: unable to start container process' >&2; echo x >> /ran; exit 125")
    assert result.exit_code == 125
    assert (await runtime.read("/ran")) == b"x\n"  # once


async def test_no_monitor_of_its_commands_outlives_a_container(containers: Containers) -> None:  # noqa: F811
    runtime, other = await containers.start(), await containers.start()
    for one in (runtime, other):
        assert (await one.exec("true")).ok
    await runtime.stop()
    named = _monitored()
    assert runtime.name not in named
    assert (other.name in named) == (other._daemon is not None and bool(other._daemon.podman))
    assert (await other.exec("echo works")).stdout == b"works\n"


def _monitored() -> set[str]:
    """The containers of whose commands Podman still has a monitor here."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            arguments = path.read_text().split("\0")
            if arguments[0].endswith("conmon"):
                given = dict(itertools.pairwise(arguments))
                if given["-c"] != given["-u"]:
                    found.add(given["-n"])
    return found


async def test_output_comes_while_the_command_runs(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    seen: list[tuple[float, str, bytes]] = []
    await runtime.exec("echo one; sleep 1; echo two >&2", on_output=lambda stream, data: seen.append((time.monotonic(), stream, data)))
    assert [(stream, data) for _, stream, data in seen] == [("stdout", b"one\n"), ("stderr", b"two\n")]
    assert seen[1][0] - seen[0][0] > 0.8


async def test_a_megabyte_of_stdin_comes_back(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    data = os.urandom(1 << 20)
    result = await runtime.exec(["cat"], stdin=data, keep_bytes=2 << 20)
    assert (result.exit_code, result.stdout, result.stderr) == (0, data, b"")


async def test_what_a_program_prints_is_there_whether_it_reads_its_stdin_or_not(containers: Containers) -> None:  # noqa: F811
    """Podman drops the output of a program that ends while its stdin is still being handed over; a fifth was lost so."""
    runtime = await containers.start()
    results = await asyncio.gather(*(runtime.exec("echo hello; exit 3", stdin=b"\n") for _ in range(30)))
    assert {(one.exit_code, one.stdout, one.stderr) for one in results} == {(3, b"hello\n", b"")}


async def test_stdin_that_nobody_reads_is_no_error(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    result = await runtime.exec(["true"], stdin=bytes(1 << 20))
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"", b"")


async def test_of_much_output_the_end_is_kept(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    passed: list[int] = []
    result = await runtime.exec("seq 1 400000", keep_bytes=1000, on_output=lambda _, data: passed.append(len(data)))
    assert (len(result.stdout), result.truncated, result.stdout.endswith(b"\n400000\n"), sum(passed)) == (1000, True, True, 2688895)


async def test_the_environment_may_hold_anything(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start(env={"A": "é ü\n$HOME \"'`", "B": "1"})
    result = await runtime.exec(
        ["python3", "-c", "import os; print(ascii([os.environ['A'], os.environ['B'], os.environ['C']]))"], env={"B": "", "C": "日本"}
    )
    assert result.text.strip() == ascii(["é ü\n$HOME \"'`", "", "日本"])


async def test_nothing_of_this_process_s_environment_is_inside(containers: Containers, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("SECRET_OF_THE_HOST", "s3cret")
    runtime = await containers.start()
    assert "s3cret" not in (await runtime.exec("cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'; env")).text


async def test_a_timeout_ends_everything_wherever_it_went(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    assert (await runtime.exec("nohup sleep 70 >/dev/null 2>&1 & echo")).ok  # of an earlier command: not this one's to end
    began = time.monotonic()
    result = await runtime.exec(LEAVERS, timeout_s=1.5)
    assert (result.exit_code, result.timed_out) == (124, True)
    assert time.monotonic() - began < 10
    assert await processes(runtime) == ["sleep 70"]


async def test_cancelling_ends_everything_too(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    command = asyncio.create_task(runtime.exec(LEAVERS))
    await asyncio.sleep(1.5)
    command.cancel()
    with pytest.raises(asyncio.CancelledError):
        await command
    assert await processes(runtime) == []


async def test_two_commands_at_once_one_ends(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    long = asyncio.create_task(runtime.exec("sleep 3 & sleep 3; echo whole"))
    await asyncio.sleep(0.5)
    assert (await runtime.exec("sleep 60", timeout_s=0.5)).timed_out
    assert (await long).stdout == b"whole\n"


async def test_something_left_behind_does_not_hold_the_command_up(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    began = time.monotonic()
    result = await runtime.exec("sleep 50 & echo done")
    assert (result.exit_code, result.stdout) == (0, b"done\n")
    assert time.monotonic() - began < 5


async def test_a_command_may_close_its_output_and_go_on(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    result = await runtime.exec("exec >&- 2>&-; sleep 1.5; exit 9")
    assert result.exit_code == 9
    assert result.duration_s > 1.4


async def test_ending_all_processes_leaves_the_sandbox(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    await runtime.exec(LEAVERS.replace("sleep 73", ""))
    await runtime.exec("kill -9 $(pgrep -x sleep)")  # what the first process waits for too
    await runtime.end_processes()
    assert await processes(runtime) == []


async def test_the_first_process_cannot_be_ended_from_inside(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    await runtime.exec("for n in 1 2 3; do kill -9 -1; kill -TERM 1; kill -9 1; done", timeout_s=20)
    assert (await runtime.exec("echo alive")).stdout == b"alive\n"


async def test_orphans_are_collected(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    await runtime.exec("for n in $(seq 20); do (setsid sh -c 'sleep 0.1' &); done; sleep 1")
    assert (await runtime.exec("ps -eo stat --no-headers | grep -c '^Z'")).text.strip() == "0"


async def test_running_out_of_memory_is_said(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start(memory_mb=64)
    result = await runtime.exec(["python3", "-c", "x = bytearray(300 << 20)"])
    assert result.exit_code == 137
    assert b"memory limit" in result.stderr
    assert result.out_of_memory
    killed = await runtime.exec("kill -9 $$")  # another reason for 137
    assert (killed.stderr, killed.out_of_memory) == (b"", False)


FIRST_GOES = "echo 1000 > /proc/1/oom_score_adj; python3 -c 'import os; [os.fork() for _ in range(3)]; x = bytearray(200 << 20)'; sleep 60"
"""Fills the memory; the kernel ends the first process of the sandbox for it, and with that all of it."""


async def test_a_sandbox_that_its_memory_limit_ends_keeps_what_was_written(
    containers: Containers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = await containers.start(memory_mb=64)
    await runtime.exec("echo work > work.txt")
    state = Container.state

    async def told(container: Container) -> dict[str, Any]:
        """Podman notes why a container ended with the second version of control groups only; Docker does always."""
        said = await state(container)
        return said if said["Running"] else {**said, "OOMKilled": True}

    monkeypatch.setattr(Container, "state", told)
    result = await runtime.exec(FIRST_GOES, timeout_s=60)
    assert (result.exit_code, result.out_of_memory, result.timed_out) == (137, True, False)
    assert b"memory limit" in result.stderr
    assert await runtime.read("work.txt") == b"work\n"
    assert (await runtime.exec("echo more >> work.txt && cat work.txt")).text == "work\nmore\n"
    await runtime.end_processes()


async def test_a_sandbox_full_of_processes_is_emptied_when_nothing_starts_any_more(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start(pids=40)
    full = await runtime.exec("for n in $(seq 100); do sleep 90 >/dev/null 2>&1 </dev/null & done; wait", timeout_s=20)
    assert b"fork" in full.stderr
    await runtime.exec("for n in $(seq 39); do (setsid sleep 90 >/dev/null 2>&1 </dev/null &) ; done", timeout_s=20)
    assert (await runtime.exec("echo works")).stdout == b"works\n"


async def test_the_cpu_limit_is_set(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start(cpus=0.5)
    limit = await runtime.exec(
        "cat /sys/fs/cgroup/cpu.max 2>/dev/null || paste -d' ' /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu/cpu.cfs_period_us"
    )
    quota, period = map(int, limit.text.split())
    assert quota / period == 0.5


async def test_read_only_mounts_cannot_be_written(containers: Containers, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "file").write_text("host")
    mounts = [
        MountSpec(source=str(tmp_path / "shared"), target="/ro"),
        MountSpec(source=str(tmp_path / "shared"), target="/rw", read_only=False),
    ]
    runtime = await containers.start(mounts=mounts)
    assert (await runtime.exec("cat /ro/file; echo x > /ro/file")).stdout == b"host"
    assert (tmp_path / "shared" / "file").read_text() == "host"
    assert (await runtime.exec("echo x > /rw/file; umount /ro; mount -o remount,rw /ro")).exit_code != 0
    assert (tmp_path / "shared" / "file").read_text() == "x\n"


async def test_the_gateway_is_all_that_network_gateway_has(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start(network="gateway")
    fetched = await runtime.exec(["python3", "-c", f"import urllib.request as u; print(u.urlopen('{runtime.gateway_url}/v1/x').read())"])
    assert fetched.text.strip() == "b'hello /v1/x'"
    interfaces = await runtime.exec("cut -d: -f1 -s /proc/net/dev | tr -d ' '")
    assert interfaces.text.split() == ["lo"]
    host, port = containers.gateway
    assert (await runtime.exec(["python3", "-c", CONNECT, host, str(port)])).exit_code != 0  # its own loopback, not this machine's


async def test_network_none_has_nothing(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start(network="none")
    with pytest.raises(ConfigError, match="no way to the model API"):
        _ = runtime.gateway_url
    assert (await runtime.exec(["python3", "-c", CONNECT, "127.0.0.1", "8100"])).exit_code != 0
    assert (await runtime.exec("cut -d: -f1 -s /proc/net/dev | tr -d ' '")).text.split() == ["lo"]


async def test_bridge_and_host_reach_the_gateway_too(containers: Containers) -> None:  # noqa: F811
    for network in ("bridge", "host"):
        runtime = await containers.start(network=network)
        fetched = await runtime.exec(["python3", "-c", f"import urllib.request as u; print(u.urlopen('{runtime.gateway_url}/x').read())"])
        assert fetched.text.strip() == "b'hello /x'"


async def test_files_go_in_and_come_out(containers: Containers, tmp_path: Path) -> None:  # noqa: F811
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "text").write_text("é")
    (source / "run").write_text("#!/bin/sh\necho ran\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("a/b/text")
    runtime = await containers.start()
    await runtime.upload(source, "/some/new/folder")
    assert (await runtime.exec("./run; cat link", cwd="/some/new/folder")).text == "ran\né"
    await runtime.download("/some/new/folder", tmp_path / "back")
    assert sorted(str(one.relative_to(tmp_path / "back")) for one in (tmp_path / "back").rglob("*")) == [
        "a",
        "a/b",
        "a/b/text",
        "link",
        "run",
    ]
    assert (tmp_path / "back" / "run").stat().st_mode & 0o777 == 0o755


async def test_what_is_there_stays_beside_what_is_uploaded(containers: Containers, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "new").write_text("new")
    runtime = await containers.start()
    await runtime.exec("mkdir -m 1777 /shared && echo old > /shared/old")
    await runtime.upload(tmp_path / "new", "/shared/new")
    assert (await runtime.exec("stat -c %a /shared; cat /shared/old /shared/new")).text.split() == ["1777", "old", "new"]


async def test_files_belong_to_the_sandbox_s_user(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start(user="1234:5678", workdir="/work")
    await runtime.write("sub/file", b"x")
    assert (await runtime.exec("stat -c %u:%g . sub sub/file; echo y >> sub/file")).text.split() == ["1234:5678"] * 3
    assert (await runtime.exec(["id", "-u"], user="0")).text.strip() == "0"


async def test_links_and_devices_do_not_come_out(containers: Containers, tmp_path: Path) -> None:  # noqa: F811
    runtime = await containers.start()
    await runtime.exec("ln -s /etc/passwd link; mkdir out; ln -s ../../etc out/etc; mkfifo pipe")
    for source in ("link", "out", "pipe", "/dev/null"):
        with pytest.raises(UnsafePath):
            await runtime.download(source, tmp_path / "copy")
        assert not (tmp_path / "copy").exists()
    with pytest.raises(FileNotFoundError):
        await runtime.read("nothing")


async def test_a_link_inside_does_not_lead_an_upload_to_the_host(containers: Containers, tmp_path: Path) -> None:  # noqa: F811
    victim = tmp_path / "victim"
    victim.mkdir()
    runtime = await containers.start()
    await runtime.exec(["ln", "-s", str(victim), "trap"])
    try:
        await runtime.write("trap/file", b"x")
    except SandboxError:
        pass
    assert list(victim.iterdir()) == []


async def test_too_much_does_not_come_out(containers: Containers, tmp_path: Path) -> None:  # noqa: F811
    runtime = await containers.start()
    await runtime.exec("truncate -s 10G sparse")
    with pytest.raises(UnsafePath):
        await runtime.download("sparse", tmp_path / "sparse", max_bytes=1 << 20)
    assert not (tmp_path / "sparse").exists()


async def test_rights_that_no_task_needs_are_not_there(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    for line in ("mknod /disk b 8 0", "mount -t tmpfs none /mnt", "date -s 2001-01-01", "dmesg", "echo 1 > /proc/sys/kernel/sysrq"):
        assert (await runtime.exec(line, timeout_s=20)).exit_code != 0, line


async def test_a_snapshot_holds_the_files(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    await runtime.exec("echo prepared > /prepared")
    image = await runtime.snapshot()
    assert image is not None
    try:
        assert any(one.kind == "image" and one.name == image and one.owner == containers.owner.id for one in await DockerRuntime.find())
        again = await containers.start(image=image)
        assert (await again.exec("cat /prepared; echo $POLAR_SANDBOX")).text.split() == ["prepared", again.place.id]
        await again.stop()
    finally:
        await runtime.stop()
        await DockerRuntime.discard(image)
    assert not any(one.name == image for one in await DockerRuntime.find())


async def test_what_runs_is_in_no_snapshot_so_there_is_none(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    await runtime.exec("sleep 80 >/dev/null 2>&1 &")
    assert await runtime.snapshot() is None


async def test_an_image_is_built_once_for_each_content(containers: Containers, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "Dockerfile").write_text("FROM localhost/polar-base:bookworm\nCOPY file /file\nWORKDIR /code\n")
    (tmp_path / "file").write_text("one")
    first = await containers.start(build_context=str(tmp_path))
    assert (first.workdir, (await first.exec("cat /file; pwd")).text) == ("/code", "one/code\n")
    began = time.monotonic()
    await containers.start(build_context=str(tmp_path))
    assert time.monotonic() - began < 10
    (tmp_path / "file").write_text("two")
    second = await containers.start(build_context=str(tmp_path))
    assert (await second.exec("cat /file")).text == "two"


async def test_a_failing_build_says_its_end(containers: Containers, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "Dockerfile").write_text("FROM localhost/polar-base:bookworm\nRUN echo the-reason && exit 5\n")
    with pytest.raises(SandboxError, match="the-reason"):
        await containers.start(build_context=str(tmp_path))


async def test_an_image_that_is_not_there_is_named(containers: Containers) -> None:  # noqa: F811
    with pytest.raises(ConfigError, match="localhost/no-such-image"):
        await containers.start(image="localhost/no-such-image")


async def test_sandboxes_start_at_once_and_apart(containers: Containers) -> None:  # noqa: F811
    made = await asyncio.gather(*(containers.start(network="gateway", env={"N": str(number)}) for number in range(6)))
    said = await asyncio.gather(*(one.exec("echo $N > mine; sleep 0.2; cat mine; ls") for one in made))
    assert [one.text.split() for one in said] == [[str(number), "mine"] for number in range(6)]


async def test_stop_may_come_at_any_time_and_twice(containers: Containers) -> None:  # noqa: F811
    never = containers.runtime()
    await never.stop()
    runtime = await containers.start()
    await runtime.stop()
    await runtime.stop()
    with pytest.raises(SandboxError, match="not running"):
        await runtime.exec("true")
    assert not any(one.sandbox == runtime.place.id for one in await DockerRuntime.find())


async def test_a_stop_that_failed_is_made_good_by_the_next(containers: Containers, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    runtime = await containers.start()

    async def refused(*_: object) -> None:
        raise SandboxError("the daemon is busy")

    with monkeypatch.context() as patched:
        patched.setattr("polar.runtime.docker._gone", refused)
        for _ in range(2):
            with pytest.raises(SandboxError, match="busy"):
                await runtime.stop()
    assert any(one.sandbox == runtime.place.id for one in await DockerRuntime.find())
    await runtime.stop()
    assert not any(one.sandbox == runtime.place.id for one in await DockerRuntime.find())


async def test_a_start_that_is_cancelled_leaves_nothing(containers: Containers) -> None:  # noqa: F811
    for pause in (0.05, 0.2, 0.4):
        runtime = containers.runtime(network="gateway")
        starting = asyncio.create_task(runtime.start())
        await asyncio.sleep(pause)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await runtime.stop()
        assert not any(one.sandbox == runtime.place.id for one in await DockerRuntime.find())


async def test_a_container_that_is_killed_under_a_command_is_infrastructure(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    command = asyncio.create_task(runtime.exec("sleep 60"))
    await asyncio.sleep(1)
    assert runtime._daemon is not None
    await runtime._daemon.docker.containers.container(runtime.name).kill()
    with pytest.raises(SandboxError, match="was ended"):
        await command
    with pytest.raises(SandboxError):
        await runtime.exec("true")


async def test_find_and_remove_need_no_memory(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start()
    (left,) = [one for one in await DockerRuntime.find() if one.sandbox == runtime.place.id]
    assert (left.kind, left.owner) == ("container", containers.owner.id)
    await DockerRuntime.remove(left)
    await DockerRuntime.remove(left)
    assert not any(one.sandbox == runtime.place.id for one in await DockerRuntime.find())


async def test_the_container_s_own_limits_of_storage_are_refused_in_the_daemon_s_words(containers: Containers) -> None:  # noqa: F811
    runtime = containers.runtime(storage_mb=100)
    try:
        await runtime.start()
    except SandboxError as error:
        assert "storage" in str(error)  # noqa: PT017 - where the daemon's storage can, it starts
    else:
        assert (await runtime.exec("dd if=/dev/zero of=/big bs=1M count=300")).exit_code != 0


async def test_the_home_is_the_image_s_where_it_can_be_used(containers: Containers) -> None:  # noqa: F811
    for spec, home in (
        ({}, "/root"),
        ({"user": "1234"}, "/polar/home"),
        ({"workdir": "/root"}, "/polar/home"),
        ({"env": {"HOME": "/h"}}, "/h"),
    ):
        runtime = await containers.start(**spec)
        assert (runtime.home, (await runtime.exec("touch $HOME/x && echo $HOME")).text.strip()) == (home, home)


async def test_all_that_a_command_started_is_found_from_inside_too(containers: Containers) -> None:  # noqa: F811
    """As for a daemon on another machine, whose processes are not seen from here."""
    runtime = await containers.start()
    assert runtime._container is not None
    runtime._container.here = False
    await runtime.exec("nohup sleep 70 >/dev/null 2>&1 & sleep 0.5")
    assert (await runtime.exec(LEAVERS, timeout_s=1.5)).timed_out
    assert await processes(runtime) == ["sleep 70"]
    await runtime.end_processes()
    assert await processes(runtime) == []


async def test_a_daemon_that_goes_away_is_infrastructure_and_its_next_one_removes_the_container(containers: Containers) -> None:  # noqa: F811
    runtime = await containers.start(backend="podman")
    command = asyncio.create_task(runtime.exec("sleep 60"))
    await asyncio.sleep(1.5)
    service_pids = [one.pid for one in found_processes(owner_prefix=containers.owner.id) if one.command.startswith("podman system service")]
    if not service_pids:
        command.cancel()
        pytest.skip("this machine's daemon is not the tests' own to end")
    for pid in service_pids:
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(SandboxError):
        await command
    with pytest.raises(SandboxError):
        await runtime.exec("true")
    await runtime.stop()
    assert not any(one.sandbox == runtime.place.id for one in await DockerRuntime.find())


DIES = """
import asyncio, os, signal, sys
from pathlib import Path
from polar.runtime import Owner, Place, RuntimeSpec, create

async def main():
    owner = Owner.open(Path(sys.argv[1]))
    runtime = create(RuntimeSpec(backend="podman", network="none"), Place("left-" + owner.id[-8:], owner.id, owner.sandbox("left")))
    await runtime.start()
    await runtime.exec("setsid sleep 300 >/dev/null 2>&1 &")
    print(owner.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


async def test_what_a_killed_owner_left_is_reaped_and_its_service_ends_by_itself(tmp_path: Path) -> None:
    if await DockerRuntime.unavailable() is not None or os.environ.get("CONTAINER_HOST"):
        pytest.skip("needs the program podman, and no other daemon")
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", DIES, str(tmp_path), stdout=asyncio.subprocess.PIPE)
    owner_id = (await program.communicate())[0].decode().strip()
    assert program.returncode == -signal.SIGKILL
    assert any(one.owner == owner_id and one.kind == "container" for one in await DockerRuntime.find())
    removed = await reap(tmp_path)
    assert {"container", "folder"} <= {one.kind for one in removed if one.owner == owner_id}
    assert not any(one.owner == owner_id for one in await DockerRuntime.find())
    assert found_processes(owner_prefix=owner_id) == []
    assert os.listdir(tmp_path) == []
