"""A disk that is full, as far as this process is concerned: files may not grow beyond so many bytes."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from trainer_parts import ListMetrics, ListSource, config, recorded_group, tiny_learner

from polar.errors import SaveFailed
from polar.train import checkpoints, disk
from polar.train.batch import Recipe, make_batch
from polar.train.checkpoints import RunState
from polar.train.export import Exports
from polar.train.metrics import open_metrics, read_metrics
from polar.train.trainer import Parts, Trainer


@contextmanager
def full(size: int) -> Iterator[None]:
    """Python ignores the signal that comes with it, so a write says EFBIG where a full disk says ENOSPC."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [0, 100, 20_000])
def test_torch_says_what_the_disk_said(size: int, tmp_path: Path) -> None:
    with full(size), pytest.raises(OSError, match="File too large"):
        disk.save({"state": torch.zeros(100_000)}, tmp_path / "state.pt")
    disk.save({"state": torch.ones(100_000)}, tmp_path / "state.pt")
    assert torch.equal(torch.load(tmp_path / "state.pt")["state"], torch.ones(100_000))


def test_an_error_that_is_not_the_disks_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(AttributeError), disk.saving("it", tmp_path):
        disk.save(lambda: None, tmp_path / "state.pt")  # which cannot be pickled


@pytest.mark.parametrize("size", [0, 8_000, 20_000], ids=["folder", "model", "state"])
def test_a_checkpoint_that_does_not_fit_names_its_folder_and_leaves_the_last_one(size: int, tmp_path: Path) -> None:
    learner = tiny_learner(config())
    learner.step(make_batch([recorded_group(0)], Recipe(), policy_version=0).rows)
    first = checkpoints.save(tmp_path / "checkpoints", learner, RunState(batches=1))
    said = rf"the checkpoint of step 2 could not be written to {tmp_path}/checkpoints: .*File too large.* MiB are free"
    with full(size), pytest.raises(SaveFailed, match=said):
        checkpoints.save(tmp_path / "checkpoints", learner, RunState(batches=2))
    assert checkpoints.latest(tmp_path / "checkpoints") == first
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000001"]


async def test_a_run_whose_disk_is_full_ends_with_that_and_goes_on(tmp_path: Path) -> None:
    settings = config(steps=4, checkpoints={"every": 2})
    groups = [recorded_group(number) for number in range(4)]

    class Fills(ListMetrics):
        def log(self, step: int, values: object) -> None:
            super().log(step, values)  # type: ignore[arg-type]
            if step == 3:
                stack.enter_context(full(8_000))

    with ExitStack() as stack, pytest.raises(SaveFailed, match="the checkpoint of step 4 could not be written"):
        await Trainer(settings, Parts(tiny_learner(settings), ListSource(groups), Fills()), tmp_path).run()
    place = checkpoints.latest(tmp_path / "checkpoints")
    assert place is not None
    assert checkpoints.load_run(place).batches == 2


def test_weights_for_engines_that_do_not_fit_name_their_folder(tmp_path: Path) -> None:
    exports = Exports(tmp_path / "weights")
    with full(8_000), pytest.raises(SaveFailed, match=rf"the weights for the engines could not be written to {tmp_path}/weights"):
        exports.write(tiny_learner(config()).policy, 1)
    assert (exports.write(tiny_learner(config()).policy, 1) / "config.json").is_file()


def test_metrics_that_do_not_fit_are_whole_when_the_run_goes_on(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as metrics:
        metrics.log(1, {"loss": 0.5})
        with full((tmp_path / "metrics.jsonl").stat().st_size + 10), pytest.raises(SaveFailed, match=rf"metrics .* to {tmp_path}: "):
            metrics.log(2, {"loss": 0.25})
    with open_metrics(tmp_path, resumed_step=1) as metrics:
        metrics.log(2, {"loss": 0.25})
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_metrics_that_cannot_be_cut_for_want_of_room_are_what_they_were(tmp_path: Path) -> None:
    with open_metrics(tmp_path) as metrics:
        for step in (1, 2):
            metrics.log(step, {"loss": 0.5})
    with full(10), pytest.raises(SaveFailed, match=rf"the metrics could not be written to {tmp_path}: .*File too large"):
        open_metrics(tmp_path, resumed_step=1)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
