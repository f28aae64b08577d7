"""Supervised fine-tuning: a warm start on exported rows, with the policy, the packing, the optimiser and the checkpoints of GRPO.

What a step makes smaller is the mean cross-entropy over its trained tokens. The order of rows, the batches and every sum depend on settings
and data alone, so a run that was killed and goes on from its last checkpoint ends in the same weights as one that was not.

    <output>/sft.json       settings, and what the data was
    <output>/metrics.jsonl  one line a step
    <output>/checkpoints/   where it goes on from
    <output>/model/         at its end: a model that engines load, with its tokenizer; with LoRA merged, and the adapter in adapter/
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from polar.train import checkpoints
from polar.train.checkpoints import RunState
from polar.train.disk import saving
from polar.train.export import TOKENIZER_FILES
from polar.train.learner import Learner, StepReport
from polar.train.loading import is_lora, save_merged
from polar.train.loss import Terms
from polar.train.memory import enough_memory
from polar.train.metrics import Metrics, check_writers, open_metrics
from polar.train.parallel import join
from polar.train.rows import Row
from polar.train.sft_config import SftConfig
from polar.train.sft_data import Sample, batches
from polar.train.sft_work import CHECKPOINTS, MODEL, Loading, Say, Work, locked, opened, prepared

ADAPTER = "adapter"
_SAY_EVERY_S = 10.0
_RATE_AFTER_STEPS = 3
"""The first steps warm caches up; the first rate is said after so many."""


class CrossEntropy:
    """The objective: weight times negative log-probability. Advantages, recorded log-probabilities and a reference mean nothing here."""

    beta = 0.0

    def terms(
        self,
        new: Tensor,
        advantages: Tensor,
        weights: Tensor,
        recorded: Tensor,
        *,
        old: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> Terms:
        """All float[n], one entry a token."""
        zero = torch.zeros((), dtype=new.dtype, device=new.device)
        return Terms(-(weights * new).sum(), torch.count_nonzero(weights), *[zero] * 5)


@dataclass(frozen=True, slots=True)
class SftReport:
    """`losses`: of the validation split, by step; step 0 is before training. `finished`: not stopped before its last step."""

    finished: bool
    steps: int
    loss: float | None
    """Of the last step that this process took; `None`: it took none."""
    losses: dict[int, float]
    tokens_per_second: float
    model: Path | None


def row_of(sample: Sample, weight: float) -> Row:
    """A sample for the learner, each trained id with `weight`."""
    places = torch.from_numpy(sample.mask.nonzero()[0])
    ids = torch.from_numpy(sample.ids.astype("int64"))
    return Row(ids, places, torch.zeros(len(places)), torch.full((len(places),), weight), 0.0, sample.place)


def batch_of(samples: list[Sample]) -> list[Row]:
    """Rows whose weights add up to 1 over all their trained ids: the batch's loss is their mean."""
    trained = sum(int(sample.mask.sum()) for sample in samples)
    return [row_of(sample, 1.0 / trained) for sample in samples]


def run(config: SftConfig, *, say: Say = print, stop: Callable[[], bool] = lambda: False) -> SftReport:
    """Trains from where `config.output` is to the end, or until `stop` says so after a step; then a checkpoint is there to go on from.

    Raises `ConfigError` for data or a model that does not fit, and for a folder that holds another run, `SaveFailed` on a full disk,
    `OutOfMemory`. Under `torchrun`, all processes call it; those that do not lead help and return a report that says nothing.
    """
    check_writers(config.metrics)
    with enough_memory(), join() as group, ExitStack() as stack:
        work: Work | None = None
        if group.leads:
            try:
                stack.enter_context(locked(Path(config.output)))
                work = prepared(config, say)
            finally:  # the others wait for it: they end where there is nothing to do, or an error to tell
                start: Loading | None = group.broadcast(None if work is None or work.finished else work.loading)
            if work.finished:
                say(f"{config.output} holds this run, finished: nothing to do")
                return SftReport(True, work.steps, None, {}, 0.0, work.output / MODEL)
        else:
            start = group.broadcast(None)
        if start is None:
            return SftReport(False, 0, None, {}, 0.0, None)
        torch.manual_seed(config.seed)
        learner = group.learner(group.load(**start.model), start.optimisation, CrossEntropy())
        if work is None:
            group.follow(learner)
            return SftReport(False, 0, None, {}, 0.0, None)
        return _Run(config, work, learner, say, stop).all()


class _Run:
    """The loop of the leading process."""

    def __init__(self, config: SftConfig, work: Work, learner: Learner, say: Say, stop: Callable[[], bool]) -> None:
        self.config = config
        self.work = work
        self.learner = learner
        self.say = say
        self.stop = stop
        self.losses: dict[int, float] = {}
        self.taken = 0
        """Steps of this process."""
        self.tokens = 0
        self.seconds = 0.0
        self._said = 0.0

    def all(self) -> SftReport:
        work, config = self.work, self.config
        run = RunState() if work.place is None else checkpoints.restore(work.place, self.learner)
        resumed = -1 if work.place is None else run.batches
        report: StepReport | None = None
        with open_metrics(work.output, config.metrics, resumed_step=resumed, config=config.numbers()) as metrics:
            if run.batches:
                self.say(f"going on after step {run.batches} of {work.steps}")
            elif work.validation is not None:
                metrics.log(0, {"validation_loss": self._validate(0)})
            for epoch, samples, ends_epoch in self._batches(run.batches):
                report = self._step(samples, metrics, run, epoch, ends_epoch)
                stopping = self.stop() and run.batches < work.steps
                if stopping or run.batches == work.steps or run.batches % config.checkpoint_every == 0:
                    checkpoints.save(work.output / CHECKPOINTS, self.learner, run, keep=config.keep)
                if stopping:
                    self.say(f"stopped after step {run.batches} of {work.steps}; the same command goes on")
                    return self._report(False, report)
        self._save_model()
        return self._report(True, report)

    def _batches(self, done: int) -> Iterator[tuple[float, list[Sample], bool]]:
        """What is left after `done` steps: epochs passed at the end of the step, its rows, and whether it is an epoch's last."""
        lengths = [len(sample) for sample in self.work.data.samples]
        step = 0
        for epoch in range(self.config.epochs):
            steps = batches(lengths, self.config.batch_tokens, epoch=epoch, seed=self.config.seed)
            for number, rows in enumerate(steps, 1):
                step += 1
                if step > self.work.steps:
                    return
                if step > done:
                    yield epoch + number / len(steps), [self.work.data.samples[row] for row in rows], number == len(steps)

    def _step(self, samples: list[Sample], metrics: Metrics, run: RunState, epoch: float, ends_epoch: bool) -> StepReport:
        started = time.monotonic()
        report = self.learner.step(batch_of(samples))
        seconds = time.monotonic() - started
        tokens = sum(map(len, samples))
        run.batches += 1
        run.position = {"epoch": epoch}
        self.taken += 1
        self.tokens += tokens
        self.seconds += seconds
        values = {
            "loss": report.loss,
            "epoch": epoch,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "trained_tokens": report.tokens,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
        }
        if report.skipped:
            values["skipped"] = 1
            self.say(f"step {run.batches}: its gradient was not finite; the weights stay as they were")
        every = self.config.evaluate_every
        if self.work.validation is not None and ((run.batches % every == 0 if every else ends_epoch) or run.batches == self.work.steps):
            values["validation_loss"] = self._validate(run.batches)
        metrics.log(run.batches, values)
        self._tell(run, report, epoch)
        return report

    def _tell(self, run: RunState, report: StepReport, epoch: float) -> None:
        """The first step, the first rate, then now and then."""
        now = time.monotonic()
        if self.taken not in (1, _RATE_AFTER_STEPS) and now - self._said < _SAY_EVERY_S and run.batches < self.work.steps:
            return
        self._said = now
        line = f"step {run.batches} of {self.work.steps}, epoch {epoch:.2f}: loss {report.loss:.4f}"
        if self.taken >= _RATE_AFTER_STEPS:
            left = (self.work.steps - run.batches) * self.seconds / self.taken
            line += f", {self.tokens / self.seconds:,.0f} tokens/s" + (f", about {_duration(left)} left" if left else "")
        self.say(line)

    def _validate(self, step: int) -> float:
        """The mean cross-entropy over the trained ids of the validation split."""
        assert self.work.validation is not None
        started = time.monotonic()
        total, count = 0.0, 0
        waiting: list[Row] = []
        held = 0
        for sample in self.work.validation.samples:
            waiting.append(row_of(sample, 0.0))
            held += len(sample)
            if held >= self.config.batch_tokens:
                total, count = _added(self.learner.logprobs(waiting), total, count)
                waiting, held = [], 0
        if waiting:
            total, count = _added(self.learner.logprobs(waiting), total, count)
        self.losses[step] = total / count
        self.say(f"step {step}: validation loss {total / count:.4f} ({_duration(time.monotonic() - started)})")
        return total / count

    def _save_model(self) -> None:
        """Beside its place, then renamed: a folder of that name is whole."""
        output = self.work.output
        with saving("the model", output):
            self._replace(output / MODEL, lambda folder: save_merged(self.learner.policy.model, folder))
            if is_lora(self.learner.policy):
                self._replace(output / ADAPTER, self.learner.save_model)
        self.say(f"the model is in {output / MODEL}")

    def _replace(self, place: Path, write: Callable[[Path], None]) -> None:
        making = place.with_name(f".{place.name}")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        write(making)
        for name in TOKENIZER_FILES:
            if (self.work.source / name).is_file() and not (making / name).is_file():
                shutil.copyfile(self.work.source / name, making / name)
        for file in [*making.iterdir(), making]:
            with opened(file) as descriptor:
                os.fsync(descriptor)
        shutil.rmtree(place, ignore_errors=True)
        making.rename(place)

    def _report(self, finished: bool, report: StepReport | None) -> SftReport:
        rate = self.tokens / self.seconds if self.seconds else 0.0
        return SftReport(
            finished=finished,
            steps=self.work.steps,
            loss=None if report is None else report.loss,
            losses=self.losses,
            tokens_per_second=rate,
            model=self.work.output / MODEL if finished else None,
        )


def _added(found: list[Tensor], total: float, count: int) -> tuple[float, int]:
    values = torch.cat([one.double() for one in found])
    return total - float(values.sum()), count + len(values)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
