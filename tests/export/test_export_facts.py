"""What is known of a session: its metadata, a labels file over it, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from export_samples import solved

from polar.errors import ConfigError
from polar.export import facts_of, label_line, read_labels


def test_facts_stand_in_the_metadata() -> None:
    facts = facts_of(solved("s", task="t", repository="r", reward=1, group_id="g").session)
    assert (facts.task, facts.repository, facts.reward, facts.group, facts.harness) == ("t", "r", 1.0, "g", "pi")


def test_a_label_wins_over_the_metadata() -> None:
    facts = facts_of(solved("s", task="t", reward=1).session, {"reward": 0.5, "repository": "r"})
    assert (facts.task, facts.reward, facts.repository) == ("t", 0.5, "r")


def test_a_task_id_is_a_task_where_no_task_is_named() -> None:
    assert facts_of(solved("s", task_id="t1").session).task == "t1"
    assert facts_of(solved("s", task_id="t1", task="t").session).task == "t"


def test_no_reward_is_none_and_not_zero() -> None:
    assert facts_of(solved("s").session).reward is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reward", "1"),
        ("reward", True),
        ("reward", math.nan),
        ("reward", math.inf),
        ("outcome", "lost"),
        ("task", 7),
        ("row_rewards", 1.0),
        ("row_rewards", ["1"]),
        ("group_id", "\ud83d"),
    ],
)
def test_a_fact_of_the_wrong_type_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        facts_of(solved("s", **{name: value}).session)


def test_an_infrastructure_failure_has_no_reward() -> None:
    """Law 5: it is never a zero."""
    with pytest.raises(ConfigError, match="failed by infrastructure and has a reward"):
        facts_of(solved("s", outcome="failed_by_infrastructure", reward=0.0).session)


def test_labels_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "rewards.jsonl"
    path.write_bytes(label_line("a", reward=1) + b"\n" + label_line("b", reward=None, outcome="failed_by_policy"))
    assert dict(read_labels(path)) == {"a": {"reward": 1}, "b": {"reward": None, "outcome": "failed_by_policy"}}


@pytest.mark.parametrize("line", ["{", "[]", '{"reward": 1}', '{"session_id": "a", "rewrad": 1}', '{"session_id": "a", "reward": "x"}'])
def test_a_wrong_label_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rewards.jsonl"
    path.write_text('{"session_id": "ok", "reward": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        list(read_labels(path))


def test_labels_that_are_not_there_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_labels(tmp_path / "none.jsonl"))
