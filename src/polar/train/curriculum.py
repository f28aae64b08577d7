"""Which task and which harness the n-th group of a run has: pure, so that a run that goes on from a number goes on with the same groups.

Tasks come in epochs, each in an order of its own; harnesses so that after any number of groups each is within one group of its share
(smooth weighted round-robin).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from polar.errors import ConfigError
from polar.tasks import AnyTask, find
from polar.train.config import TasksSection
from polar.train.settings import setting


class Curriculum:
    """`mix`: harness to weight. Raises `ConfigError` where there is nothing to draw from."""

    def __init__(self, tasks: Sequence[AnyTask], mix: Mapping[str, float], seed: int = 0) -> None:
        if not tasks or not mix:
            raise ConfigError("a run needs at least one task and one harness")
        self.tasks = tuple(tasks)
        self.mix = dict(mix)
        self.seed = seed
        self._turns: list[str] = []
        self._credit = dict.fromkeys(self.mix, 0.0)

    def group(self, number: int) -> tuple[AnyTask, str]:
        """The task and the harness of group `number`, counted from 0."""
        epoch, place = divmod(number, len(self.tasks))
        order = list(range(len(self.tasks)))
        random.Random(f"{self.seed}/epoch {epoch}").shuffle(order)
        return self.tasks[order[place]], self.harness(number)

    def harness(self, number: int) -> str:
        total = sum(self.mix.values())
        while len(self._turns) <= number:
            for name, weight in self.mix.items():
                self._credit[name] += weight / total
            chosen = max(self._credit, key=lambda name: self._credit[name])
            self._credit[chosen] -= 1.0
            self._turns.append(chosen)
        return self._turns[number]


def split(tasks: TasksSection) -> tuple[list[AnyTask], list[AnyTask]]:
    """Tasks to train on, and held-out ones (none: there are none). Raises `ConfigError` for a task on both sides."""
    with setting("tasks.train"):
        found = find(tasks.train)
    train = [task for task in found if task.split != "held_out"]
    with setting("tasks.held_out"):
        held_out = find(tasks.held_out) if tasks.held_out is not None else [task for task in found if task.split == "held_out"]
    if not train:
        raise ConfigError(f"tasks.train: all of {tasks.train} is held out: there is nothing to train on")
    both = sorted({task.name for task in train} & {task.name for task in held_out})
    if both:
        raise ConfigError(f"tasks.held_out: {', '.join(both[:5])} would be trained on and evaluated on")
    return train[: tasks.train_limit], held_out[: tasks.held_out_limit]
