"""Runs a harness once: a home and an environment of its own, output in files, a wall clock, and nothing left behind.

Knows no gateway and no sandbox: isolation beyond a private home is the runtime's business. The child gets an environment made from
nothing, so no key, proxy or setting of the user's can leak in. Every process of a run carries a marker in its environment;
that is how those that leave the process group (agents start shells that way) are found and stopped at the end.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from polar.errors import ConfigError
from polar.harness.base import DEFAULTS, Command, Endpoint, Harness, Options, named
from polar.harness.environment import SYSTEM_PATH, clean
from polar.harness.home import Home
from polar.harness.install import Installation, installed
from polar.harness.shell import INSTRUCTION_FILE

MARKER = "POLAR_RUN"
_GRACE_S = 3.0


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended. `problem` is `None` exactly when it succeeded, whatever `exit_code` says; `exit_code` is negative for a signal."""

    harness: str
    exit_code: int
    duration_s: float
    timed_out: bool
    stdout: Path
    stderr: Path
    answer: str | None
    problem: str | None

    @property
    def ok(self) -> bool:
        return self.problem is None


async def launch(
    name: str,
    prompt: str,
    endpoint: Endpoint,
    *,
    cwd: Path,
    home: Path,
    timeout_s: float,
    options: Options = DEFAULTS,
    installation: Installation | None = None,
    resume: bool = False,
    env: Mapping[str, str] | None = None,
) -> RunResult:
    """Runs a harness on `prompt` in the folder `cwd` and waits for its end, or for `timeout_s`.

    `home` keeps the harness's settings and conversations: the same home and folder with `resume` continue the latest one. Output
    goes to `home/polar-run/`. Raises `ConfigError` where the harness is not installed or cannot speak the endpoint's dialect.
    """
    harness = named(name)
    installation = installation or installed(name)
    if installation is None:
        raise ConfigError(f"{name} {harness.version} is not installed; run: polar harness install {name}")
    marker = secrets.token_hex(16)
    command, environment, files = _prepare(harness, prompt, endpoint, options, installation, cwd=cwd, home=home, resume=resume)
    environment |= {**(env or {}), MARKER: marker}
    started = time.monotonic()
    with open(files.stdin, "rb") as source, open(files.stdout, "wb") as out, open(files.stderr, "wb") as err:  # noqa: ASYNC230
        process = await asyncio.create_subprocess_exec(
            *command.argv, cwd=cwd, env=environment, stdin=source, stdout=out, stderr=err, start_new_session=True
        )
        try:
            await asyncio.wait_for(process.wait(), timeout_s)
            timed_out = False
        except TimeoutError:
            timed_out = True
        finally:
            await _stop(process, marker)
    duration_s = time.monotonic() - started
    exit_code = process.returncode if process.returncode is not None else -signal.SIGKILL
    return _result(harness, exit_code, duration_s, timed_out, files)


def run(
    name: str,
    prompt: str,
    endpoint: Endpoint,
    cwd: Path,
    timeout_s: float,
    *,
    home: Path,
    options: Options = DEFAULTS,
    resume: bool = False,
) -> RunResult:
    """`launch` for callers without an event loop."""
    return asyncio.run(launch(name, prompt, endpoint, cwd=cwd, home=home, timeout_s=timeout_s, options=options, resume=resume))


@dataclass(frozen=True, slots=True)
class _Files:
    stdin: Path
    stdout: Path
    stderr: Path


def _prepare(
    harness: Harness,
    prompt: str,
    endpoint: Endpoint,
    options: Options,
    installation: Installation,
    *,
    cwd: Path,
    home: Path,
    resume: bool,
) -> tuple[Command, dict[str, str], _Files]:
    home.mkdir(parents=True, exist_ok=True)
    cwd.mkdir(parents=True, exist_ok=True)
    inside = Home(home)
    settings = harness.configure(inside, endpoint, options)
    command = harness.command(installation.program, prompt, endpoint, options, resume=resume)
    folder = home / "polar-run"
    number = len(list(folder.glob("*.stdout")))
    instruction = inside.write("polar-run/instruction.md", prompt)
    stdin = Path(inside.write(f"polar-run/{number}.stdin", command.stdin)) if command.stdin is not None else Path(os.devnull)
    inside.save(home)
    environment = {**clean(home, installation.path, SYSTEM_PATH), INSTRUCTION_FILE: str(instruction), **settings, **command.env}
    return command, environment, _Files(stdin, folder / f"{number}.stdout", folder / f"{number}.stderr")


def _result(harness: Harness, exit_code: int, duration_s: float, timed_out: bool, files: _Files) -> RunResult:
    out, err = files.stdout.read_text(errors="replace"), files.stderr.read_text(errors="replace")
    problem = f"still running after {duration_s:.0f} s" if timed_out else harness.problem(exit_code, out, err)
    return RunResult(harness.name, exit_code, duration_s, timed_out, files.stdout, files.stderr, harness.answer(out), problem)


async def _stop(process: asyncio.subprocess.Process, marker: str) -> None:
    """Ends the process and all that it started: politely first, then not."""
    for number, wait_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        _signal_all(process, marker, number)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if process.returncode is not None and not _members(marker):
                return
            await asyncio.sleep(0.05)
    await process.wait()


def _signal_all(process: asyncio.subprocess.Process, marker: str, number: int) -> None:
    for pid in _members(marker):
        _ignore_gone(os.kill, pid, number)
    if process.returncode is None:
        _ignore_gone(os.killpg, process.pid, number)


def _ignore_gone(send: Callable[[int, int], None], pid: int, number: int) -> None:
    try:
        send(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def _members(marker: str) -> list[int]:
    """The processes that carry this run's marker. Linux has `/proc`; elsewhere only the process group is stopped."""
    if not sys.platform.startswith("linux"):
        return []
    needle = f"{MARKER}={marker}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                with open(f"/proc/{entry.name}/environ", "rb") as file:
                    if needle in file.read():
                        found.append(int(entry.name))
            except OSError:
                continue
    return found
