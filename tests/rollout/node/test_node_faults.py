"""Many attempts at once with faults planted at random, by seed: each ends as its fault says it must, once, and nothing is left."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from node_world import Receiver, World, dispatch, until

from polar.rollout.models import SessionResult
from polar.trajectory import Trajectory

Build = Callable[..., World]

OK = {"strategy": "node_test", "config": {"reward": 0.5, "fresh": 1}}


def fails(action: str) -> dict[str, Any]:
    return {"runtime": {"backend": "fake", "kwargs": {"fail": {action: "planted"}}}}


PLANS: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "works": ("call 2\nprint done", {}, "graded", None),
    "swallows": ("call\nswallow\nprint done", {}, "graded", None),
    "exits": ("call\nexit 1", {}, "policy", "harness_exit"),
    "exits without credit": ("call\nexit 1", {"on_policy_failure": "exclude"}, "policy", "harness_exit"),
    "exits with a price": ("call\nexit 1", {"on_policy_failure": -1.0}, "policy", "harness_exit"),
    "takes too long": ("call\nsleep 60", {"remaining_timeout_seconds": 8.0}, "policy", "agent_timeout"),
    "takes too many turns": ("call 9", {"budget": {"max_turns": 2}}, "policy", "max_turns"),
    "never calls": ("print hello", {}, "infrastructure", "harness_no_call"),
    "loses the engine": ("call\nbreak", {}, "infrastructure", "engine"),
    "never has an engine": ("break", {}, "infrastructure", "engine"),
    "gets the engine back": ("call\nswallow\ncall", {}, "graded", None),
    "has no sandbox": ("call", fails("start"), "infrastructure", "sandbox"),
    "loses its sandbox": ("call", fails("download"), "infrastructure", "sandbox"),
    "is not judged": ("call", {"evaluator": {"strategy": "node_test", "config": {"fail": "no"}}}, "infrastructure", "evaluator"),
    "is cancelled": ("call\nsleep 60", {}, "cancelled", "cancelled"),
}


@pytest.mark.parametrize("seed", range(3))
async def test_every_attempt_ends_as_planted(world: Build, receiver: Receiver, seed: int) -> None:
    chance = random.Random(seed)
    names = list(PLANS) * 2
    chance.shuffle(names)
    receiver.answer = lambda result: chance.choice([200, 200, 500])
    build = world(max_init_workers=6, max_run_workers=6, max_postrun_workers=4, max_queue=100)
    async with build.node(receiver) as node:
        for number, name in enumerate(names):
            instruction, fields, _, _ = PLANS[name]
            fields = {"evaluator": OK, "priority": chance.randint(-1, 1), **fields}
            attempt = await node.dispatch(dispatch(instruction, f"ses_{number}", **fields))
            if name == "is cancelled":
                asyncio.get_running_loop().call_later(chance.uniform(0, 0.5), node.cancel, attempt)
        await until(lambda: not node.attempts and not node.deliveries.waiting, 60)
        await check(node, receiver, names)
        assert node.spool.unsettled() == []
        assert node.sandboxes.live == 0
        stages = node.stages
        assert [one.used for one in (stages.init, stages.ready, stages.run, stages.queued, stages.post, stages.warm) if one] == [0] * 6
    assert build.left() == []


async def check(node: Any, receiver: Receiver, names: list[str]) -> None:
    results = {body["session_id"]: SessionResult.model_validate(body) for body in receiver.results}
    assert len(results) == len(names)
    bodies = Counter(body["delivery_id"] for body in receiver.results)
    assert all(f"{session}.0" in bodies for session in results)
    for number, name in enumerate(names):
        result = results[f"ses_{number}"]
        _, fields, outcome, code = PLANS[name]
        assert (result.outcome, result.error_code) == (outcome, code), (name, result.error)
        rewarded = outcome in ("graded", "policy")
        wanted = fields.get("on_policy_failure", "grade") if outcome == "policy" else "grade"
        reward = {"grade": 0.5, "exclude": None}.get(wanted, wanted) if rewarded else None
        assert result.reward == reward, name
        heads = await node.gateway.store.heads(f"ses_{number}.0")
        complete = [head for head in heads if head.status == "complete"]
        if result.trajectory is not None:
            trajectory = Trajectory.from_json(result.trajectory)
            assert trajectory.in_rows + trajectory.ledger.tokens == trajectory.sampled == sum(head.sampled for head in heads)
            assert {trace.reward for trace in trajectory.traces} <= {reward}
            assert result.turns == len(complete)
        else:
            assert outcome == "cancelled" or not complete, name
        record = await node.gateway.store.session(f"ses_{number}.0")
        assert record is None or record.closed is not None
