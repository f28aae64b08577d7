"""The loop: groups in, a step, new weights out to the engines, while the next groups are being rolled out already.

    take groups ─► batch ─► gate ─► step ─► metrics ─► checkpoint (every n) ─► weights to the engines ─► evaluation (every n) ─► again

A step's order is what makes a run survive being killed at any moment:

* Metrics are on disk before the checkpoint that counts their step, and those of steps that a checkpoint does not count are cut when the run
  goes on: no step is missing, none is there twice.
* A group counts as consumed with the checkpoint whose step it was part of, never earlier. It is asked for again under the same name, and a
  service that has run it gives the same results.
* An evaluation is of weights that a checkpoint has: killed meanwhile, the run goes on with the weights that its sessions are of.
* Engines get the run's weights and version before the first group is asked for, whatever they were serving.

It is given its parts, and starts none: a learner, a source of groups, a syncer, metrics, evaluations. `polar.train.run` puts them together.
Everything slow that is not `await`ed runs in a thread, so that whoever shares the event loop goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from polar.errors import NotTrainable, SyncFailed
from polar.train import checkpoints
from polar.train.batch import Batch, Recipe, make_batch
from polar.train.checkpoints import RunState
from polar.train.config import TrainConfig
from polar.train.figures import gate_values, step_values
from polar.train.gate import Facts, Report, Threshold, compare
from polar.train.groups import Group, teaches
from polar.train.learner import Learner, StepReport
from polar.train.policy import Policy
from polar.train.progress import Progress, Silent
from polar.train.rows import Row, row_of
from polar.train.source import Source
from polar.train.weights import version_number
from polar.trajectory.row import Trace

T = TypeVar("T")
Ended = Literal["done", "stopped", "no_more_groups"]

UNSEEN = 5
"""Steps in a row in which the gate had nothing to compare before that is said."""
EMPTY_BATCHES = 3
"""Batches in a row without anything to train before the run stops and says why."""


class Syncs(Protocol):
    """`polar.train.sync.Syncer`: brings the weights in `folder` into every engine, and their version to every gateway."""

    async def __call__(self, folder: Path, version: int) -> Any: ...


class Exporter(Protocol):
    """`polar.train.sync.Exports`: writes a version's weights for the engines."""

    def write(self, policy: Policy, version: int) -> Path: ...


class Recorder(Protocol):
    """`polar.train.metrics.Metrics`."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...


Evaluate = Callable[[int], Awaitable[Mapping[str, float]]]
"""Evaluates the policy as the engines have it after that many steps; at once for a step that was evaluated before."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trainer works with. `sync` of `None`: no engine is to follow (recorded groups). `facts`: what the gate compares rows with."""

    learner: Learner
    source: Source
    metrics: Recorder
    sync: Syncs | None = None
    exports: Exporter | None = None
    evaluate: Evaluate | None = None
    progress: Progress = field(default_factory=Silent)
    tokenizer_hash: str | None = None
    template_hash: str | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended; `steps`: all that it has trained, those before it went on from a checkpoint included."""

    ended: Ended
    steps: int
    policy_version: int
    checkpoint: Path | None
    folder: Path


class Trainer:
    """One run in `folder`. `state`: where it goes on (a checkpoint's, already restored into the learner)."""

    def __init__(self, config: TrainConfig, parts: Parts, folder: Path, state: RunState | None = None) -> None:
        self.config = config
        self.parts = parts
        self.folder = folder
        self.state = state or RunState()
        self._how = config.make_advantage()
        self._recipe = Recipe(
            advantage=self._how,
            aggregation=config.loss.aggregation,
            fixed_length=config.loss.fixed_length,
            max_staleness=config.max_staleness if config.live else None,
            shuffle_rewards=config.shuffle_rewards,
            seed=config.seed,
            vocabulary=parts.learner.policy.vocabulary,
        )
        self._stop = asyncio.Event()
        self._saved: Path | None = None
        self._saved_batches = self.state.batches
        self._stepping = False
        self._empty = 0
        self._unseen = 0

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def stop(self) -> None:
        """Ends the run after what it is doing: a step is finished, a wait for groups is given up. What is trained is kept; engines
        get it when the run goes on."""
        self._stop.set()

    async def run(self) -> Summary:
        """Until the last step, `stop`, or the end of a recorded source. Raises `NotTrainable` where the gate is shut or nothing that comes
        can be trained, and what its parts raise. Whatever ends it, the steps done are in a checkpoint, unless the last failed half-way,
        or something else that several processes do."""
        self._saved = checkpoints.latest(self.checkpoints)
        ended: Ended = "stopped"
        try:
            ended = await self._loop()
        finally:
            try:
                if not self._stepping and self.parts.learner.whole and self.state.batches > self._saved_batches:
                    await self._save()
            finally:
                await self.parts.source.aclose(over=ended == "done")
        return Summary(ended, self.state.batches, self.state.policy_version, self._saved, self.folder)

    async def _loop(self) -> Ended:
        await self._sync()
        self.parts.source.allow(self._window())
        await self.parts.source.start(self._position)
        await self._unless_stopped(self._evaluate_if_due())
        while self.state.batches < self.config.steps and not self._stop.is_set():
            taken = await self._unless_stopped(self._collect())
            if taken is None:
                return "stopped" if self._stop.is_set() else "no_more_groups"
            await self._train(*taken)
            await self._unless_stopped(self._evaluate_if_due())
        return "stopped" if self._stop.is_set() and self._undone() else "done"

    def _undone(self) -> bool:
        """Whether a stop may have left something: steps, or the last weights' way to the engines, and their evaluation."""
        return self.state.batches < self.config.steps or self.parts.sync is not None

    # --- one step ------------------------------------------------------------------------------------------------

    @property
    def _position(self) -> int:
        return int(self.state.position.get("next_group", 0))

    def _window(self) -> int:
        """Rollouts for the batch that is due and for `max_staleness` batches after it: what is asked for now is trained, at the latest, by
        the step that is so many versions ahead. Nothing is rolled out for steps that the run will not take."""
        left = self.config.steps - self.state.batches
        return self._position + self.config.batch.groups * min(1 + self.config.max_staleness, left)

    async def _collect(self) -> tuple[list[Group], float] | None:
        """Enough groups for a batch, dropped ones included, and the seconds that took; `None`: there are no more.

        For each group that teaches nothing a fresh one is asked for, so that batches keep their size."""
        began = time.monotonic()
        batch, source = self.config.batch, self.parts.source
        taken: list[Group] = []
        taught = 0
        while taught < batch.groups and len(taken) < batch.most:
            self.parts.progress.collecting(self.state.batches, taught, batch.groups)
            group = await source.take()
            if group is None:
                return (taken, time.monotonic() - began) if taught else None
            taken.append(group)
            if teaches(group, self._how):
                taught += 1
            else:
                source.allow(self._window() + len(taken) - taught)
        return taken, time.monotonic() - began

    async def _train(self, groups: list[Group], collect_s: float) -> None:
        version = self.state.policy_version
        batch = await asyncio.to_thread(make_batch, groups, self._recipe, policy_version=version)
        values: dict[str, float] = {"time/collect_s": collect_s}
        report = await self._gate(batch)
        began = time.monotonic()
        step = await self._step(batch)
        values["time/step_s"] = time.monotonic() - began
        self.state = RunState(version + (step is not None), self.state.batches + 1, {"next_group": self._position + len(groups)})
        values |= step_values(batch, step, report, self.state.policy_version)
        self.parts.metrics.log(self.state.batches, values)
        self.parts.progress.stepped(self.state.batches, values)
        every, done = self.config.checkpoints.every, self.state.batches
        if done % every == 0 or done == self.config.steps or self._evaluation_due():
            await self._save()
        if not self._stop.is_set():  # a run that goes on begins with it
            if step is not None:
                await self._sync()
            elif self._empty:
                await self._sync_again()
        self.parts.source.allow(self._window())

    async def _step(self, batch: Batch) -> StepReport | None:
        """`None`: there is nothing to train in it, which is said. Raises `NotTrainable` when that goes on for another reason than that all
        rewards agree: they do when a task set is solved, and nothing is wrong with that."""
        if batch.rows:
            self._empty = 0
            self.parts.progress.stepping(self.state.batches, len(batch.rows), batch.counts.stepped)
            self._stepping = True
            step = await asyncio.to_thread(self.parts.learner.step, batch.rows)
            self._stepping = False
            return step
        why, expected = _why_empty(batch)
        self._empty = 0 if expected else self._empty + 1
        self.parts.progress.say(f"step {self.state.batches + 1}: nothing to train in {len(batch.groups)} groups: {why}")
        if self._empty >= EMPTY_BATCHES:
            raise NotTrainable(f"{self._empty} batches in a row had nothing to train: {why}")
        return None

    async def _gate(self, batch: Batch) -> Report | None:
        """Raises `NotTrainable` if it is shut, before anything is trained."""
        gate, version = self.config.gate, self.state.policy_version
        if not gate.rows or not self.config.live:
            return None
        chosen = sample_for_gate([batch], str(version), gate.rows)
        ready = self.parts.source.ready()
        if ready and not all(_sampled_by(trace, str(version)) for trace, _ in chosen):  # what has come for later batches may be fresher
            later = await asyncio.to_thread(make_batch, ready, self._recipe, policy_version=version)
            chosen = sample_for_gate([batch, later], str(version), gate.rows)
        if not chosen:
            return None
        rows: list[Row] = [row_of(trace) for trace, _ in chosen]
        found = await asyncio.to_thread(self.parts.learner.logprobs, rows)
        report = compare(
            [trace for trace, _ in chosen],
            [values.float().cpu().numpy().astype(np.float32) for values in found],
            Facts(
                policy_version=str(version),
                tokenizer_hash=self.parts.tokenizer_hash,
                template_hash=self.parts.template_hash,
                temperature=self.config.temperature,
                allowed_versions=frozenset(str(older) for older in range(version)),
            ),
            provenance=[facts for _, facts in chosen],
            threshold=Threshold(mean=gate.mean, largest=gate.largest),
        )
        if not report.open:
            self.parts.metrics.log(self.state.batches + 1, gate_values(report))
            if gate.action == "stop":
                report.check()
            self.parts.progress.say(f"the gate would have stopped the run: {report}")
        self._unseen = 0 if report.whole.tokens else self._unseen + 1
        if self._unseen == UNSEEN:
            self.parts.progress.say(
                f"the gate had nothing to compare in {UNSEEN} steps: rollouts are quicker than steps, and every row is of earlier weights. "
                "step/mismatch still shows a difference; with max_staleness 0 each step is compared"
            )
        return report

    # --- out to the disk and the engines ---------------------------------------------------------------------------

    async def _save(self) -> None:
        state = self.state
        self._saved = await asyncio.to_thread(
            checkpoints.save, self.checkpoints, self.parts.learner, state, keep=self.config.checkpoints.keep
        )
        self._saved_batches = state.batches

    async def _sync(self) -> None:
        """Not interrupted by `stop`: engines that have half of the weights are no state to leave."""
        if self.parts.sync is None or self.parts.exports is None:
            return
        version = self.state.policy_version
        self.parts.progress.syncing(version)
        began = time.monotonic()
        folder = await asyncio.to_thread(self.parts.exports.write, self.parts.learner.policy, version)
        exported = time.monotonic()
        report = await self.parts.sync(folder, version)
        values: Mapping[str, float] = report.values() if hasattr(report, "values") else {}
        self.parts.metrics.log(
            self.state.batches, {"time/export_s": exported - began, "time/sync_s": time.monotonic() - exported, **values}
        )

    async def _sync_again(self) -> None:
        """Sessions fail where an engine was started anew: it gets no calls before it has the weights. Where it is not there yet nothing has
        changed, and the next batch may find it. Raises `SyncFailed` where calls would wait for ever."""
        try:
            await self._sync()
        except SyncFailed as error:
            if error.paused:
                raise
            self.parts.progress.say(str(error))

    async def _evaluate_if_due(self) -> None:
        step = self.state.batches
        if self.parts.evaluate is not None and self._evaluation_due():
            values = await self.parts.evaluate(step)
            if values:
                self.parts.metrics.log(step, values)

    def _evaluation_due(self) -> bool:
        how, step = self.config.evaluation, self.state.batches
        if self.parts.evaluate is None:
            return False
        last = step >= self.config.steps
        return (step == 0 and how.before) or (last and how.after) or (step > 0 and how.every > 0 and step % how.every == 0)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """What `work` gives, or `None` if the run is stopped first: it is then cancelled."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            return None
        finally:
            for one in (task, stopped):
                one.cancel()
            await asyncio.gather(task, stopped, return_exceptions=True)


def sample_for_gate(batches: Sequence[Batch], version: str, count: int) -> list[tuple[Trace, Mapping[str, Any]]]:
    """Rows to compare, with what is recorded of their engines: those that the present version sampled first, since others were sampled by
    weights that are gone; among them evenly over what came. The first batch is due; of others, rows of later versions are left out: a run
    that goes on from a checkpoint finds what had run ahead with the weights of steps that it makes again."""
    pairs = [
        (trace, facts)
        for place, batch in enumerate(batches)
        for trace, facts in zip(batch.traces, batch.provenance, strict=True)
        if trace.mask.any() and not trace.mask[0] and not trace.has_images and not (place and _later_than(version, trace))
    ]
    fresh = [pair for pair in pairs if _sampled_by(pair[0], version)]
    rest = [pair for pair in pairs if not _sampled_by(pair[0], version)]
    return [*_evenly(fresh, count), *_evenly(rest, max(0, count - len(fresh)))]


def _sampled_by(trace: Trace, version: str) -> bool:
    return version in trace.policy_versions


def _later_than(version: str, trace: Trace) -> bool:
    present = version_number(version)
    numbers = [version_number(one) for one in trace.policy_versions]
    return present is not None and any(number is not None and number > present for number in numbers)


def _evenly(items: Sequence[T], count: int) -> list[T]:
    if len(items) <= count:
        return list(items)
    return [items[number * len(items) // count] for number in range(count)]


def _why_empty(batch: Batch) -> tuple[str, bool]:
    """Why nothing of it is trained, and whether that is as it should be."""
    failed = [f"{result.error_code}: {result.error}" for result in batch.results if result.outcome == "infrastructure"]
    if failed and len(failed) == len(batch.results):
        return f"the infrastructure failed every session ({max(failed, key=failed.count)})", False
    if batch.counts.stale:
        return f"{batch.counts.stale:,} tokens are older than max_staleness allows, or carry no policy version", False
    rewards = {result.reward for result in batch.results if result.usable}
    if rewards and not batch.taught:
        return (
            f"in each group all rewards agree ({', '.join(f'{reward:g}' for reward in sorted(r for r in rewards if r is not None))})",
            True,
        )
    reasons = ", ".join(f"{name} {tokens:,}" for name, tokens in sorted(batch.counts.dropped.items()))
    return f"tokens dropped: {reasons or 'none, there are no rows'}", False
