"""Tasks as Harbor folders: reads one, says what a rollout of it is, and grades plain ones on this machine.

The layout is Harbor's (https://www.harborframework.com/docs/tasks): `instruction.md`, `task.toml`, `environment/`, `tests/test.sh`,
`solution/solve.sh`. The verifier writes its reward to `reward.txt` in `$VERIFIER_LOGS`, which is `/logs/verifier` in a container.
`prepare`, `solve` and `grade` work in a plain folder without any sandbox: for the bundled demo tasks, which are trusted. Knows no harness
and no model.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polar.errors import ConfigError, EvaluatorError
from polar.rollout.models import Budget, EvaluatorSpec
from polar.runtime.spec import RuntimeSpec
from polar.tasks import manifest as manifests
from polar.tasks.environment import plain_steps, runtime_for
from polar.tasks.manifest import Manifest

Split = Literal["train", "held_out"]
BUNDLED = Path(__file__).parent / "bundled"
GRADING_S = 120.0
"""Beyond the verifier's own time, for bringing the agent's work over."""

_CANARY = re.compile(r"(?:\s*(?:<!--|#)[^\n]*canary[^\n]*\n)+", re.IGNORECASE)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


@dataclass(frozen=True, slots=True)
class Task:
    """One task folder. Timeouts in seconds. `metadata` is the table of that name in `task.toml`, unread."""

    name: str
    folder: Path
    instruction: str
    manifest: Manifest

    @property
    def metadata(self) -> dict[str, Any]:
        return self.manifest.metadata

    @property
    def agent_timeout_s(self) -> float:
        return self.manifest.agent.timeout_sec

    @property
    def verifier_timeout_s(self) -> float:
        return self.manifest.verifier.timeout_sec

    @property
    def split(self) -> Split:
        """Tasks that do not say are for training."""
        return "held_out" if self.metadata.get("split") == "held_out" else "train"

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the task says and nothing here heeds, and where grading here differs from Harbor's."""
        found = list(self.manifest.warnings)
        if self.manifest.verifier.environment_mode is None and self.manifest.polar.evaluator is None and self._needs_image:
            found.append(
                "Harbor would grade in the agent's own sandbox; here its work folder is carried into a fresh one. If the task is about "
                'anything outside of it, set verifier.environment_mode = "shared"'
            )
        return tuple(found)

    def oracle(self) -> Mapping[str, bytes] | None:
        """The files of the reference solution, `solve.sh` among them; `None` where there is none."""
        folder = self.folder / "solution"
        if not (folder / "solve.sh").is_file():
            return None
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}

    @property
    def noop_reward(self) -> float:
        """What doing nothing gives."""
        return self.manifest.polar.noop_reward

    @property
    def evaluator(self) -> EvaluatorSpec:
        """Who judges: the evaluator that the task names, or its `tests/test.sh`. Raises `ConfigError` for a variable of the
        verifier's environment that is not set here."""
        if self.manifest.polar.evaluator is not None:
            return self.manifest.polar.evaluator
        verifier = self.manifest.verifier
        config: dict[str, Any] = {"timeout_seconds": verifier.timeout_sec}
        if verifier.user is not None:
            config["user"] = verifier.user
        if verifier.environment_mode == "shared":
            config["in_place"] = True
        elif verifier.environment_mode == "separate":
            config["verifier_runtime"] = self._separate()
            config["artifacts"] = self.manifest.artifacts
            config["collect"] = [hook.command for hook in verifier.collect]
        return EvaluatorSpec(strategy="harbor", config=config, env=_resolved(self.name, verifier.env))

    def fields(self, runtime: RuntimeSpec) -> dict[str, Any]:
        """What the task says of its `TaskRequest`, in a sandbox like `runtime`: everything but the agent and how many. Raises
        `ConfigError` where that sandbox cannot be the task's."""
        own = self.manifest
        spec = runtime_for(self.name, self.folder, own.environment, runtime, plain=own.polar.plain)
        if own.agent.user is not None and spec.user is None:
            spec = spec.model_copy(update={"user": own.agent.user})
        return {
            "instruction": self.instruction,
            "runtime": spec,
            "evaluator": self.evaluator,
            "timeout_seconds": own.agent.timeout_sec,
            "budget": Budget(init_seconds=own.environment.build_timeout_sec, evaluation_seconds=own.verifier.timeout_sec + GRADING_S),
            "on_policy_failure": own.polar.on_policy_failure,
            "task_folder": str(self.folder.resolve()),
            "metadata": {key: value for key, value in self.metadata.items() if key != "polar"},
        }

    def hidden(self) -> Mapping[str, bytes]:
        """Content of every file that the agent must not see, by its path in the task's folder."""
        paths = [path for part in ("tests", "solution") for path in sorted((self.folder / part).rglob("*")) if path.is_file()]
        named = {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in paths}
        return {name: content for name, content in named.items() if name not in self.manifest.polar.public}

    @property
    def _needs_image(self) -> bool:
        try:
            plain_steps(self.name, self.folder / "environment", plain=self.manifest.polar.plain)
        except ConfigError:
            return True
        return False

    def _separate(self) -> dict[str, Any]:
        """Fields of the separate verifier's sandbox. Harbor's refusal of one with nothing to run is ours."""
        table = self.manifest.verifier.environment or manifests.Environment()
        fields: dict[str, Any] = {"env": table.env} if table.env else {}
        sizes = {"cpus": table.cpus, "memory_mb": table.memory_mb, "gpus": table.gpus or None, "workdir": table.workdir}
        fields |= {key: value for key, value in sizes.items() if value is not None}
        if table.docker_image is not None:
            return {**fields, "image": table.docker_image, "build_context": None, "prepare": []}
        if (self.folder / "tests" / "Dockerfile").is_file():
            return {**fields, "image": None, "build_context": str((self.folder / "tests").resolve()), "prepare": []}
        return fields


def load(folder: Path) -> Task:
    """Reads a task folder. Raises `ConfigError` where something is missing or malformed."""
    for needed in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (folder / needed).is_file():
            if (folder / "steps").is_dir() and (folder / "task.toml").is_file():
                raise ConfigError(f"{folder} is a Harbor task of several steps, which Polar does not run")
            raise ConfigError(f"{folder} is not a Harbor task: {needed} is missing")
    settings = manifests.read(folder / "task.toml")
    try:
        text = (folder / "instruction.md").read_text(encoding="utf-8-sig")
    except ValueError as error:
        raise ConfigError(f"{folder / 'instruction.md'}: {error}") from error
    canary = _CANARY.match(text)
    return Task(folder.resolve().name, folder, text[canary.end() if canary else 0 :].strip(), settings)


def load_all(folder: Path) -> list[Task]:
    """Every task folder directly below `folder`, by name."""
    return [load(path.parent) for path in sorted(folder.glob("*/task.toml"))]


def bundled(split: Split | None = None) -> list[Task]:
    """The demo tasks that come with Polar, by name; all, or one side of the split."""
    return [task for task in load_all(BUNDLED) if split is None or task.split == split]


def _resolved(task: str, env: Mapping[str, str]) -> dict[str, str]:
    """`${NAME}` and `${NAME:-default}` replaced by this process's environment, as Harbor does for verifiers."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ConfigError(f"task {task}: its verifier needs the environment variable {match[1]}, which is not set")
        return found

    return {key: _VARIABLE.sub(value, text) for key, text in env.items()}


# --- without a sandbox -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grade:
    """`reward` as the verifier wrote it, clamped to 0..1; `output` is what it printed."""

    reward: float
    output: str

    @property
    def passed(self) -> bool:
        return self.reward >= 1.0


def prepare(task: Task, workspace: Path) -> None:
    """Puts the task's files into the empty folder `workspace` (made if missing)."""
    workspace.mkdir(parents=True, exist_ok=True)
    files = task.folder / "environment" / "files"
    if files.is_dir():
        shutil.copytree(files, workspace, dirs_exist_ok=True)


def solve(task: Task, workspace: Path) -> None:
    """Runs the reference solution in `workspace`. Raises `EvaluatorError` if it fails."""
    _script(task, "solution/solve.sh", workspace, {})


def grade(task: Task, workspace: Path) -> Grade:
    """Runs the task's verifier in `workspace`. Raises `EvaluatorError` where it fails or leaves no readable reward."""
    with tempfile.TemporaryDirectory(prefix="polar-verifier-") as logs:
        output = _script(task, "tests/test.sh", workspace, {"VERIFIER_LOGS": logs})
        try:
            reward = float((Path(logs) / "reward.txt").read_text())
        except (OSError, ValueError) as error:
            raise EvaluatorError(
                f"task {task.name}: the verifier left no readable reward ({error}); it printed: {output[-300:]}"
            ) from error
    return Grade(min(1.0, max(0.0, reward)), output)


def _script(task: Task, path: str, workspace: Path, env: dict[str, str]) -> str:
    environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(workspace), "LC_ALL": "C", **env}
    command = ["sh", str((task.folder / path).resolve())]
    process = subprocess.Popen(
        command,
        cwd=workspace,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    with process:
        try:
            printed, _ = process.communicate(timeout=task.verifier_timeout_s)
        except subprocess.TimeoutExpired as error:
            raise EvaluatorError(f"task {task.name}: {path} took longer than {task.verifier_timeout_s:g} s") from error
        finally:  # what it started goes with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    output = printed.decode(errors="replace")
    if process.returncode != 0:
        raise EvaluatorError(f"task {task.name}: {path} ended with exit code {process.returncode}; it printed: {output[-300:]}")
    return output
