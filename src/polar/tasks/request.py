"""From a task, wherever it was read, to what the rollout service takes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any, Protocol

from pydantic import ValidationError

from polar.errors import ConfigError
from polar.harness.spec import AgentSpec
from polar.rollout.models import TaskRequest
from polar.runtime.spec import RuntimeSpec
from polar.tasks.harbor import Split


class AnyTask(Protocol):
    """A task of any format: a Harbor folder, a line of JSON, a SWE-bench instance."""

    @property
    def name(self) -> str:
        """Unique in its set."""

    @property
    def instruction(self) -> str: ...

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def split(self) -> Split: ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the task says that nothing here heeds."""

    @property
    def noop_reward(self) -> float:
        """What an agent that does nothing gets."""

    def fields(self, runtime: RuntimeSpec) -> dict[str, Any]:
        """Its part of a `TaskRequest`, in a sandbox like `runtime`. Raises `ConfigError`."""

    def oracle(self) -> Mapping[str, bytes] | None:
        """The files of its reference solution, `solve.sh` among them."""

    def hidden(self) -> Mapping[str, bytes]:
        """Files whose content an agent must not find in its sandbox."""


def to_request(
    task: AnyTask,
    *,
    agent: AgentSpec | None = None,
    runtime: RuntimeSpec | None = None,
    num_samples: int | None = None,
    task_id: str | None = None,
    **more: Any,
) -> TaskRequest:
    """The task as a request for `num_samples` sessions of `agent`. `more` are further fields of `TaskRequest`; what is given here wins over
    what the task says, but for its sandbox: that is `runtime` with what the task needs.

    Without `task_id` it is the task's name and something random, so that a task may be submitted again. Raises `ConfigError` where the
    task cannot run in such a sandbox, names no agent, or a field is wrong.
    """
    fields = task.fields(runtime if runtime is not None else RuntimeSpec())
    if agent is not None:
        fields["agent"] = agent
    if "agent" not in fields:
        raise ConfigError(f"task {task.name} names no agent: give one")
    if num_samples is not None:
        fields["num_samples"] = num_samples
    metadata = {**fields.get("metadata", {}), "task": task.name, "split": task.split, **more.pop("metadata", {})}
    fields |= {**more, "metadata": metadata, "task_id": task_id or new_id(task.name)}
    try:
        return TaskRequest.model_validate({key: _plain(value) for key, value in fields.items()})
    except ValidationError as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"task {task.name}: {said}") from error


def new_id(name: str) -> str:
    """A task id that tells people which task it is, and is never given twice."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._:")[:100]
    return "-".join(part for part in (slug, secrets.token_hex(4)) if part)


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else value
