"""Commands in real sandboxes: what every backend must do alike."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path

import pytest
from sandboxes import Sandboxes, soon

from polar.errors import SandboxError
from polar.runtime import Runtime

MARK = f"{secrets.randbelow(10**9):09d}"
"""In every sleep of these tests, so that they are told apart from the machine's (backend `plain` sees them all)."""
HIDING = f"""
(setsid sh -c 'while :; do sleep 0.05{MARK}; done' &)
(env -i setsid sh -c 'cd /; (sleep 61.{MARK} & sleep 62.{MARK}) & exec sleep 63.{MARK}' &)
sh -c 'trap "" TERM INT HUP; sleep 64.{MARK} & while :; do sleep 0.1{MARK}; done' &
echo ready
sleep 65.{MARK}
"""
"""Processes that leave their session, group, parent, folder and environment behind, and two that go on forking."""


async def alive(runtime: Runtime) -> list[str]:
    """The processes of these tests that run inside."""
    mark = f"{MARK[:4]}[{MARK[4]}]{MARK[5:]}"
    listed = await runtime.exec(f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -a '{mark}'")
    return listed.text.splitlines()


async def test_exit_codes_and_streams(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    result = await runtime.exec("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.stdout, result.stderr, result.ok) == (7, b"out\n", b"err\n", False)


async def test_a_program_is_run_without_a_shell(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    assert (await runtime.exec(["printf", "%s|", "a b", "$HOME", "*"])).stdout == b"a b|$HOME|*|"


async def test_a_pipe_never_hides_an_exit_code(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    assert (await runtime.exec("sh -c 'exit 3' | cat")).exit_code == 3


async def test_a_signal_is_128_and_its_number(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    assert (await runtime.exec(["sh", "-c", "kill -SEGV $$"])).exit_code == 128 + 11


async def test_a_missing_program_is_the_commands_fault(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    missing = await runtime.exec(["no-such-program"])
    assert missing.exit_code == 127
    assert b"not found" in missing.stderr
    assert (await runtime.exec("true", cwd="/no/such/folder")).exit_code == 126


@pytest.mark.parametrize(
    ("argv", "env", "said"),
    [
        (["printf", "a\0b"], {}, b"cannot be handed over"),
        (["true"], {"NAME": "a\0b"}, b"cannot be handed over"),
        (["true"], {"A=B": "c"}, b"cannot be handed over"),
        (["true", "x" * 200_000], {}, b"Argument list too long"),
        (["true"], {"LONG": "x" * 200_000}, b"Argument list too long"),
    ],
)
async def test_what_no_kernel_takes_is_the_commands_fault_and_says_so(
    sandboxes: Sandboxes, argv: list[str], env: dict[str, str], said: bytes
) -> None:
    runtime = await sandboxes.make()
    result = await runtime.exec(argv, env=env)
    assert result.exit_code == 126
    assert said in result.stderr


async def test_standard_input(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    data = os.urandom(300_000)
    assert (await runtime.exec(["cat"], stdin=data)).stdout == data
    assert (await runtime.exec(["cat"])).stdout == b""


async def test_the_environment_is_clean(sandboxes: Sandboxes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_NODE", "x")
    runtime = await sandboxes.make(env={"A": "1", "B": "2"})
    inside = dict(line.split("=", 1) for line in (await runtime.exec(["env"], env={"B": "3"})).text.splitlines())
    assert (inside["A"], inside["B"], inside["HOME"]) == ("1", "3", runtime.home)
    assert inside["POLAR_SANDBOX"] == runtime.place.id
    assert inside["POLAR_OWNER"] == runtime.place.owner
    assert "SECRET_OF_THE_NODE" not in inside


async def test_workdir_and_home_are_there_and_writable(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    result = await runtime.exec('pwd; touch here "$HOME/there" && (cd "$HOME" && pwd)')
    assert result.text.split() == [runtime.workdir, runtime.home]
    assert (await runtime.exec("ls", cwd=runtime.home)).stdout == b"there\n"


async def test_output_comes_while_it_runs_and_only_its_end_is_kept(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    heard: list[tuple[str, bytes]] = []
    running = asyncio.create_task(
        runtime.exec(
            "echo first; while [ ! -e go ]; do sleep 0.02; done; head -c 100000 /dev/zero; echo last",
            on_output=lambda *one: heard.append(one),
            keep_bytes=10,
        )
    )
    await soon(lambda: ("stdout", b"first\n") in heard)
    await runtime.exec("touch go")
    result = await running
    assert (result.stdout, result.truncated) == (b"\0\0\0\0\0last\n", True)
    assert sum(len(data) for _, data in heard) == 100_000 + len("first\nlast\n")


async def test_what_listening_raises_is_raised(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()

    def full(stream: str, data: bytes) -> None:
        raise OSError(28, "no space left")

    with pytest.raises(OSError, match="no space left"):
        await runtime.exec("echo hello", on_output=full)


async def test_a_timeout_ends_everything_however_it_hides(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    begun = time.monotonic()
    result = await runtime.exec(HIDING, timeout_s=0.7)
    assert (result.exit_code, result.timed_out, result.ok) == (124, True, False)
    assert result.stdout == b"ready\n"
    assert time.monotonic() - begun < 6
    assert await alive(runtime) == []


async def test_a_cancelled_command_ends_everything_however_it_hides(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    heard = asyncio.Event()
    running = asyncio.create_task(runtime.exec(HIDING, on_output=lambda *_: heard.set()))
    await heard.wait()
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await alive(runtime) == []


async def test_a_fork_bomb_ends_with_its_timeout(sandboxes: Sandboxes) -> None:
    if sandboxes.name == "plain":
        pytest.skip("plain cannot count a sandbox's processes alone, so a bomb would hit the machine")
    runtime = await sandboxes.make(pids=60)
    result = await runtime.exec("bomb() { bomb | bomb & }; while :; do bomb 2>/dev/null; sleep 0.01; done", timeout_s=1.0)
    assert result.timed_out
    await runtime.end_processes()
    assert (await runtime.exec("echo well")).stdout == b"well\n"


async def test_what_a_command_leaves_running_goes_on_and_holds_nothing_up(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    begun = time.monotonic()
    result = await runtime.exec(f"sleep 60.{MARK} & echo started")
    assert result.stdout == b"started\n"
    assert time.monotonic() - begun < 5
    assert len(await alive(runtime)) == 1
    await runtime.end_processes()
    assert await alive(runtime) == []
    assert (await runtime.exec("echo well")).stdout == b"well\n"


async def test_what_a_command_leaves_running_may_print_on_and_holds_nothing_up(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    async with asyncio.timeout(30):
        result = await runtime.exec("(while :; do echo again; sleep 0.02; done) & echo done; exit 3", keep_bytes=1 << 20)
    assert result.exit_code == 3
    assert b"done\n" in result.stdout


async def test_all_that_was_printed_by_the_end_is_read_although_something_prints_on(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    async with asyncio.timeout(60):
        result = await runtime.exec("(while :; do echo again >&2; sleep 0.02; done) & head -c 3000000 /dev/zero", keep_bytes=1 << 22)
    assert len(result.stdout) == 3_000_000


async def test_a_timeout_of_one_command_leaves_others_alone(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    longer = asyncio.create_task(runtime.exec("sleep 1.5; echo done"))
    assert (await runtime.exec(f"sleep 66.{MARK}", timeout_s=0.3)).timed_out
    assert (await longer).stdout == b"done\n"


async def test_killing_everything_inside_is_the_commands_own_fault(sandboxes: Sandboxes) -> None:
    if sandboxes.name == "plain":
        pytest.skip("without namespaces kill -1 hits the whole machine")
    runtime = await sandboxes.make()
    result = await runtime.exec(f"sleep 61.{MARK} & kill -9 -1; sleep 0.2; echo survived")
    assert result.exit_code in (0, 137)
    assert (await runtime.exec("echo well")).stdout == b"well\n"
    assert await alive(runtime) == []


async def test_many_commands_at_once(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    results = await asyncio.gather(*(runtime.exec(f"echo {number}") for number in range(40)))
    assert [one.text.strip() for one in results] == [str(number) for number in range(40)]


async def test_a_stopped_sandbox_says_so_and_stops_twice(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    running = asyncio.create_task(runtime.exec(f"sleep 67.{MARK}"))
    await asyncio.sleep(0.3)
    await runtime.stop()
    await runtime.stop()
    with pytest.raises(SandboxError):
        await running
    with pytest.raises(SandboxError):
        await runtime.exec("true")


async def test_a_keeper_that_dies_is_a_sandbox_error(sandboxes: Sandboxes) -> None:
    runtime = await sandboxes.make()
    line = getattr(runtime, "line", None)
    if line is None:
        pytest.skip("this backend has no keeper")
    running = asyncio.create_task(runtime.exec(HIDING))
    await asyncio.sleep(0.5)
    os.kill(line.keeper_pid, 9)
    with pytest.raises(SandboxError, match="keeper"):
        await running
    await runtime.stop()
    assert [pid for pid in os.listdir("/proc") if pid.isdigit() and _belongs(pid, runtime.place.id)] == []


def _belongs(pid: str, sandbox: str) -> bool:
    try:
        return f"POLAR_SANDBOX={sandbox}".encode() in Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return False


async def test_any_path_as_workdir_and_target(sandboxes: Sandboxes, tmp_path: Path) -> None:
    if sandboxes.name == "plain":
        pytest.skip("without namespaces there is only the sandbox's own folder")
    runtime = await sandboxes.make(workdir="/app/deep")
    assert (await runtime.exec("pwd; touch x && ls")).text.split() == ["/app/deep", "x"]
    await runtime.write("/tests/run.sh", b"echo tested", mode=0o755)
    assert (await runtime.exec(["/tests/run.sh"])).exit_code in (0, 126)
    assert (await runtime.exec("sh /tests/run.sh")).stdout == b"tested\n"


async def test_mounts_are_seen_read_only_unless_said(sandboxes: Sandboxes, tmp_path: Path) -> None:
    if sandboxes.name == "plain":
        pytest.skip("without namespaces nothing can be mounted")
    tools, results = tmp_path / "tools", tmp_path / "results"
    for folder in (tools, results):
        folder.mkdir()
        folder.chmod(0o777)
    (tools / "one").write_text("tool")
    runtime = await sandboxes.make(
        mounts=[
            {"source": str(tools), "target": "/opt/made/for/tests"},
            {"source": str(results), "target": "/results", "read_only": False},
        ]
    )
    result = await runtime.exec("cat /opt/made/for/tests/one; touch /opt/made/for/tests/two; touch /results/made")
    assert result.stdout == b"tool"
    assert [one.name for one in tools.iterdir()] == ["one"]
    assert [one.name for one in results.iterdir()] == ["made"]


async def test_the_users_name_is_known(sandboxes: Sandboxes) -> None:
    if sandboxes.name == "plain":
        pytest.skip("without namespaces the sandbox's user is this one")
    runtime = await sandboxes.make()
    assert (await runtime.exec("whoami")).stdout == (b"root\n" if sandboxes.name == "docker" else b"agent\n")
