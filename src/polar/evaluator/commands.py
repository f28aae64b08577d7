"""Commands of evaluators inside a sandbox: with a time limit, one stream of output, and a log for people. Knows no reward."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from polar.errors import ConfigError, EvaluatorError
from polar.evaluator.budget import Budget
from polar.runtime.base import Runtime

KEEP_BYTES = 8 << 20
"""Of the output of tests; what comes before is cut off."""

GIT_ENV: Mapping[str, str] = {
    "GIT_CONFIG_COUNT": "4",
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "core.hooksPath",
    "GIT_CONFIG_VALUE_1": "/dev/null",
    "GIT_CONFIG_KEY_2": "core.fsmonitor",
    "GIT_CONFIG_VALUE_2": "false",
    "GIT_CONFIG_KEY_3": "gc.auto",
    "GIT_CONFIG_VALUE_3": "0",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "LC_ALL": "C",
}
"""For every git command on a repository that somebody else wrote: no hook and no monitor of it is run."""

SAFE_ENV: Mapping[str, str] = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
"""For tests that run git on a repository of the task's own, whoever owns its files."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished test command. `output` is stdout and stderr as they came, its last `KEEP_BYTES`. `timed_out`: the agent's code took
    longer than tests are given."""

    exit_code: int
    output: str
    timed_out: bool
    truncated: bool
    duration_s: float


async def run_tests(
    runtime: Runtime,
    command: str,
    *,
    budget: Budget,
    limit_s: float | None = None,
    cwd: str | None = None,
    env: Mapping[str, str] | None = None,
    user: str | None = None,
    log: Path | None = None,
) -> Ran:
    """Runs code of the agent's. Raises `EvaluatorError` where the time ran out and the tests had not had a fair share of it."""
    allowance = budget.allowance(limit_s)
    result = await runtime.exec(f"exec 2>&1\n{command}", cwd=cwd, env=env, timeout_s=allowance.seconds, keep_bytes=KEEP_BYTES, user=user)
    if log is not None:
        await asyncio.to_thread(keep, log, result.stdout + result.stderr)
    if result.timed_out and not allowance.fair:
        raise EvaluatorError(
            f"only {allowance.seconds:.1f} s of the evaluation were left for the tests, which did not finish in them; "
            "raise budget.evaluation_seconds"
        )
    return Ran(
        result.exit_code, result.text + result.stderr.decode(errors="replace"), result.timed_out, result.truncated, result.duration_s
    )


def keep(path: Path, content: bytes) -> None:
    """Writes a file for people; parents are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def own_path(runtime: Runtime, path: str) -> str:
    """Where a folder of the evaluator's, such as `/tests`, lies in this sandbox: there, or below its private home where absolute paths
    inside are the host's own (`local`). Relative paths stay."""
    home = PurePosixPath(runtime.home)
    if not path.startswith("/") or not home.is_relative_to(PurePosixPath(str(runtime.place.folder))):
        return path
    return str(home / "evaluator" / path.lstrip("/"))


_EMPTY = 'rm -rf -- "$1" && mkdir -p -- "$1" && chmod 777 -- "$1"'


async def emptied(runtime: Runtime, path: str, *, budget: Budget) -> str:
    """Makes an empty folder of the evaluator's, whatever was there: at `path` where the sandbox lets it, else below its private home; its
    path. Raises `EvaluatorError`."""
    tries: list[tuple[str, str | None]] = [(own_path(runtime, path), None), (f"{runtime.home}/evaluator/{path.strip('/')}", None)]
    if not runtime.shares_host_network:  # never as root in a sandbox that is this machine itself
        tries.insert(1, (path, "root"))
    said = ""
    for at, user in tries:
        try:
            done = await runtime.exec(["sh", "-c", _EMPTY, "sh", at], timeout_s=min(60.0, budget.left()), user=user)
        except ConfigError as error:  # this sandbox has no other user
            said = str(error)
            continue
        if done.ok:
            return at
        said = done.tail()
    raise EvaluatorError(f"{path} could not be made in the evaluator's sandbox: {said}")
