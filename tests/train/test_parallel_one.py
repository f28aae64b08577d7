"""What a process of several does by itself, in a group of one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_qwen3 import tiny_qwen3

from polar.train import parallel
from polar.train.learner import Optimisation
from polar.train.loading import LoraSettings, WithoutAdapter, empty_model, load_model, save_merged, shape_of
from polar.train.parallel import Several
from polar.train.rows import Row

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
