"""Evaluations: counted by task and harness, kept, and not made twice."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from trainer_parts import session

from polar.errors import ConfigError, SaveFailed
from polar.harness.spec import AgentSpec
from polar.rollout.client import AsyncClient
from polar.rollout.models import SessionDispatchRequest, SessionResult, TaskRequest
from polar.testing.node import StubNode, broken, graded
from polar.testing.rollout import TOKEN, stub_rollouts
from polar.train.evaluation import Evaluations, Outcome, by_harness, read_outcome, results_file


def request(number: int, step: int, task_id: str) -> TaskRequest:
    return TaskRequest(
        task_id=task_id,
        instruction="x",
        num_samples=2,
        kind="eval",
        agent=AgentSpec(harness="shell", custom_shell="true"),
        metadata={"task": f"t{number // 2}", "harness": ("pi", "codex")[number % 2], "step": step},
        max_attempts=1,
    )


async def play(dispatched: SessionDispatchRequest) -> SessionResult:
    if dispatched.metadata["harness"] == "codex" and dispatched.sample == 1:
        return broken(dispatched)
    return graded(dispatched, reward=float(dispatched.metadata["harness"] == "pi"))


async def test_an_evaluation_is_made_once_and_read_afterwards(tmp_path: Path) -> None:
    node = StubNode(play=play, max_run_workers=8)
    async with stub_rollouts(tmp_path / "service", [node]) as (_, url), AsyncClient(url, TOKEN) as client:
        heard: list[int] = []
        told: list[Outcome] = []
        more = {"hear": lambda step, done: heard.append(done), "tell": told.append, "ks": (1, 2)}
        evaluations = Evaluations(client, 4, request, "run", tmp_path / "evaluations", **more)  # type: ignore[arg-type]
        values = await evaluations(10)
        again = await Evaluations(client, 4, request, "run", tmp_path / "evaluations", ks=(1, 2))(10)
    assert values == again
    assert len(node.dispatched) == 8
    assert sorted(heard) == list(range(1, 9))
    assert [outcome.step for outcome in told] == [10]
    assert values["eval/pi/pass@1"] == 1.0
    assert values["eval/pi/pass@2"] == 1.0
    assert values["eval/codex/pass@1"] == 0.0
    assert (values["eval/codex/sessions"], values["eval/codex/lost"]) == (2, 2)
    assert "eval/codex/pass@2" not in values
    assert 0 < values["eval/pi/pass@1/low"] < 1
    assert not [name for name, value in values.items() if math.isnan(value)]


async def test_an_evaluation_that_was_cut_short_goes_on_with_what_has_run(tmp_path: Path) -> None:
    node = StubNode(play=play, max_run_workers=8)
    async with stub_rollouts(tmp_path / "service", [node]) as (_, url), AsyncClient(url, TOKEN) as client:
        await Evaluations(client, 4, request, "run", tmp_path / "evaluations")(3)
        results_file(tmp_path / "evaluations", 3).unlink()  # as if the process had been killed before it was there
        await Evaluations(client, 4, request, "run", tmp_path / "evaluations")(3)
    assert len(node.dispatched) == 8


async def test_one_that_cannot_be_kept_names_the_folder_and_is_kept_later(tmp_path: Path) -> None:
    node, folder = StubNode(play=play, max_run_workers=8), tmp_path / "evaluations"
    folder.write_text("in the way, as a full disk is")
    async with stub_rollouts(tmp_path / "service", [node]) as (_, url), AsyncClient(url, TOKEN) as client:
        with pytest.raises(SaveFailed, match=rf"the evaluation's results could not be written to {folder}: "):
            await Evaluations(client, 2, request, "run", folder)(3)
        folder.unlink()
        await Evaluations(client, 2, request, "run", folder)(3)
    assert results_file(folder, 3).is_file()
    assert len(node.dispatched) == 4


def test_infrastructure_failures_are_in_no_estimate() -> None:
    results = [session("a", 1.0), session("b", 0.0, outcome="policy"), session("c", None, outcome="infrastructure")]
    outcome = Outcome(0, by_harness(results))
    estimate = outcome.estimate("pi")
    assert estimate is not None
    assert (estimate.mean, estimate.samples) == (0.5, 2)
    assert Outcome(0, by_harness(results[2:])).estimate("pi") is None


def test_a_partial_reward_passes_where_that_is_said() -> None:
    results = by_harness([session("a", 0.6)])
    assert Outcome(0, results).passes("pi") == {"task of g": [0.0]}
    assert Outcome(0, results, passed=0.5).passes("pi") == {"task of g": [1.0]}


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = results_file(tmp_path, 1)
    path.write_text("{}\n")
    with pytest.raises(ConfigError, match="not an evaluation's results"):
        read_outcome(path)
