"""Which histories are hidden before an agent starts: those of repositories that its evaluator grades, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from node_world import World, dispatch, result_of

from polar.rollout.node.history import repositories


@pytest.mark.parametrize(
    ("strategy", "config", "found"),
    [
        ("command", {"command": "true"}, []),
        ("harbor", {}, []),
        ("test_map", {"repo_dir": "/testbed", "base_commit": "abc"}, [("/testbed", "abc")]),
        ("swebench", {"instance": {"base_commit": "abc"}}, [(None, "abc")]),
        ("test_on_output", {}, [(None, None)]),
        ("command", {"base_commit": "abc"}, [(None, "abc")]),
        (
            "composition",
            {"parts": [{"strategy": "answer", "config": {}}, {"strategy": "test_map", "config": {"base_commit": "x"}}]},
            [(None, "x")],
        ),
    ],
)
def test_repositories_that_are_graded(strategy: str, config: dict[str, Any], found: list[Any]) -> None:
    assert list(repositories(strategy, config)) == found


async def test_an_agent_does_not_start_where_a_history_cannot_be_hidden(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polar.errors import SandboxError
    from polar.runtime import Runtime

    async def hide(runtime: Runtime, folder: str, base: str | None) -> None:
        raise SandboxError(f"{folder} at {base} resists")

    monkeypatch.setattr("polar.rollout.node.history.hide_history", hide)
    monkeypatch.setattr("polar.rollout.node.history.GRADES_A_REPOSITORY", frozenset({"node_test"}))
    build = world()
    async with build.node() as node:
        result = await result_of(node, dispatch())
    assert (result.outcome, result.error_code, result.error) == ("infrastructure", "sandbox", "/workspace at None resists")
    assert build.calls == 0
