"""Which task and harness a group has: every task once an epoch, every harness its share, the same for the same number."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.train.config import TasksSection
from polar.train.curriculum import Curriculum, split


@dataclass(frozen=True)
class Named:
    name: str


def tasks(count: int) -> list[Any]:
    return [Named(f"t{number}") for number in range(count)]


@given(st.integers(1, 9), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_has_every_task_once(count: int, epoch: int, seed: int) -> None:
    one = Curriculum(tasks(count), {"pi": 1.0}, seed)
    names = [one.group(epoch * count + place)[0].name for place in range(count)]
    assert sorted(names) == sorted(task.name for task in tasks(count))


def test_epochs_have_orders_of_their_own_and_so_have_seeds() -> None:
    orders = {
        tuple(Curriculum(tasks(8), {"pi": 1.0}, seed).group(8 * epoch + place)[0].name for place in range(8))
        for seed in range(2)
        for epoch in range(2)
    }
    assert len(orders) == 4


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(0.1, 10), min_size=1), st.integers(1, 200))
def test_each_harness_has_its_share_at_any_time(mix: dict[str, float], groups: int) -> None:
    one = Curriculum(tasks(3), mix)
    found = Counter(one.harness(number) for number in range(groups))
    for name, weight in mix.items():
        assert abs(found[name] - groups * weight / sum(mix.values())) <= len(mix)


@given(st.integers(0, 300))
def test_a_group_is_the_same_in_whatever_order_it_is_asked_for(number: int) -> None:
    mix = {"a": 3.0, "b": 1.0}
    once, after = Curriculum(tasks(5), mix), Curriculum(tasks(5), mix)
    for earlier in range(0, number, 7):
        after.group(earlier)
    assert once.group(number) == after.group(number)


def test_nothing_to_draw_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one task"):
        Curriculum([], {"pi": 1.0})


def test_tasks_that_call_themselves_held_out_are_not_trained_on() -> None:
    train, held_out = split(TasksSection(train="demo"))
    assert train
    assert held_out
    assert {task.split for task in train} == {"train"}
    assert {task.split for task in held_out} == {"held_out"}
    assert len(split(TasksSection(train="demo", train_limit=2, held_out_limit=1))[0]) == 2


def test_a_task_on_both_sides_is_refused() -> None:
    name = split(TasksSection(train="demo"))[0][0].name
    with pytest.raises(ConfigError, match=f"tasks.held_out: {name} would be trained on and evaluated on"):
        split(TasksSection(train="demo", held_out=name))
