"""Tasks as lines of JSON: one `TaskRequest` a line, or as little as `{"instruction": "..."}`. Knows no folder format.

Fields are those of `polar.rollout.models.TaskRequest`, of which a line may leave out everything but the instruction; besides, `id` or
`name` for `task_id`, `prompt` for `instruction`, `answer` for an evaluator that compares the final answer with it, `solution` for a shell
script that solves the task, and `split`. Anything else is refused with its line: what does nothing would be noticed only in the data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from polar.errors import ConfigError
from polar.rollout.models import TaskRequest
from polar.runtime.spec import RuntimeSpec
from polar.tasks.harbor import Split

_ALIASES = {"id": "task_id", "name": "task_id", "prompt": "instruction"}
_OWN = ("answer", "solution", "split")
_NO_AGENT = {"agent": {"harness": "shell", "custom_shell": "true"}}
"""Stands in for the agent, which `to_request` brings, while a line is checked."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line. `row` has the canonical names."""

    row: Mapping[str, Any]
    where: str
    """File and line, for messages."""
    default_name: str

    @classmethod
    def read(cls, row: Any, where: str, default_name: str) -> Line:
        """Raises `ConfigError` with the line for one that is no task."""
        if not isinstance(row, dict):
            raise ConfigError(f"{where}: a task is a JSON object, not {type(row).__name__}")
        named: dict[str, Any] = {}
        for key, value in row.items():
            canonical = _ALIASES.get(str(key), str(key))
            if canonical in named:
                raise ConfigError(f"{where}: {canonical} is given twice")
            named[canonical] = value
        if named.get("task_id", "") is None:  # as tables write what is not there
            del named["task_id"]
        if not isinstance(named.get("instruction"), str) or not named["instruction"].strip():
            raise ConfigError(f"{where}: instruction is missing, or is no text")
        if "answer" in named and "evaluator" in named:
            raise ConfigError(f"{where}: give answer or evaluator, not both")
        if named.get("answer", "") is None:
            raise ConfigError(f"{where}: answer is null: leave it out, or say what is right")
        if named.get("split") not in (None, "train", "held_out"):  # taken for one to train on, a test set would be trained on
            raise ConfigError(f"{where}: split is train or held_out, not {named['split']!r}")
        if "task_id" in named:
            named["task_id"] = str(named["task_id"])
        line = cls(named, where, re.sub(r"[^A-Za-z0-9_.-]+", "-", default_name).strip("-._")[-100:].lstrip("-._") or "task")
        try:
            TaskRequest.model_validate({**_NO_AGENT, "task_id": line.name, **line._request()})
        except ValidationError as error:
            said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
            raise ConfigError(f"{where}: {said}") from error
        return line

    @property
    def name(self) -> str:
        return str(self.row.get("task_id", self.default_name))

    @property
    def instruction(self) -> str:
        return str(self.row["instruction"]).strip()

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.row.get("metadata") or {})

    @property
    def split(self) -> Split:
        return "held_out" if self.row.get("split") == "held_out" else "train"

    @property
    def warnings(self) -> tuple[str, ...]:
        if "evaluator" in self.row or "answer" in self.row:
            return ()
        return ("no evaluator: its sessions get no reward",)

    @property
    def noop_reward(self) -> float:
        return 0.0

    def fields(self, runtime: RuntimeSpec) -> dict[str, Any]:
        """As `polar.tasks.harbor.Task.fields`. A runtime of the line's own is laid over `runtime`."""
        fields = {key: value for key, value in self._request().items() if key != "task_id"}
        own = fields.get("runtime") or {}
        fields["runtime"] = RuntimeSpec.model_validate({**runtime.model_dump(), **own})
        return fields

    def oracle(self) -> Mapping[str, bytes] | None:
        solution = self.row.get("solution")
        return None if solution is None else {"solve.sh": str(solution).encode()}

    def hidden(self) -> Mapping[str, bytes]:
        return {}

    def _request(self) -> dict[str, Any]:
        fields = {key: value for key, value in self.row.items() if key not in _OWN}
        if "answer" in self.row:
            fields["evaluator"] = {"strategy": "answer", "config": {"expected": self.row["answer"]}}
        return fields
