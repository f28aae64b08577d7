"""A trainer's process for `test_trainer_kill.py`: goes on with the run in a folder, until it is done or killed.

python trainer_child.py FOLDER MODEL RECORDED STEPS
"""

from __future__ import annotations

import sys

import torch

from polar.train import TrainConfig, train


def main() -> None:
    folder, model, recorded, steps = sys.argv[1:]
    torch.set_num_threads(1)
    summary = train(
        TrainConfig.model_validate(
            {
                "model": model,
                "recorded": recorded,
                "steps": int(steps),
                "output": folder,
                "batch": {"groups": 2, "samples": 2},
                "optimisation": {"lr": 1e-3, "token_budget": 64, "schedule": "cosine", "warmup_steps": 3, "minibatches": 2},
                "checkpoints": {"every": 3},
            }
        )
    )
    assert summary is not None
    print(f"ended {summary.ended} after {summary.steps}", flush=True)


if __name__ == "__main__":
    main()
