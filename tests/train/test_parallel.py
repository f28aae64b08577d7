"""Several processes do what one does: steps, checkpoints, exports; and when one of them goes, the others do not hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import parallel_work
import pytest
import torch
from safetensors.torch import load_file
from tiny_qwen3 import tiny_qwen3

from polar.sockets import free_port
from polar.train.parallel import join

pytestmark = pytest.mark.real

TOGETHER = parallel_work.TOGETHER
EXACT = [(case, sharding) for case, sharding in TOGETHER if "bfloat16" not in case]
ROUNDED = [(case, sharding) for case, sharding in TOGETHER if "bfloat16" in case]


class Processes:
    """As a launcher would start them: one a rank."""

    def __init__(self, count: int, folder: Path, *arguments: str) -> None:
        port = free_port()
        shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        self.said = [folder / f"said-{rank}.txt" for rank in range(count)]
        self.all = []
        for rank, file in enumerate(self.said):
            env = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            with file.open("w") as out:
                command = [sys.executable, parallel_work.__file__, *arguments]
                self.all.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))

    def ended(self, timeout_s: float = 200) -> list[tuple[int, str]]:
        """Exit status and what was said, of each. None of them is left."""
        try:
            return [(one.wait(timeout_s), file.read_text()) for one, file in zip(self.all, self.said, strict=True)]
        finally:
            for one in self.all:
                one.kill()
                one.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(parallel_work.VOCABULARY).save_pretrained(place)
    return str(place)


@pytest.fixture(scope="module")
def alone(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    with join() as group:
        parallel_work.cases(group, model, str(folder))
        parallel_work.one_more(group, str(folder / "whole-none" / "half" / "step-000003"), "none", folder / "other-none")
    return folder


@pytest.fixture(scope="module")
def together(model: str, alone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    half = alone / "whole-none" / "half" / "step-000003"
    for status, said in Processes(2, folder, "cases", model, str(folder), str(half)).ended():
        assert status == 0, said[-3000:]
    return folder


def merged(folder: Path, half: int = 1) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in load_file(folder / f"merged-{half}" / "model.safetensors").items()}


def reports(folder: Path) -> list[dict[str, Any]]:
    return [one for half in (0, 1) for one in json.loads((folder / f"reports-{half}.json").read_text())]


def moved(folder: Path, model: str) -> torch.Tensor:
    start = {name: value.double() for name, value in load_file(Path(model) / "model.safetensors").items()}
    return torch.cat([(value - start[name]).flatten() for name, value in sorted(merged(folder).items())])


@pytest.mark.parametrize(("case", "sharding"), EXACT)
def test_two_processes_take_the_steps_of_one(alone: Path, together: Path, model: str, case: str, sharding: str) -> None:
    """Batches of more rows than processes, of fewer, and of uneven ones; two optimiser steps each; resumed in the middle."""
    one, two = alone / f"{case}-none", together / f"{case}-{sharding}"
    assert float(moved(one, model).abs().max()) > 1e-3
    assert merged(one).keys() == merged(two).keys()
    for name, value in merged(one).items():
        torch.testing.assert_close(merged(two)[name], value, rtol=0, atol=1e-9)
    for ours, theirs in zip(reports(two), reports(one), strict=True):
        for name in ours.keys() - {"micro_batches"}:
            assert ours[name] == pytest.approx(theirs[name], abs=1e-9), name


@pytest.mark.parametrize(("case", "sharding"), ROUNDED)
def test_in_bfloat16_they_go_the_same_way(alone: Path, together: Path, model: str, case: str, sharding: str) -> None:
    """Other micro-batches round otherwise; Adam turns the smallest gradient's sign into a whole step."""
    one, two = moved(alone / f"{case}-none", model), moved(together / f"{case}-{sharding}", model)
    assert float(torch.nn.functional.cosine_similarity(one, two, dim=0)) > 0.98


@pytest.mark.parametrize("sharding", ["none", "full"])
@pytest.mark.parametrize("case", parallel_work.UNDISTURBED)
def test_two_processes_go_on_bit_for_bit(together: Path, case: str, sharding: str) -> None:
    for name, value in merged(together / f"{case}-undisturbed-{sharding}").items():
        assert torch.equal(merged(together / f"{case}-{sharding}")[name], value), name


@pytest.mark.parametrize(("case", "sharding"), TOGETHER)
def test_the_leader_gets_every_rows_log_probabilities(alone: Path, together: Path, case: str, sharding: str) -> None:
    one, two = (torch.load(folder / "logprobs-1.pt") for folder in (alone / f"{case}-none", together / f"{case}-{sharding}"))
    for ours, theirs in zip(two, one, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9 if "bfloat16" not in case else 0.1)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_two_processes_go_on_from_the_checkpoint_of_one(alone: Path, together: Path, sharding: str) -> None:
    for name, value in merged(alone / "other-none").items():
        torch.testing.assert_close(merged(together / f"other-{sharding}")[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_one_process_goes_on_from_the_checkpoint_of_two(alone: Path, together: Path, tmp_path: Path, sharding: str) -> None:
    with join() as group:
        parallel_work.one_more(group, str(together / f"whole-{sharding}" / "half" / "step-000003"), "none", tmp_path / "one")
    for name, value in merged(alone / "other-none").items():
        torch.testing.assert_close(merged(tmp_path / "one")[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("case", "sharding"), TOGETHER)
def test_checkpoints_are_of_one_format(alone: Path, together: Path, case: str, sharding: str) -> None:
    """Whatever the number of processes and the layout: the same files, and the same tensors in them."""
    kinds = []
    for folder in (alone / f"{case}-none", together / f"{case}-{sharding}"):
        place = folder / "last" / "step-000006"
        state = torch.load(place / "state.pt", weights_only=False)
        tensors = {
            (number, name): (value.shape, value.dtype)
            for number, values in state["optimizer"]["state"].items()
            for name, value in values.items()
        }
        files = sorted(str(file.relative_to(place)) for file in place.rglob("*") if file.is_file())
        weights = {
            name: (value.shape, value.dtype) for file in (place / "model").glob("*.safetensors") for name, value in load_file(file).items()
        }
        kinds.append((tensors, files, weights, [value.shape for value in state["optimizer"].get("masters", ())]))
    assert kinds[0] == kinds[1]


def test_what_is_refused_leaves_all_in_step_and_the_leader_may_end(model: str, tmp_path: Path) -> None:
    (leader, said), (follower, also) = Processes(2, tmp_path, "stopped", model, str(tmp_path)).ended()
    assert (leader, follower) == (3, 0), said[-3000:] + also[-3000:]
    assert "nothing to train" in (tmp_path / "empty.txt").read_text()
    for rank in range(2):
        assert "there is no folder" in (tmp_path / f"refused-{rank}.txt").read_text()


@pytest.mark.parametrize("who", [0, 1])
def test_one_that_dies_does_not_leave_the_other_waiting(model: str, tmp_path: Path, who: int) -> None:
    found = Processes(2, tmp_path, "deserted", model, str(who)).ended()
    assert found[who][0] == 9
    assert found[1 - who][0] not in (0, 9), found[1 - who][1][-3000:]


def test_one_process_is_no_group(model: str) -> None:
    with join() as group:
        assert (group.rank, group.world, group.leads) == (0, 1, True)
        assert group.broadcast("x") == "x"
        learner = group.learner(group.load(model, sharding="full"), parallel_work.HOW)
        with pytest.raises(RuntimeError, match="nobody to follow"):
            group.follow(learner)
