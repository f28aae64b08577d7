"""SWE-bench instances: a row in, a task out. Reads local files only; nothing is downloaded.

A row has at least `instance_id`, `base_commit`, `problem_statement`, `FAIL_TO_PASS` and `PASS_TO_PASS` (lists, or lists as JSON text, as
in the published data sets), and `test_patch` or `eval_script`. Its image is the one that it names (`image`, `image_name`,
`docker_image`), else the benchmark's own by the instance's id; a runtime with an image or without images keeps what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polar.errors import ConfigError
from polar.rollout.models import Budget, EvaluatorSpec
from polar.runtime.spec import RuntimeSpec
from polar.tasks.environment import HOST_BACKENDS
from polar.tasks.harbor import Split

NEEDED = ("instance_id", "base_commit", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS")
NOT_FOR_GRADING = frozenset({"patch", "hints_text", "problem_statement"})
REPO_DIR = "/testbed"
"""Where the benchmark's images keep the repository."""
AGENT_S = 3600.0
EVALUATION_S = 1800.0
_PROMPT = "{problem}\n\nThe repository is in {repo_dir}. Fix the issue there; do not commit. Hidden tests will judge the result."


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance; `row` is as it was read."""

    row: Mapping[str, Any]
    where: str
    """File and line, for messages."""

    def __post_init__(self) -> None:
        missing = [name for name in NEEDED if self.row.get(name) in (None, "")]
        if missing:
            raise ConfigError(f"{self.where}: no SWE-bench instance: {', '.join(missing)} is missing")

    @property
    def name(self) -> str:
        return str(self.row["instance_id"])

    @property
    def instruction(self) -> str:
        return _PROMPT.format(problem=str(self.row["problem_statement"]).strip(), repo_dir=REPO_DIR)

    @property
    def metadata(self) -> dict[str, Any]:
        return {key: self.row[key] for key in ("repo", "base_commit", "version", "difficulty", "split") if self.row.get(key) is not None}

    @property
    def split(self) -> Split:
        return "held_out" if self.row.get("split") == "held_out" else "train"

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    @property
    def noop_reward(self) -> float:
        return 0.0

    @property
    def image(self) -> str:
        """The instance's own image."""
        named = next((self.row[key] for key in ("image", "image_name", "docker_image") if self.row.get(key)), None)
        return str(named) if named else f"swebench/sweb.eval.x86_64.{self.name.lower().replace('__', '_1776_')}:latest"

    def fields(self, runtime: RuntimeSpec) -> dict[str, Any]:
        """As `polar.tasks.harbor.Task.fields`."""
        host = runtime.names_backend and runtime.import_path is None and runtime.backend in HOST_BACKENDS
        changes: dict[str, Any] = {}
        if runtime.image is not None:
            changes["image"] = runtime.image.replace("{task}", self.name)
        elif not host and runtime.build_context is None:
            changes["image"] = self.image
        if not host and runtime.workdir is None:
            changes["workdir"] = REPO_DIR
        row = {key: value for key, value in self.row.items() if key not in NOT_FOR_GRADING}
        config: dict[str, Any] = {"instance": row}
        instruction = self.instruction
        if host:
            config["repo_dir"] = None
            instruction = instruction.replace(f"in {REPO_DIR}. Fix the issue there", "the current folder. Fix the issue there")
        return {
            "instruction": instruction,
            "runtime": runtime.model_copy(update=changes),
            "evaluator": EvaluatorSpec(strategy="swebench", config=config),
            "timeout_seconds": AGENT_S,
            "budget": Budget(evaluation_seconds=EVALUATION_S + 120.0),
            "metadata": self.metadata,
        }

    def oracle(self) -> Mapping[str, bytes] | None:
        """The gold patch, with a script that applies it."""
        patch = self.row.get("patch")
        if not patch:
            return None
        return {"solve.sh": b'git apply "$(dirname "$0")/gold.patch"\n', "gold.patch": str(patch).encode()}

    def hidden(self) -> Mapping[str, bytes]:
        """Nothing that could be found as a file: the tests are a patch."""
        return {}
