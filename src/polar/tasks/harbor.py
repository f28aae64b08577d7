"""Tasks as Harbor folders: reads one, sets up its workspace, grades what a harness left there.

The layout is Harbor's (https://www.harborframework.com/docs/tasks): `instruction.md`, `task.toml`, `environment/`, `tests/test.sh`,
`solution/solve.sh`. The verifier writes its reward to `reward.txt` in `$VERIFIER_LOGS`, which is `/logs/verifier` in a container.
Here tasks run in a plain folder on this machine, so only tasks whose environment is files (`environment/files/`) can be set up;
containers are the runtime's business. Knows no harness and no model.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polar.errors import ConfigError, EvaluatorError

Split = Literal["train", "held_out"]
BUNDLED = Path(__file__).parent / "bundled"


@dataclass(frozen=True, slots=True)
class Task:
    """One task folder. Timeouts in seconds. `metadata` is the table of that name in `task.toml`, unread."""

    name: str
    folder: Path
    instruction: str
    agent_timeout_s: float
    verifier_timeout_s: float
    metadata: dict[str, Any]

    @property
    def split(self) -> Split:
        """Tasks that do not say are for training."""
        return "held_out" if self.metadata.get("split") == "held_out" else "train"


@dataclass(frozen=True, slots=True)
class Grade:
    """`reward` as the verifier wrote it, clamped to 0..1; `output` is what it printed."""

    reward: float
    output: str

    @property
    def passed(self) -> bool:
        return self.reward >= 1.0


def load(folder: Path) -> Task:
    """Reads a task folder. Raises `ConfigError` where something is missing or malformed."""
    for needed in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (folder / needed).is_file():
            raise ConfigError(f"{folder} is not a Harbor task: {needed} is missing")
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
        return Task(
            name=folder.name,
            folder=folder,
            instruction=(folder / "instruction.md").read_text().strip(),
            agent_timeout_s=float(settings.get("agent", {}).get("timeout_sec", 600)),
            verifier_timeout_s=float(settings.get("verifier", {}).get("timeout_sec", 600)),
            metadata=dict(settings.get("metadata", {})),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / 'task.toml'}: {error}") from error


def load_all(folder: Path) -> list[Task]:
    """Every task folder directly below `folder`, by name."""
    return [load(path.parent) for path in sorted(folder.glob("*/task.toml"))]


def bundled(split: Split | None = None) -> list[Task]:
    """The tasks that come with Polar, by name; all, or one side of the split."""
    return [task for task in load_all(BUNDLED) if split is None or task.split == split]


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
    try:
        done = subprocess.run(
            command,
            cwd=workspace,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=task.verifier_timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EvaluatorError(f"task {task.name}: {path} took longer than {task.verifier_timeout_s:g} s") from error
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        raise EvaluatorError(f"task {task.name}: {path} ended with exit code {done.returncode}; it printed: {output[-300:]}")
    return output
