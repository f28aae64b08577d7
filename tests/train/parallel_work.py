"""What each process of `test_parallel.py` runs: every case, one after the other, with results in a folder. Started like a training run: by
its environment. Without one it is a single process, whose results the others' must equal."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from polar.errors import ConfigError
from polar.train.checkpoints import RunState, restore, save
from polar.train.learner import Learner, Optimisation
from polar.train.loading import LoraSettings, save_merged
from polar.train.loss import Loss
from polar.train.parallel import Parallel, join
from polar.train.rows import Row

VOCABULARY = 61
HOW = Optimisation(lr=1e-2, token_budget=40, minibatches=2, schedule="linear", warmup_steps=3, total_steps=20)
LORA = LoraSettings(r=4, alpha=8.0)
CASES: dict[str, dict[str, Any]] = {
    "whole": {"dtype": "float64"},
    "checkpointing": {"dtype": "float64", "gradient_checkpointing": True},
    "lora": {"dtype": "float64", "lora": LORA},
    "bfloat16": {"dtype": "bfloat16"},
    "lora-bfloat16": {"dtype": "bfloat16", "lora": LORA},
}
TOGETHER = [
    (case, sharding) for case in CASES for sharding in ("none", "full") if sharding == "full" or case in ("whole", "lora", "bfloat16")
]
UNDISTURBED = ("lora", "bfloat16")
SIZES = ((12, 13, 14, 15, 16, 35, 9), (20,), (30, 9, 9))
"""Of each batch's rows: more than the processes, fewer, and uneven ones."""


def batch(number: int) -> list[Row]:
    generator = torch.Generator().manual_seed(number)
    rows = []
    for place, size in enumerate(SIZES[number % len(SIZES)]):
        ids = torch.randint(0, VOCABULARY, (size,), generator=generator)
        places = torch.arange(5, size)
        rows.append(Row(ids, places, torch.full((len(places),), -4.0), torch.full((len(places),), 0.02), 1.0 - place * 0.4))
    return rows


def trained(group: Parallel, model: str, case: str, sharding: Any, folder: Path) -> None:
    """Six steps in two halves: the second goes on from a checkpoint of the first, as another run would."""
    settings, base = dict(CASES[case]), model
    torch.manual_seed(group.rank)  # only rank 0's draw counts
    for half in (0, 1):
        place = folder / "half" / "step-000003"
        if half and "lora" in settings:
            settings.pop("lora")
            settings["adapter"] = str(place / "model")
        elif half:
            model = str(place / "model")
        policy = group.load(model, sharding=sharding, **settings)
        reference = group.reference(policy, base, sharding=sharding, **settings)
        learner = group.learner(policy, HOW, Loss(beta=0.05), reference)
        if not group.leads:
            group.follow(learner)
            continue
        if half:
            restore(place, learner)
        work(learner, half, folder)
        group.release()


def work(learner: Learner, half: int, folder: Path) -> None:
    reports = [asdict(learner.step(batch(number))) for number in range(3 * half, 3 * half + 3)]
    (folder / f"reports-{half}.json").write_text(json.dumps(reports))
    torch.save([one.double() for one in learner.logprobs(batch(0))], folder / f"logprobs-{half}.pt")
    save(folder / ("last" if half else "half"), learner, RunState(3, 6 if half else 3))
    save_merged(learner.policy.model, folder / f"merged-{half}")


def undisturbed(group: Parallel, model: str, case: str, sharding: Any, folder: Path) -> None:
    """The same six steps without a checkpoint between them."""
    torch.manual_seed(group.rank)
    policy = group.load(model, sharding=sharding, **CASES[case])
    learner = group.learner(policy, HOW, Loss(beta=0.05), group.reference(policy, model, sharding=sharding, **CASES[case]))
    if not group.leads:
        group.follow(learner)
        return
    for number in range(6):
        learner.step(batch(number))
    save_merged(learner.policy.model, folder / "merged-1")
    group.release()


def one_more(group: Parallel, half: str, sharding: Any, folder: Path) -> None:
    """The second half, from the checkpoint that another number of processes left."""
    learner = group.learner(group.load(str(Path(half) / "model"), sharding=sharding, dtype="float64"), HOW, Loss())
    if not group.leads:
        group.follow(learner)
        return
    folder.mkdir(parents=True)
    restore(Path(half), learner)
    work(learner, 1, folder)
    group.release()


def cases(group: Parallel, model: str, results: str, half: str | None = None) -> None:
    kinds = ("none", "full") if group.world > 1 else ("none",)
    for sharding in kinds:
        for case in CASES:
            folder = Path(results) / f"{case}-{sharding}"
            if group.world > 1 and (case, sharding) not in TOGETHER:
                continue
            if group.leads:
                folder.mkdir(parents=True)
            trained(group, model, case, sharding, folder)
        for case in UNDISTURBED:
            undisturbed(group, model, case, sharding, Path(results) / f"{case}-undisturbed-{sharding}")
        if half:
            one_more(group, half, sharding, Path(results) / f"other-{sharding}")


def stopped(group: Parallel, model: str, results: str) -> None:
    """What is refused leaves all in step; and the leader may end between two steps, for a reason of its own."""
    try:
        group.load(results + "/nowhere")
    except ConfigError as error:
        Path(results, f"refused-{group.rank}.txt").write_text(str(error))
    learner = group.learner(group.load(model, sharding="full"), HOW)
    if not group.leads:
        group.follow(learner)
        return
    empty = replace(batch(0)[0], places=torch.zeros(0, dtype=torch.int64), recorded=torch.zeros(0), weights=torch.zeros(0))
    try:
        learner.step([empty])
    except ValueError as error:
        Path(results, "empty.txt").write_text(str(error))
    learner.step([empty, *batch(1)])
    raise SystemExit(3)


def deserted(group: Parallel, model: str, who: str) -> None:
    """Rank `who` dies between two steps."""
    learner = group.learner(group.load(model), HOW)
    if group.rank == int(who):
        os._exit(9)
    if not group.leads:
        group.follow(learner)
        return
    learner.step(batch(0))


if __name__ == "__main__":
    with join() as joined:
        globals()[sys.argv[1]](joined, *sys.argv[2:])
