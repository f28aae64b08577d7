"""Verdicts that are half right: what can be kept of them is kept."""

from __future__ import annotations

import math
from collections.abc import Callable

from node_world import World, dispatch, result_of

from polar.rollout.ending import dumped
from polar.rollout.models import SessionResult

Build = Callable[..., World]


async def test_a_metric_that_is_no_number_costs_no_reward(world: Build) -> None:
    """JSON has no NaN, so the service would take no result that has one, and the session would be run again, to the same end."""
    config = {"reward": 0.5, "metrics": {"loss": math.nan, "most": math.inf, "passed": 1.0}}
    async with world().node() as node:
        result = await result_of(node, dispatch("call", evaluator={"strategy": "node_test", "config": config}))
    assert (result.outcome, result.reward, result.metrics) == ("graded", 0.5, {"passed": 1.0})
    assert sorted(line for line in result.warnings if "metric" in line) == [
        "the evaluator's metric loss is nan and is left out",
        "the evaluator's metric most is inf and is left out",
    ]
    assert SessionResult.model_validate_json(dumped(result)) == result
