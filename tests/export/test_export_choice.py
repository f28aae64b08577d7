"""Which sessions an export takes, and in which split they stand."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from export_samples import Talk, Write, fill, lines, solved
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.export import About, Spec, export, label_line


def taken(folder: Path, split: str = "train") -> list[str]:
    return [row["session_id"] for row in lines(folder, split)]


async def test_sessions_without_a_reward_are_left_out_by_name(write: Write) -> None:
    facts, folder = await write([solved("a", reward=1.0), solved("b", created=2.0)])
    assert taken(folder) == ["a"]
    assert facts["sessions"] == {"seen": 2, "taken": 1, "refused": {"no reward": 1}}
    _, folder = await write([solved("a", reward=1.0), solved("b", created=2.0)], keep_unrewarded=True)
    assert taken(folder) == ["a", "b"]


async def test_rejection_sampling_by_reward(write: Write) -> None:
    talks = [solved(f"s{i}", created=i, reward=i / 4) for i in range(5)]
    facts, folder = await write(talks, min_reward=0.75)
    assert taken(folder) == ["s3", "s4"]
    assert facts["sessions"]["refused"] == {"reward below the threshold": 3}


async def test_best_of_n_in_each_group_and_the_earlier_of_equals(write: Write) -> None:
    rewards = {"a": [0.1, 0.9, 0.5, 0.9], "b": [1.0], "c": [0.0, 0.0]}
    talks = [
        solved(f"{group}{i}", created=10 * i + place, group_id=group, reward=reward)
        for place, (group, found) in enumerate(rewards.items())
        for i, reward in enumerate(found)
    ]
    facts, folder = await write(talks, best_of=1)
    assert sorted(taken(folder)) == ["a1", "b0", "c0"]
    assert facts["sessions"]["refused"] == {"not among the best of its group": 4}
    _, folder = await write(talks, best_of=1, min_reward=0.5)
    assert sorted(taken(folder)) == ["a1", "b0"]


async def test_best_of_n_takes_the_task_for_a_group_and_refuses_sessions_without_either(write: Write) -> None:
    _, folder = await write([solved("a", task="t", reward=0.2), solved("b", created=2.0, task="t", reward=0.3)], best_of=1)
    assert taken(folder) == ["b"]
    with pytest.raises(ConfigError, match="neither a group_id nor a task"):
        await write([solved("a", reward=1.0)], best_of=1)


async def test_what_failed_by_infrastructure_or_is_still_open_is_left_out(write: Write) -> None:
    still_open = solved("b", created=2.0, reward=1.0)
    still_open.closed = None
    talks = [solved("a", outcome="failed_by_infrastructure"), still_open, solved("c", created=3.0, outcome="failed_by_policy", reward=0.0)]
    facts, folder = await write(talks)
    assert taken(folder) == ["c"]
    assert facts["sessions"]["refused"] == {"failed by infrastructure": 1, "still open": 1}
    _, folder = await write(talks, include_open=True)
    assert taken(folder) == ["b", "c"]


async def test_filters_by_harness_and_task(write: Write) -> None:
    talks = [solved("a", task="edit-1", reward=1.0), solved("b", created=2.0, task="copy-1", harness="codex", reward=1.0)]
    assert taken((await write(talks, task="edit-*"))[1]) == ["a"]
    assert taken((await write(talks, harness="codex"))[1]) == ["b"]


async def test_sessions_of_an_evaluation_are_no_training_data_unless_asked_for(write: Write) -> None:
    talks = [solved("a", reward=1.0), solved("b", created=2.0, reward=1.0)]
    talks[1].kind = "eval"
    facts, folder = await write(talks)
    assert taken(folder) == ["a"]
    assert facts["sessions"]["refused"] == {"a session of another kind": 1}
    assert facts["acceptance"] == [{"source": "unknown", "graded": 1, "accepted": 1, "share": 1.0, "mean_reward": 1.0}]
    assert taken((await write(talks, kind="eval"))[1]) == ["b"]
    assert taken((await write(talks, kind="any"))[1]) == ["a", "b"]


async def test_rewards_from_a_file(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "rewards.jsonl"
    path.write_bytes(label_line("a", reward=0.0) + label_line("b", reward=1.0) + label_line("gone", reward=1.0))
    facts, folder = await write([solved("a", reward=1.0), solved("b", created=2.0)], labels=str(path), min_reward=0.5)
    assert taken(folder) == ["b"]
    assert facts["spec"]["labels"] == "rewards.jsonl"  # without its folder: a manifest is published


async def test_a_file_with_two_rewards_for_one_session_is_refused(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "rewards.jsonl"
    path.write_bytes(label_line("a", reward=0.0) + label_line("a", reward=1.0))
    with pytest.raises(ConfigError, match="two different things of session a"):
        await write([solved("a")], labels=str(path))


async def test_acceptance_by_source_counts_graded_sessions(write: Write) -> None:
    talks = [solved(f"m{i}", created=i, repository="moto", reward=float(i < 2)) for i in range(4)]
    talks += [solved(f"d{i}", created=9 + i, source="dask-set", repository="dask", reward=0.0) for i in range(2)]
    talks += [solved("lost", created=20, repository="moto", outcome="failed_by_infrastructure"), solved("none", created=21)]
    facts, folder = await write(talks, min_reward=1.0)
    assert facts["acceptance"] == [
        {"source": "moto", "graded": 4, "accepted": 2, "share": 0.5, "mean_reward": 0.5},
        {"source": "dask-set", "graded": 2, "accepted": 0, "share": 0.0, "mean_reward": 0.0},
    ]
    assert "| moto | 2 | 4 | 50.0% | 0.500 |" in (folder / "README.md").read_text()


# --- splits ------------------------------------------------------------------------------------------------------------


async def test_the_same_task_names_its_own_split(write: Write) -> None:
    talks = [solved("a", split="train", reward=1.0), solved("b", created=2.0, split="held_out", reward=1.0)]
    _, folder = await write(talks, split_by="split")
    assert (taken(folder), taken(folder, "held_out")) == (["a"], ["b"])


async def test_a_session_that_cannot_be_split_is_an_error_at_the_start(write: Write) -> None:
    talks = [solved("a", repository="r", reward=1.0), solved("b", created=2.0, reward=1.0)]
    with pytest.raises(ConfigError, match="session b has no repository"):
        await write(talks, splits={"test": 0.5})


async def test_one_repository_cannot_be_split(write: Write) -> None:
    with pytest.raises(ConfigError, match="all sessions are of one repository"):
        await write([solved("a", repository="r", reward=1.0)], splits={"test": 0.5})


async def test_a_group_never_stands_in_two_splits(write: Write) -> None:
    talks = [solved(f"s{i}", created=i, repository=f"r{i}", group_id="g", reward=1.0) for i in range(4)]
    with pytest.raises(ConfigError, match="group g would stand in several splits"):
        await write(talks, splits={"test": 0.5})


async def test_an_earlier_split_is_kept_when_data_is_added(write: Write) -> None:
    talks = [solved(f"s{i}", created=i, repository=f"r{i}", reward=1.0) for i in range(10)]
    _, first = await write(talks, splits={"test": 0.3})
    more = talks + [solved(f"n{i}", created=100 + i, repository=f"new{i}", reward=1.0) for i in range(40)]
    _, second = await write(more, splits={"test": 0.3}, known_splits=str(first / "splits.jsonl"), seed=5)
    assert set(taken(first, "test")) <= set(taken(second, "test"))
    assert set(taken(first)) <= set(taken(second))
    assert len(taken(second, "test")) == 15


async def test_a_prompt_of_one_split_is_left_out_of_another(write: Write) -> None:
    """Two repositories with the same instruction: their sessions would leak, whatever the tasks are called."""
    talks = [solved(f"s{i}", text="the same thing", created=i, repository=f"r{i}", reward=1.0, turns=2 + i) for i in range(6)]
    facts, folder = await write(talks, splits={"test": 0.5})
    assert facts["rows"]["dropped"] == {"its prompt stands in another split": 3}
    assert len(taken(folder)) + len(taken(folder, "test")) == 3
    facts, _ = await write(talks, splits={"test": 0.5}, allow_shared_prompts=True)
    assert facts["rows"]["dropped"] == {}


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=2, max_size=8),
    share=st.floats(0.05, 0.9),
    by=st.sampled_from(["repository", "task"]),
    seed=st.integers(0, 3),
)
def test_no_key_stands_in_two_splits(sizes: list[int], share: float, by: str, seed: int) -> None:
    talks = [
        solved(f"s{key}-{i}", created=10 * key + i, repository=f"r{key}", task=f"t{key}", reward=1.0)
        for key, size in enumerate(sizes)
        for i in range(size)
    ]

    async def run(folder: Path) -> dict[str, Any]:
        store = await fill(folder / "a.db", talks)
        try:
            spec = Spec(file_format="jsonl", splits={"test": share}, split_by=by, seed=seed)  # type: ignore[arg-type]
            return await export(store, "x", folder / "out", spec, about=About("T"))
        finally:
            await store.aclose()

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            facts = asyncio.run(run(folder))
        except ConfigError as error:
            if "leave nothing" not in str(error):
                raise
            return  # too few to be split
        sides = [{row[by] for row in lines(folder / "out", split)} for split in ("train", "test")]
        named = {line["key"]: line["split"] for line in map(json.loads, (folder / "out" / "splits.jsonl").read_text().splitlines())}
    assert sides[0]
    assert sides[1]
    assert not sides[0] & sides[1]
    assert named == {key: split for split, side in zip(("train", "test"), sides, strict=True) for key in side}
    held = facts["splits"]["test"]["sessions"]
    assert abs(held - share * sum(sizes)) <= max(sizes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"best_of": 0}, "at least 1"),
        ({"best_of": 1, "keep_unrewarded": True}, "compares rewards"),
        ({"splits": {"train": 0.5}}, "name only those"),
        ({"splits": {"a b": 0.5}}, "letters"),
        ({"splits": {"test": 1.5}}, "above 0 and below 1"),
        ({"splits": {"test": 0.5, "dev": 0.5}}, "nothing for `train`"),
        ({"splits": {"test": 0.5}, "split_by": "split"}, "goes without --split"),
        ({"labels": "/nowhere.jsonl"}, "does not exist"),
        ({"builder": "none"}, "no builder is called"),
        ({"credit": "none"}, "no credit policy"),
        ({"options": {"cut": "token", "max_length": 9}}, "whole answer"),
        ({"part_mb": 0}, "above 0"),
    ],
)
async def test_options_that_make_no_sense_are_refused_before_anything_is_written(
    write: Write, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await write([Talk("a")], **options)
    assert not (tmp_path / "out1").exists()
