"""The loop: what is taken, trained, kept and sent on, and in which order; how it stops and goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_parts import ListMetrics, ListSource, config, recorded_group, tiny_learner, tiny_policy, weights_of

from polar.errors import NotTrainable, SyncFailed
from polar.train import checkpoints
from polar.train.checkpoints import RunState
from polar.train.config import TrainConfig
from polar.train.groups import Group
from polar.train.policy import Policy
from polar.train.progress import Silent
from polar.train.trainer import Parts, Trainer

GROUPS = [recorded_group(number) for number in range(12)]


class Syncs:
    """Notes what the engines are told; `fail_at` a version, it raises. `absent`: in which calls no engine is there; `half`: in which some
    load the weights, and others do not."""

    def __init__(self, fail_at: int | None = None, absent: Sequence[int] = (), half: Sequence[int] = ()) -> None:
        self.versions: list[int] = []
        self.fail_at = fail_at
        self.absent = absent
        self.half = half
        self.calls = 0

    async def __call__(self, folder: Path, version: int) -> None:
        self.calls += 1
        if self.calls - 1 in self.absent:
            raise SyncFailed("the engine cannot be reached")
        if self.calls - 1 in self.half:
            raise SyncFailed("not every engine has the weights", paused=True)
        if version == self.fail_at:
            raise NotTrainable("an engine did not load them")
        self.versions.append(version)


class Writes:
    def write(self, policy: Policy, version: int) -> Path:
        return Path(f"policy-{version}")


def trainer(folder: Path, groups: Sequence[Group] = GROUPS, settings: TrainConfig | None = None, **parts: Any) -> tuple[Trainer, Parts]:
    settings = settings or config()
    whole = Parts(
        parts.pop("learner", None) or tiny_learner(settings),
        parts.pop("source", None) or ListSource(groups),
        ListMetrics(),
        **{"sync": Syncs(), "exports": Writes(), **parts},
    )
    return Trainer(settings, whole, folder), whole


async def test_each_step_raises_the_version_and_brings_it_to_the_engines(tmp_path: Path) -> None:
    one, parts = trainer(tmp_path)
    summary = await one.run()
    assert (summary.ended, summary.steps, summary.policy_version) == ("done", 3, 3)
    assert parts.sync.versions == [0, 1, 2, 3]  # type: ignore[union-attr]
    assert parts.source.taken == [0, 1, 2]  # type: ignore[attr-defined]
    assert parts.source.closed  # type: ignore[attr-defined]
    assert parts.metrics.of("policy_version") == [1, 2, 3]  # type: ignore[attr-defined]
    assert summary.checkpoint is not None
    assert checkpoints.load_run(summary.checkpoint).position == {"next_group": 3}


@pytest.mark.parametrize(("staleness", "expected"), [(0, [2, 4, 6]), (1, [4, 6]), (2, [6])])
async def test_rollouts_run_ahead_as_allowed_and_not_past_the_end(staleness: int, expected: list[int], tmp_path: Path) -> None:
    settings = config(max_staleness=staleness, batch={"groups": 2, "samples": 2}, steps=3)
    groups = [recorded_group(number, version=str(number // 2)) for number in range(12)]
    one, parts = trainer(tmp_path, groups, settings)
    await one.run()
    assert sorted(set(parts.source.allowed)) == expected  # type: ignore[attr-defined]


async def test_a_group_that_teaches_nothing_is_replaced_by_a_fresh_one(tmp_path: Path) -> None:
    groups = [recorded_group(0, (1.0, 1.0)), recorded_group(1, (0.0, 0.0)), *GROUPS[2:]]
    one, parts = trainer(tmp_path, groups, config(steps=1, max_staleness=0))
    await one.run()
    assert parts.source.taken == [0, 1, 2]  # type: ignore[attr-defined]
    assert parts.source.allowed == [1, 2, 3, 3]  # type: ignore[attr-defined]
    values = parts.metrics.lines[-2][1]  # type: ignore[attr-defined]
    assert values["groups"] == 3
    assert values["groups/taught"] == 1
    assert values["tokens/dropped/zero_variance"] == 48
    assert values["tokens/in_rows"] == values["tokens/stepped"] + values["tokens/stale"] + values["tokens/dropped/zero_variance"]


async def test_a_batch_of_solved_tasks_trains_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    solved = [recorded_group(number, (1.0, 1.0)) for number in range(30)]
    settings = config(steps=5, batch={"groups": 1, "samples": 2, "most_groups": 2})
    one, parts = trainer(tmp_path, solved, settings)
    before = weights_of(parts.learner)
    summary = await one.run()
    assert (summary.ended, summary.steps, summary.policy_version) == ("done", 5, 0)
    assert parts.sync.versions == [0]  # type: ignore[union-attr]
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(parts.learner), strict=True))


async def test_when_the_infrastructure_fails_everything_the_run_stops_and_says_why(tmp_path: Path) -> None:
    failed = [recorded_group(number, (None, None), outcome="infrastructure") for number in range(30)]
    one, _ = trainer(tmp_path, failed, config(batch={"groups": 1, "samples": 2, "most_groups": 1}))
    with pytest.raises(NotTrainable, match=r"3 batches in a row .*infrastructure failed every session \(sandbox: no room\)"):
        await one.run()


@pytest.mark.parametrize("there", [True, False])
async def test_when_the_infrastructure_fails_everything_engines_get_the_weights_again(there: bool, tmp_path: Path) -> None:
    """One that was started anew has forgotten them, and gets no calls until then."""
    one, parts = trainer(
        tmp_path,
        [recorded_group(0, (None, None), outcome="infrastructure"), recorded_group(1), recorded_group(2)],
        config(steps=3, batch={"groups": 1, "samples": 2, "most_groups": 1}),
        sync=Syncs(absent=() if there else (1,)),
    )
    assert (await one.run()).policy_version == 2
    assert parts.sync.versions == ([0, 0, 1, 2] if there else [0, 1, 2])  # type: ignore[union-attr]


async def test_engines_that_stay_paused_end_the_run_after_an_empty_batch_too(tmp_path: Path) -> None:
    """It would wait for sessions whose calls wait for weights that nobody brings."""
    groups = [recorded_group(0, (None, None), outcome="infrastructure"), recorded_group(1)]
    settings = config(steps=2, batch={"groups": 1, "samples": 2, "most_groups": 1})
    one, parts = trainer(tmp_path, groups, settings, sync=Syncs(half=(1,)))
    with pytest.raises(SyncFailed, match="not every engine has the weights"):
        await one.run()
    assert parts.source.taken == [0]  # type: ignore[attr-defined]


async def test_tokens_that_are_too_old_are_not_trained_and_a_run_of_them_is_an_error(tmp_path: Path) -> None:
    unknown = [recorded_group(number, version=None) for number in range(12)]
    one, parts = trainer(tmp_path, unknown, config(max_staleness=1))
    with pytest.raises(NotTrainable, match="older than max_staleness allows, or carry no policy version"):
        await one.run()
    assert parts.metrics.of("tokens/stale") == [24, 24]  # type: ignore[attr-defined]


async def test_a_shut_gate_stops_the_run_before_anything_is_trained(tmp_path: Path) -> None:
    one, parts = trainer(tmp_path, settings=config(gate={"rows": 4, "mean": 1e-6}))
    before = weights_of(parts.learner)
    with pytest.raises(NotTrainable, match="log-probabilities differ"):
        await one.run()
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(parts.learner), strict=True))
    assert parts.metrics.of("gate/open") == [0.0]  # type: ignore[attr-defined]
    assert checkpoints.latest(tmp_path / "checkpoints") is None


async def test_a_shut_gate_that_only_warns_lets_the_run_go_on(tmp_path: Path) -> None:
    one, parts = trainer(tmp_path, settings=config(gate={"rows": 4, "mean": 1e-6, "action": "warn"}, steps=1))
    assert (await one.run()).ended == "done"
    assert parts.metrics.of("gate/tokens")[0] == 24  # type: ignore[attr-defined]


async def test_a_shut_gate_is_of_the_step_that_was_not_made(tmp_path: Path) -> None:
    groups = [recorded_group(0), recorded_group(1, version="5")]
    one, parts = trainer(tmp_path, groups, config(gate={"rows": 2, "mean": 99, "largest": 99}))
    with pytest.raises(NotTrainable, match="stale_policy"):
        await one.run()
    shown = [(step, values["gate/open"]) for step, values in parts.metrics.lines if "gate/open" in values]  # type: ignore[attr-defined]
    assert shown == [(1, 1.0), (2, 0.0)]


async def test_a_gate_that_never_has_anything_to_compare_says_so(tmp_path: Path) -> None:
    class Says(Silent):
        def say(self, line: str) -> None:
            said.append(line)

    said: list[str] = []
    groups = [recorded_group(number, version=str(max(0, number - 1))) for number in range(8)]
    one, _ = trainer(tmp_path, groups, config(steps=8, gate={"rows": 2, "mean": 99, "largest": 99}), progress=Says())
    await one.run()
    assert len([line for line in said if "the gate had nothing to compare in 5 steps" in line]) == 1


async def test_the_gate_looks_at_what_the_present_policy_sampled_even_where_it_is_for_later(tmp_path: Path) -> None:
    source = ListSource([recorded_group(0, version="0"), recorded_group(1, version="0")], ready=[recorded_group(7, version="1")])
    settings = config(steps=2, gate={"rows": 2, "mean": 99, "largest": 99}, max_staleness=1)
    one, parts = trainer(tmp_path, settings=settings, source=source)
    await one.run()
    assert parts.metrics.of("gate/tokens") == [24, 24]  # type: ignore[attr-defined]


@pytest.mark.parametrize("ahead", [(), (recorded_group(11, version="11"),)])
async def test_what_ran_ahead_with_lost_weights_waits_for_its_turn_before_the_gate(ahead: Sequence[Group], tmp_path: Path) -> None:
    """Killed at step 11 or later, gone on from step 10: groups that are not due may be of version 11, which the trainer makes again."""
    due = [recorded_group(10, version="9")]
    source = ListSource([*GROUPS[:10], *due], ready=[*ahead, recorded_group(12, version="10")])
    settings = config(steps=11, gate={"rows": 4, "mean": 99, "largest": 99}, max_staleness=1)
    parts = Parts(tiny_learner(settings), source, ListMetrics())
    await Trainer(settings, parts, tmp_path, RunState(10, 10, {"next_group": 10})).run()
    assert parts.metrics.of("gate/tokens") == [24]  # type: ignore[attr-defined]


async def test_rows_of_a_version_that_the_trainer_never_had_shut_the_gate(tmp_path: Path) -> None:
    groups = [recorded_group(0, version="5")]
    one, _ = trainer(tmp_path, groups, config(gate={"rows": 2, "mean": 99, "largest": 99}))
    with pytest.raises(NotTrainable, match="policy version 5, and the trainer is at 0"):
        await one.run()


async def test_a_sync_that_fails_ends_the_run_with_the_step_kept(tmp_path: Path) -> None:
    one, _ = trainer(tmp_path, sync=Syncs(fail_at=2))
    with pytest.raises(NotTrainable, match="did not load"):
        await one.run()
    place = checkpoints.latest(tmp_path / "checkpoints")
    assert place is not None
    assert checkpoints.load_run(place).batches == 2


async def test_a_step_that_fails_half_way_leaves_no_checkpoint_of_it(tmp_path: Path) -> None:
    one, parts = trainer(tmp_path, settings=config(checkpoints={"every": 1}))
    step = parts.learner.step

    def broken(rows: Any) -> Any:
        if parts.learner.steps == 1:
            raise RuntimeError("out of memory")
        return step(rows)

    parts.learner.step = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="out of memory"):
        await one.run()
    place = checkpoints.latest(tmp_path / "checkpoints")
    assert place is not None
    assert checkpoints.load_run(place).batches == 1


class Stalls(ListSource):
    """Gives `before` groups, then none for ever."""

    def __init__(self, groups: Sequence[Group], before: int) -> None:
        super().__init__(groups)
        self.before = before
        self.stalled = asyncio.Event()

    async def take(self) -> Group | None:
        if len(self.taken) >= self.before:
            self.stalled.set()
            await asyncio.Event().wait()
        return await super().take()


async def test_stopping_while_it_waits_keeps_what_is_trained(tmp_path: Path) -> None:
    source = Stalls(GROUPS, before=2)
    one, _ = trainer(tmp_path, source=source)
    running = asyncio.create_task(one.run())
    await source.stalled.wait()
    one.stop()
    summary = await asyncio.wait_for(running, 30)
    assert (summary.ended, summary.steps) == ("stopped", 2)
    assert summary.checkpoint is not None
    assert checkpoints.load_run(summary.checkpoint).position == {"next_group": 2}


async def test_stopping_in_a_step_keeps_it_and_asks_no_engine_for_anything(tmp_path: Path) -> None:
    class Stops(Silent):
        def stepping(self, step: int, rows: int, tokens: int) -> None:
            one.stop()

    syncs = Syncs(fail_at=1)  # whoever stopped the run may have stopped its engines
    one, _ = trainer(tmp_path, sync=syncs, progress=Stops())
    summary = await one.run()
    assert (summary.ended, summary.steps, summary.policy_version) == ("stopped", 1, 1)
    assert summary.checkpoint is not None
    assert syncs.versions == [0]


@pytest.mark.parametrize(("more", "ended"), [({"sync": None, "exports": None}, "done"), ({}, "stopped")])
async def test_a_stop_in_the_last_step_leaves_only_what_engines_were_to_get(more: dict[str, Any], ended: str, tmp_path: Path) -> None:
    class Stops(Silent):
        def stepping(self, step: int, rows: int, tokens: int) -> None:
            one.stop()

    one, _ = trainer(tmp_path, settings=config(steps=1), progress=Stops(), **more)
    summary = await one.run()
    assert (summary.ended, summary.steps) == (ended, 1)


async def test_groups_of_an_unfinished_batch_are_taken_again_after_a_stop(tmp_path: Path) -> None:
    settings = config(batch={"groups": 2, "samples": 2})
    source = Stalls(GROUPS, before=3)
    one, _ = trainer(tmp_path, settings=settings, source=source)
    running = asyncio.create_task(one.run())
    await source.stalled.wait()
    one.stop()
    summary = await asyncio.wait_for(running, 30)
    assert summary.steps == 1
    assert summary.checkpoint is not None
    learner = tiny_learner(settings, Policy.load(str(summary.checkpoint / "model")))
    state = checkpoints.restore(summary.checkpoint, learner)
    again = ListSource(GROUPS)
    await Trainer(settings, Parts(learner, again, ListMetrics()), tmp_path, state).run()
    assert again.taken == [2, 3, 4, 5]


async def test_a_run_in_pieces_is_the_run_in_one_piece(tmp_path: Path) -> None:
    whole, parts = trainer(tmp_path / "whole", settings=config(steps=6))
    await whole.run()
    curve = parts.metrics.of("step/loss")  # type: ignore[attr-defined]
    pieces: list[float] = []
    learner = tiny_learner(config())
    state = None
    for steps in (2, 3, 6):
        settings = config(steps=steps)
        place = checkpoints.latest(tmp_path / "pieces" / "checkpoints")
        if place is not None:
            learner = tiny_learner(settings, Policy.load(str(place / "model")))
            state = checkpoints.restore(place, learner)
        metrics = ListMetrics()
        await Trainer(settings, Parts(learner, ListSource(GROUPS), metrics), tmp_path / "pieces", state).run()
        pieces += metrics.of("step/loss")
    assert pieces == curve
    assert all(torch.equal(a, b) for a, b in zip(weights_of(parts.learner), weights_of(learner), strict=True))


async def test_evaluations_come_before_during_and_after(tmp_path: Path) -> None:
    seen: list[int] = []

    async def evaluate(step: int) -> dict[str, float]:
        seen.append(step)
        return {"eval/pi/pass@1": 0.5}

    one, parts = trainer(tmp_path, settings=config(steps=5, evaluation={"every": 2}), evaluate=evaluate)
    await one.run()
    assert seen == [0, 2, 4, 5]
    assert [step for step, values in parts.metrics.lines if "eval/pi/pass@1" in values] == seen  # type: ignore[attr-defined]


async def test_an_evaluation_is_of_weights_that_a_killed_run_goes_on_with(tmp_path: Path) -> None:
    found: list[int] = []

    async def evaluate(step: int) -> dict[str, float]:
        place = checkpoints.latest(tmp_path / "checkpoints")
        found.append(0 if place is None else checkpoints.load_run(place).batches)
        return {}

    one, _ = trainer(tmp_path, settings=config(steps=5, evaluation={"every": 2}), evaluate=evaluate)
    await one.run()
    assert found == [0, 2, 4, 5]


async def test_recorded_groups_that_run_out_end_the_run_with_what_there_was(tmp_path: Path) -> None:
    settings = config(steps=9, batch={"groups": 2, "samples": 2})
    one, parts = trainer(tmp_path, GROUPS[:5], settings)
    summary = await one.run()
    assert (summary.ended, summary.steps) == ("no_more_groups", 3)
    assert parts.source.taken == [0, 1, 2, 3, 4]  # type: ignore[attr-defined]


async def test_what_earned_more_becomes_likelier_and_shuffled_rewards_are_others(tmp_path: Path) -> None:
    groups = [recorded_group(number, (1.0, 0.0, 0.0, 0.0)) for number in range(8)]
    weights = []
    for shuffled in (False, True):
        settings = config(shuffle_rewards=shuffled, steps=4, batch={"groups": 2, "samples": 4})
        one, parts = trainer(tmp_path / str(shuffled), groups, settings, learner=tiny_learner(settings, tiny_policy()))
        await one.run()
        weights.append(weights_of(parts.learner))
        assert parts.metrics.of("groups/taught") == [2, 2, 2, 2]  # type: ignore[attr-defined]
    assert not all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
