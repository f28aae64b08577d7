"""kill -9 of a trainer that is fed by a rollout service: over all its processes no group is lost and none is trained twice."""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
import trainer_live_child
from trainer_fork import forked
from trainer_parts import session, tiny_model

from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.testing.node import StubNode
from polar.testing.rollout import TOKEN, stub_rollouts
from polar.train.metrics import read_metrics

STEPS = 12


async def play(dispatched: SessionDispatchRequest) -> SessionResult:
    """A session takes a moment, and every fourth group teaches nothing. Its policy version is never too old."""
    number = int(dispatched.metadata["group"])
    await asyncio.sleep(random.uniform(0.0, 0.3))
    reward = 1.0 if number % 4 == 1 else float(dispatched.sample)
    made = session(dispatched.session_id, reward, group=dispatched.task_id, version="999", seed=2 * number + dispatched.sample)
    update = {"sample": dispatched.sample, "attempt": dispatched.attempt, "metadata": dispatched.metadata}
    return made.model_copy(update=update)


@pytest.mark.timeout(900)
async def test_a_killed_run_goes_on_with_every_group_once(tmp_path: Path) -> None:
    folder, model = tmp_path / "run", tiny_model(tmp_path / "model")
    folder.mkdir()
    node = StubNode(play=play, max_run_workers=4)
    async with stub_rollouts(tmp_path / "service", [node]) as (_, url):
        for wanted in (2, 5, 8):
            process = forked(trainer_live_child.main, str(folder), str(model), url, TOKEN, STEPS)
            while process.is_alive() and len(read_metrics(folder)) < wanted:  # noqa: ASYNC110 - another process sets no event
                await asyncio.sleep(0.01)
            await asyncio.sleep(random.uniform(0, 0.3))
            process.kill()
            await asyncio.to_thread(process.join)
            assert process.exitcode == -signal.SIGKILL or (
                wanted == 8 and process.exitcode == 0
            )  # a busy machine may be too late for the last
        last = forked(trainer_live_child.main, str(folder), str(model), url, TOKEN, STEPS)
        await asyncio.to_thread(last.join, 300)
        assert last.exitcode == 0

    given: dict[int, dict[str, list[str]]] = {}
    for line in map(json.loads, (folder / "steps.jsonl").read_text().splitlines()):
        before = given.setdefault(line["step"], line["groups"])
        assert before == line["groups"], "a step that was done again was given other sessions"
    assert sorted(given) == list(range(1, STEPS + 1))
    numbers = [int(number) for step in sorted(given) for number in given[step]]
    assert numbers == list(range(len(numbers))), "a group is missing, came twice, or came out of order"
    sessions = Counter(name for groups in given.values() for names in groups.values() for name in names)
    assert set(sessions.values()) == {1}
    assert [line["step"] for line in read_metrics(folder)] == list(range(1, STEPS + 1))
