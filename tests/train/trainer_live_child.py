"""A trainer's process for `test_trainer_live.py`: trains on groups of a rollout service, and notes which sessions each step was given.

python trainer_live_child.py FOLDER MODEL URL TOKEN STEPS
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import torch
from trainer_parts import config, request_of

from polar.rollout.client import AsyncClient
from polar.train import checkpoints
from polar.train.checkpoints import RunState
from polar.train.metrics import open_metrics
from polar.train.parallel import Solo
from polar.train.run import make_learner
from polar.train.source import ServiceSource
from polar.train.trainer import Parts, Trainer


class Noting(Trainer):
    """Notes the groups of each step, durably, before the step."""

    async def _train(self, groups: list[Any], collect_s: float) -> None:
        sessions = {str(group.number): [result.session_id for result in group.results] for group in groups}
        with (self.folder / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.state.batches + 1, "groups": sessions}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        await super()._train(groups, collect_s)


def main(folder: str, model: str, url: str, token: str, steps: int) -> None:
    torch.set_num_threads(1)
    asyncio.run(_train(Path(folder), model, url, token, steps))


async def _train(path: Path, model: str, url: str, token: str, steps: int) -> None:
    settings = config(model=model, steps=steps, batch={"groups": 2, "samples": 2}, max_staleness=1, checkpoints={"every": 3})
    place = checkpoints.latest(path / "checkpoints")
    learner = make_learner(settings, Solo(), place)
    state = RunState() if place is None else checkpoints.restore(place, learner)
    async with AsyncClient(url, token) as client:
        with open_metrics(path, resumed_step=state.batches if place else -1) as metrics:
            parts = Parts(learner, ServiceSource(client, request_of, "live"), metrics)
            summary = await Noting(settings, parts, path, state).run()
    assert (summary.ended, summary.steps) == ("done", steps)
