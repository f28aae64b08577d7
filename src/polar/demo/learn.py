"""The demo's run: GRPO under a harness whose protocol the bundled model hardly knows and, as often, under one that it knows well.

Only the settings, and what is read back of them: the run itself is `polar train`'s, with nothing of its own. Everything is counted in steps
and sessions, never in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from polar.demo.tasks import write_tasks
from polar.train.config import TrainConfig
from polar.train.evaluation import Outcome, read_outcome, results_file

MODEL = "tiny-qwen3"
LEARNED, KNOWN = "codex", "pi"
"""The harness whose protocol is to be learned, and the one whose protocol the model knows already."""
MIX = {LEARNED: 1.0, KNOWN: 1.0}
"""Groups of either, in the mean. What is learned under one leaks into the other: with a quarter of the groups under Pi, it lost a point in
ten in one run of four."""
CODEX_SETTINGS: dict[str, Any] = {"features.multi_agent": False, "features.goals": False, "skills.include_instructions": False}
"""Codex's smallest request: its own prompt and its four plain tools, 5,100 tokens in the bundled tokenizer."""
AGREE = 1e-3
"""Nats: how far recorded and recomputed log-probabilities may differ. Engine and trainer both compute in float32."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much of it. `evaluated`: held-out tasks, one session each, under either harness, before and after."""

    steps: int = 8
    groups: int = 6
    samples: int = 8
    evaluated: int = 64
    trained_tasks: int = 84
    lr: float = 3e-4


QUICK = Size(steps=1, groups=2, samples=4, evaluated=0, trained_tasks=14)


def settings(folder: Path, size: Size, *, seed: int = 0, shuffled: bool = False, model: str = MODEL) -> TrainConfig:
    """The run in `folder`, with its tasks written there. `shuffled`: the control, from whose rewards nothing can be learned."""
    tasks = folder / "tasks"
    tasks.mkdir(parents=True, exist_ok=True)
    train = write_tasks(tasks / "train.jsonl", count=size.trained_tasks, held_out=False, seed=1000 + seed)
    held_out = write_tasks(tasks / "held-out.jsonl", count=max(1, size.evaluated), held_out=True, seed=2000 + seed)
    evaluated = size.evaluated > 0
    return TrainConfig.model_validate(
        {
            "model": model,
            "tasks": {"train": str(train), "held_out": str(held_out)},
            "harnesses": MIX,
            "steps": size.steps,
            "output": str(folder / "run"),
            "seed": seed,
            "shuffle_rewards": shuffled,
            "rollout": {
                "at_once": 2,
                "max_turns": 5,
                "max_tokens": 600,
                "max_output": 256,
                "agent": {"settings": {"context": 16_384, "retries": 1}},
                "agents": {LEARNED: {"settings": {"context": 16_384, "retries": 1, **CODEX_SETTINGS}}},
            },
            "batch": {"groups": size.groups, "samples": size.samples, "most_groups": size.groups + max(1, size.groups // 2)},
            "max_staleness": 1,
            "optimisation": {"lr": size.lr, "schedule": "linear", "weight_decay": 0.0, "token_budget": 65_536},
            "gate": {"rows": 4, "mean": AGREE, "largest": AGREE},
            "evaluation": {
                "before": evaluated,
                "after": evaluated,
                "samples": 1,
                "harnesses": [LEARNED, KNOWN],
                "sampling": "trainer",
            },
            "checkpoints": {"every": size.steps, "keep": 1},
        }
    )


@dataclass(frozen=True, slots=True)
class Learned:
    """What a run has to show. `steps`: a mapping of numbers a step, as `metrics.jsonl` keeps them."""

    config: TrainConfig
    folder: Path
    before: Outcome | None
    after: Outcome | None
    steps: Sequence[Mapping[str, float]]

    @property
    def harnesses(self) -> list[str]:
        return [LEARNED, KNOWN]


def read(folder: Path, config: TrainConfig) -> Learned:
    """A run that has ended, from what it left in `folder/run`."""
    run = folder / "run"
    last = config.steps
    sides = [results_file(run / "evaluations", step) for step in (0, last)]
    before, after = (read_outcome(path) if path.is_file() else None for path in sides)
    return Learned(config, folder, before, after, steps_of(run / "metrics.jsonl"))


def steps_of(path: Path) -> list[dict[str, float]]:
    """The numbers of each step that trained, lines of one step joined."""
    found: dict[int, dict[str, float]] = {}
    for line in path.read_bytes().splitlines():
        values = orjson.loads(line)
        found.setdefault(int(values["step"]), {}).update(values)
    return [values for _, values in sorted(found.items()) if "tokens/sampled" in values]
