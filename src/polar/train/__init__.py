"""GRPO on rows of real sessions.

    from polar.train import TrainConfig, train
    train(TrainConfig(model="tiny-qwen3", tasks="demo"))            # what `polar train` does

`Trainer` is the loop alone, given its parts. The algorithm is in `advantages`, `weights` (numpy over a whole batch) and `loss` (torch over
whatever part of it fits): a batch's loss is `sum(weight[t] * term[t])`, so that micro-batches add up to it exactly. It knows no model, no
engine and no file.

What needs torch is loaded when it is first asked for: reading settings does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polar.train.config import TrainConfig

if TYPE_CHECKING:
    from polar.train.run import train
    from polar.train.trainer import Parts, Summary, Trainer

__all__ = ["Parts", "Summary", "TrainConfig", "Trainer", "train"]

_PLACES = {"train": "polar.train.run", "Trainer": "polar.train.trainer", "Parts": "polar.train.trainer", "Summary": "polar.train.trainer"}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
