"""Which repositories of a task are cleaned of commits after its base before the agent sees them: those that its evaluator grades.

Not every repository is: where the task is about a history (find the lost commit, merge the branches), it must stay as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polar.evaluator.guards import hide_history
from polar.rollout.models import EvaluatorSpec
from polar.runtime import Runtime

GRADES_A_REPOSITORY = frozenset({"test_map", "swebench", "swebench_harness", "test_on_output"})
"""Evaluators of patches: their task is a repository as it was before the solution."""


async def hide_solutions(runtime: Runtime, spec: EvaluatorSpec) -> None:
    """Raises `SandboxError` where a history cannot be hidden: an agent that could read the solution must not start."""
    for folder, base in repositories(spec.strategy, spec.config):
        await hide_history(runtime, folder or runtime.workdir, base)


def repositories(strategy: str, config: Mapping[str, Any]) -> Iterator[tuple[str | None, str | None]]:
    """Folder (`None`: the work folder) and base commit (`None`: HEAD) of each, in a composition those of its parts."""
    for part in config.get("parts") or ():
        if isinstance(part, Mapping):
            yield from repositories(str(part.get("strategy", "")), part.get("config") or {})
    instance = config.get("instance")
    base = config.get("base_commit") or (instance.get("base_commit") if isinstance(instance, Mapping) else None)
    if strategy in GRADES_A_REPOSITORY or base:
        yield config.get("repo_dir"), base
