"""The steps that prepare a started sandbox: files in, commands run, in order, each with its own attempts. Knows no backend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from polar.errors import ConfigError, SandboxError, UnsafePath
from polar.runtime.base import ExecResult, Runtime
from polar.runtime.spec import Step


async def prepare(runtime: Runtime, steps: Sequence[Step], *, task_folder: Path | None, log: Path | None = None) -> None:
    """Runs the steps. Relative sources are relative to `task_folder`. `log` gets every step with all its output.

    Raises `SandboxError` that names the step, its exit code and the end of its output, after the step's last attempt, and `ConfigError` at
    once where its source is not there. Waiting between attempts starts at `retry_backoff` seconds and doubles.
    """
    for number, step in enumerate(steps, 1):
        name = f"prepare step {number} of {len(steps)} ({_told(step)})"
        for attempt in range(1, step.max_attempts + 1):
            problem = await _attempt(runtime, step, task_folder, log, name)
            if problem is None:
                break
            if attempt == step.max_attempts:
                tries = f" (attempt {attempt} of {step.max_attempts})" if attempt > 1 else ""
                raise SandboxError(f"{name} failed{tries}: {problem}")
            await asyncio.sleep(step.retry_backoff * 2 ** (attempt - 1))


def _told(step: Step) -> str:
    if step.type == "exec":
        line = " ".join((step.command or "").split())
        return f"exec: {line if len(line) <= 80 else line[:77] + '...'}"
    return f"{step.type}: {step.source} to {step.target}"


async def _attempt(runtime: Runtime, step: Step, task_folder: Path | None, log: Path | None, name: str) -> str | None:
    """What went wrong with the step itself, or `None`. A `SandboxError` of the runtime counts as one more failure of the step."""
    _write(log, f"== {name}\n".encode())
    try:
        if step.type == "exec":
            return _judge(await _run(runtime, step, log), step)
        source = Path(step.source or "")
        if not source.is_absolute():
            if task_folder is None:
                raise ConfigError(f"{name}: the source {step.source!r} is relative, and the task has no folder")
            source = task_folder / source
        if step.type == "upload_file" and not source.is_file():
            raise ConfigError(f"{name}: there is no file {source}")
        if step.type == "upload_dir" and not source.is_dir():
            raise ConfigError(f"{name}: there is no folder {source}")
        async with asyncio.timeout(step.timeout_seconds):
            await runtime.upload(source, step.target or "")
    except TimeoutError:
        return f"the copy was not done after {step.timeout_seconds:g} s"
    except (SandboxError, UnsafePath) as error:
        return str(error)
    return None


async def _run(runtime: Runtime, step: Step, log: Path | None) -> ExecResult:
    return await runtime.exec(
        step.command or "",
        cwd=step.cwd,
        env=step.env,
        timeout_s=step.timeout_seconds,
        on_output=None if log is None else lambda _, data: _write(log, data),
    )


def _judge(result: ExecResult, step: Step) -> str | None:
    if result.ok:
        return None
    how = f"its {step.timeout_seconds:g} s ran out" if result.timed_out else f"exit code {result.exit_code}"
    tail = result.tail()
    return f"{how}; the end of its output: {tail}" if tail else f"{how}, without output"


def _write(log: Path | None, data: bytes) -> None:
    if log is not None:
        with log.open("ab") as file:
            file.write(data)
