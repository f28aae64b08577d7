"""What a process of several does by itself, in a group of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_qwen3 import tiny_qwen3
from trainer_parts import ListMetrics, ListSource, config, recorded_group

from polar.train import checkpoints, parallel
from polar.train.learner import Optimisation
from polar.train.loading import LoraSettings, WithoutAdapter, empty_model, load_model, save_merged, shape_of
from polar.train.parallel import Several
from polar.train.rows import Row
from polar.train.shares import ORDERS
from polar.train.trainer import Parts, Trainer

VOCABULARY = 61
LORA = LoraSettings(r=4, alpha=8.0, dropout=0.5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(VOCABULARY).save_pretrained(place)
    return str(place)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Several]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    one = Several(torch.device("cpu"))
    yield one
    one.close()


def rows() -> list[Row]:
    places = torch.arange(5, 20)
    return [Row(torch.arange(20) + start, places, torch.zeros(15), torch.ones(15), 1.0) for start in (0, 20)]


@pytest.mark.parametrize("sharding", ["none", "full"])
def test_log_probabilities_are_without_an_adapters_dropout(group: Several, folder: str, sharding: str) -> None:
    """They stand for the policy: for the gate, a validation loss, and as the proximal policy of several minibatches."""
    policy = group.load(folder, sharding=sharding, lora=LORA)  # type: ignore[arg-type]
    for name, one in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(one, 0.3)
    learner = group.learner(policy, Optimisation(token_budget=64))
    for first, second in zip(learner.logprobs(rows()), learner.logprobs(rows()), strict=True):
        assert torch.equal(first, second)
    assert policy.model.training


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_model_in_pieces_is_saved_as_of_the_format_that_it_computes_in(
    group: Several, folder: str, lora: LoraSettings | None, tmp_path: Path
) -> None:
    """Engines that find float32 there choose a format of their own, float16 among them."""
    policy = group.load(folder, sharding="full", dtype="bfloat16", lora=lora)
    group.learner(policy, Optimisation())
    save_merged(policy.model, tmp_path / "merged")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == "bfloat16"
    assert {value.dtype for value in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.bfloat16}


def test_a_state_with_other_masters_is_refused_before_the_others_are_told(group: Several, folder: str) -> None:
    """Models whose routers are float32 even in bfloat16 have a master of these in pieces only."""
    learner = group.learner(group.load(folder, sharding="full", dtype="bfloat16"), Optimisation(token_budget=64))
    learner.step(rows())
    state = learner.optimizer_state()
    with pytest.raises(ValueError, match="float32 masters of"):
        learner.load_optimizer_state({**state, "masters": state["masters"][1:]})
    assert not group.busy


async def test_a_run_that_failed_amid_what_all_do_ends_with_that_and_asks_them_nothing_more(
    group: Several, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gate of the second step fails here; elsewhere they wait for this process's part of it, and not for a checkpoint."""
    settings = config(steps=2, gate={"rows": 2, "mean": 99, "largest": 99}, model={"name": folder, "sharding": "full"})
    learner = group.learner(group.load(folder, sharding="full"), settings.make_optimisation(), settings.make_loss())
    log, found = ListMetrics(), learner.share_logprobs  # type: ignore[attr-defined]

    def fails(*arguments: Any) -> Any:
        if log.lines:
            raise MemoryError("of the GPU")
        return found(*arguments)

    monkeypatch.setattr(learner, "share_logprobs", fails)
    monkeypatch.setitem(ORDERS, "logprobs", lambda learner, *arguments: learner.share_logprobs(*arguments))  # type: ignore[arg-type]
    parts = Parts(learner, ListSource([recorded_group(0), recorded_group(1)]), log)
    with pytest.raises(MemoryError):
        await Trainer(settings, parts, tmp_path / "run").run()
    assert len(log.lines) == 1
    assert checkpoints.latest(tmp_path / "run" / "checkpoints") is None
    with pytest.raises(RuntimeError, match="nothing more can be done together"):
        learner.optimizer_state()


def test_main_memory_holds_a_model_in_pieces_on_the_leader_alone(group: Several, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 copy in each process of a machine with eight GPUs would be 32 bytes a weight."""
    model = empty_model(shape_of(load_model(folder, dtype="bfloat16", device="cpu")), dtype="bfloat16")
    monkeypatch.setattr(group, "rank", 1)
    converted: list[torch.Size] = []
    monkeypatch.setattr(torch.Tensor, "float", lambda self: converted.append(self.shape) or self.to(torch.float32))
    monkeypatch.setattr(parallel.sharded, "ShardedPolicy", lambda model, **_: model)
    made = group._sharded(model, 1.0)
    assert not converted
    assert {one.dtype for one in made.parameters()} == {torch.float32}


def test_the_reference_of_a_policy_in_pieces_makes_passes_of_one_row_where_that_does(group: Several, folder: str) -> None:
    policy = group.load(folder, sharding="full", lora=LORA)
    policy.why_not["packed"] = policy.why_not["shared"] = "its rows leak"
    reference = group.reference(policy, folder)
    assert isinstance(reference, WithoutAdapter)
    assert reference.pack(rows(), 100) == [[0], [1]]
    learner = group.learner(policy, Optimisation(token_budget=100))
    assert len(learner._logprobs_of(reference, rows(), None)) == 2
