"""A trainer's process for `test_trainer_kill.py`: goes on with the run in a folder, until it is done or killed.

All that is slow to import is imported here, so that a server that has this module loaded forks a new process in no time.
"""

from __future__ import annotations

import torch
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401 - loaded before the fork

from polar.train import TrainConfig
from polar.train.run import train


def main(folder: str, model: str, recorded: str, steps: int) -> None:
    torch.set_num_threads(1)
    settings = {
        "model": model,
        "recorded": recorded,
        "steps": steps,
        "output": folder,
        "batch": {"groups": 2, "samples": 2},
        "optimisation": {"lr": 1e-3, "token_budget": 64, "schedule": "cosine", "warmup_steps": 3, "minibatches": 2},
        "checkpoints": {"every": 3},
    }
    summary = train(TrainConfig.model_validate(settings))
    assert summary is not None
    assert (summary.ended, summary.steps) == ("done", steps)
