"""Groups from a rollout service: in order, as far ahead as allowed, over restarts neither lost nor rolled out twice. Recorded groups."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from trainer_parts import recorded_group, request_of, session

from polar.errors import ConfigError
from polar.rollout.client import AsyncClient
from polar.rollout.models import SessionDispatchRequest, SessionResult
from polar.testing.node import StubNode, broken, graded
from polar.testing.rollout import TOKEN, stub_rollouts
from polar.train.batch import Recipe, make_batch
from polar.train.source import RecordedSource, ServiceSource


class Node(StubNode):
    """Sessions end when their group's gate is open."""

    def __init__(self) -> None:
        super().__init__(play=self._wait, max_run_workers=64)
        self.open: dict[str, asyncio.Event] = {}
        self.all_open = False
        self.fail: set[str] = set()

    def let(self, *groups: int) -> None:
        for number in groups:
            self._gate(f"group {number}").set()

    def _gate(self, name: str) -> asyncio.Event:
        return self.open.setdefault(name, asyncio.Event())

    async def _wait(self, dispatched: SessionDispatchRequest) -> SessionResult:
        if not self.all_open:
            await self._gate(dispatched.instruction).wait()
        if dispatched.instruction in self.fail:
            return broken(dispatched)
        return graded(dispatched, reward=float(dispatched.sample))

    @property
    def asked(self) -> Counter[str]:
        """Sessions by their task's id."""
        return Counter(one.task_id for one in self.dispatched)


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[tuple[Node, AsyncClient]]:
    node = Node()
    async with stub_rollouts(folder, [node]) as (_, url), AsyncClient(url, TOKEN) as client:
        yield node, client


async def until(true: object, timeout_s: float = 10.0) -> None:
    assert callable(true)
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - a stub sets no event
            await asyncio.sleep(0.01)


async def test_groups_are_taken_in_order_whichever_ends_first(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, client):
        source = ServiceSource(client, request_of, "run")
        source.allow(3)
        await source.start(0)
        node.let(2, 1)
        await until(lambda: len(source.ready()) == 2)
        assert [group.number for group in source.ready()] == [1, 2]
        node.let(0)
        groups = [await source.take() for _ in range(3)]
        await source.aclose()
    assert [group.number for group in groups if group] == [0, 1, 2]
    first = groups[0]
    assert first is not None
    assert (first.task, first.harness) == ("t0", "shell")
    assert [result.sample for result in first.results] == [0, 1]


async def test_nothing_is_asked_for_beyond_what_is_allowed(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, client):
        node.all_open = True
        source = ServiceSource(client, request_of, "run")
        source.allow(2)
        await source.start(0)
        await source.take()
        await source.take()
        assert set(node.asked) == {"run-g000000", "run-g000001"}
        with pytest.raises(RuntimeError, match="not allowed"):
            await source.take()
        source.allow(3)
        assert (await source.take()) is not None
        await source.aclose()


async def test_failures_of_the_infrastructure_have_no_reward(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, client):
        node.all_open = True
        node.fail = {"group 0"}
        source = ServiceSource(client, request_of, "run")
        source.allow(1)
        await source.start(0)
        group = await source.take()
        await source.aclose()
    assert group is not None
    assert [(result.outcome, result.reward) for result in group.results] == [("infrastructure", None)] * 2


async def test_a_run_that_goes_on_finds_its_groups_and_runs_none_twice(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, client):
        node.all_open = True
        before = ServiceSource(client, request_of, "run")
        before.allow(4)
        await before.start(0)
        first = [await before.take() for _ in range(3)]
        await before.aclose()
        after = ServiceSource(client, request_of, "run")  # it was killed: its checkpoint knows of one group only
        after.allow(5)
        await after.start(1)
        again = [await after.take() for _ in range(4)]
        await after.aclose()
        assert node.asked == {f"run-g{number:06d}": 2 for number in range(5)}
    assert [group.number for group in again if group] == [1, 2, 3, 4]
    ids = [[result.session_id for result in group.results] for group in first if group]
    assert ids[1:] == [[result.session_id for result in group.results] for group in again[:2] if group]


async def test_groups_that_were_asked_for_with_other_settings_go_on_as_they_were(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, client):
        node.all_open = True
        before = ServiceSource(client, request_of, "run")
        before.allow(1)
        await before.start(0)
        first = await before.take()
        await before.aclose()
        after = ServiceSource(client, lambda number, name: request_of(number, name).model_copy(update={"timeout_seconds": 7.0}), "run")
        after.allow(1)
        await after.start(0)
        again = await after.take()
        await after.aclose()
    assert first is not None
    assert again is not None
    assert [one.session_id for one in again.results] == [one.session_id for one in first.results]


async def test_what_runs_ahead_of_a_checkpoint_is_cancelled_and_rolled_out_when_it_is_due(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, client):
        node.let(0, 1, 2)
        before = ServiceSource(client, request_of, "run")
        before.allow(6)
        await before.start(0)
        for _ in range(3):
            await before.take()
        await until(lambda: len(node.asked) == 6)
        await before.aclose()
        after = ServiceSource(client, request_of, "run")  # groups 3 to 5 run with weights that it does not have
        after.allow(3)
        await after.start(1)
        await until(lambda: not node.running)
        assert (await client.task("run-g000004", results=False)).counts["cancelled"] == 2
        node.all_open = True
        after.allow(6)
        groups = [await after.take() for _ in range(5)]
        assert [group.number for group in groups if group] == [1, 2, 3, 4, 5]
        assert all(result.reward is not None for group in groups if group for result in group.results)
        assert node.asked["run-g000004-r1"] == 2
        await after.aclose()
        third = ServiceSource(client, request_of, "run")  # and once more: the second turn is found
        third.allow(6)
        await third.start(4)
        again = await third.take()
        await third.aclose()
        assert node.asked["run-g000004-r1"] == 2
        assert "run-g000004-r2" not in node.asked
    assert again is not None
    assert [one.task_id for one in again.results] == ["run-g000004-r1"] * 2


async def test_a_run_that_is_over_leaves_nothing_running(tmp_path: Path) -> None:
    async with world(tmp_path) as (node, client):
        node.let(0)
        source = ServiceSource(client, request_of, "run")
        source.allow(3)
        await source.start(0)
        await source.take()
        await until(lambda: len(node.asked) == 3)
        await source.aclose(over=True)
        await until(lambda: not node.running)
        assert (await client.task("run-g000002", results=False)).status == "failed"


async def test_recorded_groups_come_in_their_order_from_any_position(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    groups = [recorded_group(number) for number in range(3)]
    path.write_text("\n".join(result.model_dump_json() for group in groups for result in group.results) + "\n")
    source = RecordedSource(path)
    await source.start(1)
    taken = [await source.take(), await source.take()]
    assert [group.number for group in taken if group] == [1, 2]
    assert await source.take() is None
    assert taken[0] == groups[1]


async def test_trajectories_are_grouped_by_their_rows_and_rewarded_by_them(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    lines = []
    for name, reward in (("a", 1.0), ("b", 0.0), ("c", None)):
        data = session(name, reward).trajectory
        assert data is not None
        data["traces"][0]["metadata"]["group_id"] = "g"
        if name == "b":
            del data["status"]  # other recorders do not say it
        lines.append(json.dumps(data))
    path.write_text("\n".join(lines))
    source = RecordedSource(path)
    assert [[result.reward for result in group.results] for group in source.groups] == [[1.0, 0.0, None]]
    assert [result.outcome for result in source.groups[0].results] == ["graded", "graded", "infrastructure"]
    assert make_batch(source.groups, Recipe(max_staleness=None), policy_version=0).counts.stepped == 24


def test_results_of_the_reference_system_have_the_reward_of_their_rows(tmp_path: Path) -> None:
    """There rewards stand in the rows, and the status is all that tells an outcome."""
    path = tmp_path / "results.jsonl"
    lines = []
    for name, reward, status in (("a", 1.0, "COMPLETED"), ("b", 0.0, "TIMEOUT"), ("c", 1.0, "ERROR"), ("d", None, "COMPLETED")):
        trajectory = session(name, reward).trajectory
        lines.append(json.dumps({"session_id": name, "task_id": "t", "status": status, "trajectory": trajectory}))
    path.write_text("\n".join(lines))
    (group,) = RecordedSource(path).groups
    assert [(one.outcome, one.reward) for one in group.results] == [
        ("graded", 1.0),
        ("policy", 0.0),
        ("infrastructure", None),
        ("graded", None),
    ]
    assert make_batch([group], Recipe(max_staleness=None), policy_version=0).counts.stepped == 24


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "there are no results"), ('{"a": 1}', "results.jsonl:1: neither a session's result nor a trajectory"), ("[1]", ":1: neither")],
)
def test_a_file_of_something_else_is_refused_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        RecordedSource(path)


def test_a_session_that_comes_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    line = session("a", 1.0).model_dump_json()
    path.write_text(f"{line}\n{line}\n")
    with pytest.raises(ConfigError, match="session a comes twice"):
        RecordedSource(path)
