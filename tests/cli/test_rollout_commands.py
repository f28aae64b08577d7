"""What the commands for a rollout service say beyond what it answers."""

from __future__ import annotations

from typing import Any

import pytest

from polar.cli.rollout import nobody_runs


def node(*backends: str, status: str = "up") -> dict[str, Any]:
    return {"status": status, "metrics": {"backends": list(backends)} if backends else {}}


@pytest.mark.parametrize(
    ("nodes", "runtime", "waits"),
    [
        ([node("local", "docker")], {"backend": "dokcer"}, True),
        ([node("local"), node("docker", status="lost")], {"backend": "docker"}, True),
        ([node("local"), node("docker")], {"backend": "docker"}, False),
        ([node("local"), node()], {"backend": "docker"}, False),  # a node that does not say what it runs may run it
        ([], {"backend": "docker"}, False),
        ([node("docker")], {"import_path": "mine:Runtime"}, False),
        ([node("docker")], None, False),
    ],
)
def test_a_task_that_no_node_can_run_is_told_so(nodes: list[dict[str, Any]], runtime: dict[str, Any] | None, waits: bool) -> None:
    said = nobody_runs([{"task_id": "storm", "runtime": runtime}], nodes)
    assert len(said) == waits
    assert all(line.startswith("storm waits: no node runs the backend 'do") for line in said)
