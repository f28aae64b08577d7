"""A harness at work in a sandbox, whatever isolates it: install, set up, run, collect.

Knows no gateway beyond the endpoint that it is given, no evaluator and no stage. What fails on this side raises `HarnessError` or
`ConfigError`, what fails in the sandbox itself `SandboxError`; how the harness ends is data (`HarnessRun.problem`), never an exception.

Order: `AgentRun(spec)`, `install`, add `mounts()` to the runtime's spec, start that, `set_up`, `run`, `collect`. One object a session.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from polar.errors import ConfigError, SandboxError, UnsafePath
from polar.harness.agent_options import harness_of, read_options
from polar.harness.base import Command, Endpoint, Options
from polar.harness.environment import SYSTEM_PATH, clean
from polar.harness.home import Home
from polar.harness.install import Progress
from polar.harness.mcp import check_servers
from polar.harness.output import Output, mask, mask_files
from polar.harness.patch import WorkFolder
from polar.harness.placement import Placed, Placement
from polar.harness.shell import INSTRUCTION_FILE, Shell, ShellStep, read_steps
from polar.harness.spec import AgentSpec
from polar.runtime.base import OnOutput, Runtime, Stream
from polar.runtime.spec import MountSpec, RuntimeSpec

KEPT_BYTES = 8_000_000
MAX_ANSWER = 1_000_000
"""Characters: of a longer answer the end is taken, since it travels with every result. All of it is in `harness.stdout`."""
MAX_TRANSCRIPT_BYTES = 200_000_000
_INSTRUCTION = ".polar/instruction.md"
_FOLDERS = {"ARTIFACTS_DIR": "artifacts", "LOGS_DIR": "logs", "AGENT_LOG_DIR": "logs/agent"}
"""As the reference system names them, below the home."""


@dataclass(frozen=True, slots=True)
class HarnessRun:
    """How a run ended. `problem` is `None` exactly when it succeeded, whatever `exit_code` says (128 + n for a signal n). The two files
    hold what it printed, with the session's key masked."""

    exit_code: int
    problem: str | None
    timed_out: bool
    duration_s: float
    answer: str | None
    stdout: Path
    stderr: Path
    out_of_memory: bool = False
    """Whether the sandbox's memory limit is known to have ended it."""

    @property
    def ok(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class Collected:
    """What a run left. `patch` is of the work folder against its start state: empty where nothing changed, `None` where it cannot be told
    (`warnings` say why). `transcript` is a folder with the CLI's own session files, `artifacts` what was put into `$ARTIFACTS_DIR`."""

    patch: bytes | None
    transcript: Path | None
    warnings: tuple[str, ...] = ()
    artifacts: Path | None = None
    patch_refused: str | None = None
    """Why there is no patch although the start state was recorded: of what the agent left, none can be made."""


@dataclass(slots=True)
class _Ready:
    """What `set_up` found out and `run` needs."""

    endpoint: Endpoint
    options: Options
    placed: Placed
    environment: dict[str, str]
    system_path: str
    work: WorkFolder
    warnings: list[str] = field(default_factory=list)


class AgentRun:
    """One agent for one session. Raises `ConfigError` for an agent that cannot be, before anything is started: an unknown harness, an
    MCP server, skills or a dialect that it does not take, settings of the wrong type, a shell without a command.

    `variables` (such as SESSION_ID and TASK_ID) go into the agent's environment. `proven` is a map that the caller keeps for as long as it
    likes: images in which a harness was seen to run are remembered there with its version, and not tried again.
    """

    def __init__(
        self,
        spec: AgentSpec,
        *,
        task_folder: Path | None,
        variables: Mapping[str, str] | None = None,
        proven: MutableMapping[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.task_folder = task_folder
        self.variables = dict(variables or {})
        self.harness = harness_of(spec)
        self.dialect = spec.dialect or self.harness.dialects[0]
        self.steps = read_steps(spec.custom_shell)
        self._proven = proven if proven is not None else {}
        self._placement = Placement(self.harness, spec.install)
        self._ready: _Ready | None = None
        self._check()

    def _check(self) -> None:
        name = self.harness.name
        if self.dialect not in self.harness.dialects:
            raise ConfigError(f"{name} speaks {', '.join(self.harness.dialects)}, not {self.dialect}")
        check_servers(name, self.spec.mcp_servers, self.harness.mcp_transports)
        if self.spec.skills_path is not None and self.harness.skills_folder is None:
            raise ConfigError(f"{name} has no skills: remove skills_path, or choose another harness")
        options = read_options(self.spec, context=None)
        if self.steps and not isinstance(self.harness, Shell):
            raise ConfigError(f"custom_shell is for the harness shell, not for {name}")
        if isinstance(self.harness, Shell) and options.settings:
            raise ConfigError(f"the harness shell has no settings of its own: remove {', '.join(map(repr, options.settings))}")
        if isinstance(self.harness, Shell) and not self.steps and not options.extra_args:
            raise ConfigError("the harness shell needs a command in custom_shell, such as: my-agent --task {{INSTRUCTION}}")

    def endpoint(self, base_url: str, key: str, served_model: str) -> Endpoint:
        """Where this agent finds the model: in its dialect, under the name that the task gives it or the served one."""
        return Endpoint(base_url, key, self.dialect, self.spec.model_name or served_model)

    @property
    def version(self) -> str | None:
        """What the program in the sandbox says it is; `None` before `set_up`, and where there is none to ask."""
        return self._ready.placed.version if self._ready is not None else None

    async def install(self, progress: Progress = lambda line: None) -> None:
        """Puts the CLI into this node's cache, unless it is there or is not to come from here. Raises `HarnessError`."""
        await self._placement.install(progress)

    def mounts(self, spec: RuntimeSpec | None = None) -> list[MountSpec]:
        """What the sandbox must see of this machine, read-only: to be added to `spec`, the sandbox's own, before it is made. Without
        `spec` they are for a backend that can mount anywhere."""
        return self._placement.mounts(spec)

    async def set_up(self, runtime: Runtime, endpoint: Endpoint, *, context: int | None) -> None:
        """Makes a started sandbox ready: the CLI in it, seen to run; its configuration, MCP servers and skills; the start state of the
        work folder. `context` is the model's length in tokens."""
        options = read_options(self.spec, context=context)
        system_path = await _system_path(runtime)
        seen = f"{self.harness.name} {self.harness.version} {self.spec.install} {runtime.backend} {runtime.spec.image}"
        placed = await self._placement.place(runtime, system_path, version=self._proven.get(seen))
        if placed.version is not None:
            self._proven[seen] = placed.version
        home = Home(runtime.home)
        environment = self.harness.configure(home, endpoint, options)
        await _upload(runtime, home)
        if self.spec.skills_path is not None:
            await runtime.upload(self._skills(self.spec.skills_path), f"{runtime.home}/{self.harness.skills_folder}")
        await runtime.exec(["mkdir", "-p", *(f"{runtime.home}/{name}" for name in _FOLDERS.values())], timeout_s=30)
        work = WorkFolder(runtime, f"{runtime.home}/.polar/start.git")
        warning = await work.record()
        self._ready = _Ready(endpoint, options, placed, environment, system_path, work, [warning] if warning else [])

    async def run(
        self, runtime: Runtime, instruction: str, *, folder: Path, timeout_s: float, on_output: OnOutput | None = None
    ) -> HarnessRun:
        """Runs the harness to its end, or to the end of its time, when everything that it started is stopped. What it prints goes to
        `folder` while it runs, and to `on_output`, both without the session's key. Raises `SandboxError`."""
        ready = self._set_up()
        await runtime.write(f"{runtime.home}/{_INSTRUCTION}", instruction.encode(), mode=0o600)
        started = time.monotonic()
        exit_code, timed_out, tail, errors, out_of_memory = 0, False, b"", b"", False
        with Output(folder, ready.endpoint.key) as output:

            def received(stream: Stream, data: bytes) -> None:
                sure = output.logs[stream].write(data)
                if on_output is not None and sure:
                    on_output(stream, sure)

            for step in self.steps or (None,):
                left = timeout_s - (time.monotonic() - started)
                if left <= 0:
                    exit_code, timed_out = 124, True
                    break
                command = self._command(ready, instruction, step)
                limit = left if step is None or step.timeout_s is None else min(left, step.timeout_s)
                done = await runtime.exec(
                    command.argv,
                    cwd=step.cwd if step is not None else None,
                    env={**self._environment(runtime, ready, command), **(step.env if step is not None else {})},
                    stdin=(command.stdin or "").encode(),
                    timeout_s=limit,
                    on_output=received,
                    keep_bytes=KEPT_BYTES,
                )
                exit_code, tail, errors, out_of_memory = done.exit_code, done.stdout, done.stderr, done.out_of_memory
                timed_out = done.timed_out and limit == left
                if not done.ok:
                    break
        duration_s = time.monotonic() - started
        out = output.logs["stdout"]
        key = ready.endpoint.key.encode()
        said = await asyncio.to_thread(out.path.read_bytes) if not out.cut and len(self.steps) < 2 else mask(tail, key)
        problem, answer = await asyncio.to_thread(self._judge, exit_code, timed_out, duration_s, said, mask(errors, key))
        return HarnessRun(exit_code, problem, timed_out, duration_s, answer, out.path, output.logs["stderr"].path, out_of_memory)

    async def collect(self, runtime: Runtime, folder: Path) -> Collected:
        """Fetches patch, transcript and artifacts into `folder`, after a timeout as well. What the agent did to them is told in the
        warnings; raises `SandboxError` only where the sandbox itself fails."""
        ready = self._set_up()
        patch, more = await ready.work.patch(folder / "patch.diff")
        warnings = [*ready.warnings, *more]
        transcript = await self._fetch(runtime, self.harness.transcripts, folder / "transcript", warnings)
        artifacts = await self._fetch(runtime, (_FOLDERS["ARTIFACTS_DIR"],), folder / "artifacts", warnings, flat=True)
        refused = "; ".join(more) if patch is None and ready.work.tree is not None else None
        return Collected(patch, transcript, tuple(warnings), artifacts, refused)

    def _set_up(self) -> _Ready:
        if self._ready is None:
            raise RuntimeError("AgentRun.set_up comes first")
        return self._ready

    def _skills(self, given: str) -> Path:
        path = Path(given)
        if not path.is_absolute():
            if self.task_folder is None:
                raise ConfigError(f"skills_path {given!r} is relative, and the task has no folder")
            path = self.task_folder / path
        if not path.is_dir():
            raise ConfigError(f"skills_path: there is no folder {path} on this node")
        return path

    def _command(self, ready: _Ready, instruction: str, step: ShellStep | None) -> Command:
        options = ready.options if step is None else _with_command(ready.options, step.command)
        return self.harness.command(ready.placed.program, instruction, ready.endpoint, options)

    def _environment(self, runtime: Runtime, ready: _Ready, command: Command) -> dict[str, str]:
        """The preset's, the sandbox's over it, the agent's over both; except that the home is the home, and that the CLI and its Node.js
        come first on whatever PATH is asked for."""
        home = PurePosixPath(runtime.home)
        merged = {
            **clean(home, (), ready.system_path),
            **{name: str(home / folder) for name, folder in _FOLDERS.items()},
            "SESSION_DIR": str(home),
            **self.variables,
            INSTRUCTION_FILE: str(home / _INSTRUCTION),
            **ready.environment,
            **command.env,
            **runtime.spec.env,
            **self.spec.env,
        }
        return {**merged, "HOME": str(home), "PATH": ":".join((*ready.placed.path, merged["PATH"]))}

    def _judge(self, exit_code: int, timed_out: bool, duration_s: float, stdout: bytes, stderr: bytes) -> tuple[str | None, str | None]:
        out, err = stdout.decode(errors="replace"), stderr.decode(errors="replace")
        problem = f"still running after {duration_s:.0f} s" if timed_out else self.harness.problem(exit_code, out, err)
        answer = self.harness.answer(out)
        return problem, answer if answer is None or len(answer) <= MAX_ANSWER else answer[-MAX_ANSWER:]

    async def _fetch(
        self, runtime: Runtime, names: tuple[str, ...], target: Path, warnings: list[str], *, flat: bool = False
    ) -> Path | None:
        """Files and folders of the agent's home, each under its name in `target`; `flat`: the content of the only one."""
        shutil.rmtree(target, ignore_errors=True)
        for name in names:
            try:
                await runtime.download(f"{runtime.home}/{name}", target / PurePosixPath(name).name, max_bytes=MAX_TRANSCRIPT_BYTES)
            except FileNotFoundError:
                continue
            except UnsafePath as error:
                warnings.append(f"{name} was not fetched: {error}")
        if flat:
            await asyncio.to_thread(_flattened, target)
        return await asyncio.to_thread(_masked, target, self._set_up().endpoint.key)


def _flattened(target: Path) -> None:
    """Puts the only folder's content in its parent's place. An agent may have made something else of it: that stays where it is."""
    inner = list(target.iterdir()) if target.is_dir() else []
    if len(inner) == 1 and inner[0].is_dir() and not inner[0].is_symlink():
        aside = target.with_name(f".{target.name}")
        inner[0].rename(aside)
        target.rmdir()
        aside.rename(target)


def _masked(folder: Path, secret: str) -> Path | None:
    """The folder, masked; `None` where there is none."""
    if not folder.exists():
        return None
    mask_files(folder, secret)
    return folder


async def _system_path(runtime: Runtime) -> str:
    probe = await runtime.exec(["/bin/sh", "-c", 'printf %s "$PATH"'], timeout_s=60)
    if probe.timed_out:
        raise SandboxError("the sandbox did not run a shell within 60 s")
    return probe.text.strip() or SYSTEM_PATH


async def _upload(runtime: Runtime, home: Home) -> None:
    """All files at once. The staged copy holds the key, and goes at once."""
    staged = runtime.place.folder / "staged-home"
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(mode=0o700, parents=True)
    try:
        home.save(staged)
        if home.files:
            await runtime.upload(staged, runtime.home)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _with_command(options: Options, line: str) -> Options:
    return replace(options, extra_args=(line,))
