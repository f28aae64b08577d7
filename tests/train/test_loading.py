"""A policy is loaded as asked, or refused with what to write; an adapter trains alone, is its own reference, and goes on bit for bit."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_qwen3 import tiny_qwen3
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Starcoder2Config

from polar.errors import ConfigError
from polar.train.checkpoints import RunState, latest, restore, save
from polar.train.learner import Learner, Optimisation
from polar.train.loading import (
    LoraSettings,
    WithoutAdapter,
    _product,
    is_lora,
    load_policy,
    merged_weights,
    reference_of,
    save_merged,
    save_model,
)
from polar.train.loss import Loss
from polar.train.policy import Policy
from polar.train.rows import Row

VOCABULARY = 61
HOW = Optimisation(lr=1e-2, token_budget=40)
LORA = LoraSettings(r=4, alpha=8.0)
MIXED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny_qwen3(VOCABULARY).save_pretrained(place)
    return str(place)


def batch(seed: int, count: int = 5, common: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    prefix = torch.randint(0, VOCABULARY, (common,), generator=generator)
    rows = []
    for number in range(count):
        ids = torch.cat([prefix, torch.randint(0, VOCABULARY, (12 + number,), generator=generator)])
        places = torch.arange(common + 6, len(ids))
        rows.append(Row(ids, places, torch.full((len(places),), -4.0), torch.full((len(places),), 0.02), 1.0 - number * 0.5))
    return rows


def weights(policy: Policy) -> list[torch.Tensor]:
    return [one.detach().clone() for one in policy.model.parameters()]


def trained(policy: Policy) -> list[torch.Tensor]:
    return [one.detach().clone() for one in policy.model.parameters() if one.requires_grad]


# ---- what is loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_model_is_in_the_format_asked_for(folder: str, dtype: str) -> None:
    policy = load_policy(folder, dtype=dtype)
    assert {one.dtype for one in policy.model.parameters()} == {getattr(torch, dtype)}
    assert policy.model.training
    assert all(one.requires_grad for one in policy.model.parameters())


@pytest.mark.parametrize("lora", [None, LORA, LoraSettings(r=4, dropout=0.5)])
def test_a_models_own_dropout_is_off_and_an_adapters_as_set(tmp_path: Path, lora: LoraSettings | None) -> None:
    """StarCoder2 is published with dropouts of 0.1; a step would be of another distribution than what the engine sampled."""
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    dropouts = {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}
    AutoModelForCausalLM.from_config(Starcoder2Config(vocab_size=VOCABULARY, sliding_window=None, **shape, **dropouts)).save_pretrained(
        tmp_path
    )
    policy = load_policy(str(tmp_path), lora=lora)
    for name, one in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.constant_(one, 0.3)
    learner = Learner(policy, Optimisation(token_budget=100))
    policy.model.train()
    again = all(torch.equal(a, b) for a, b in zip(policy.logprobs(batch(0)), policy.logprobs(batch(0)), strict=True))
    assert again == (lora is None or not lora.dropout)
    assert learner.step(batch(0)).tokens > 0
    assert policy.backbone.config.residual_dropout == 0.1


def test_a_frozen_policy_has_nothing_to_train(folder: str) -> None:
    policy = load_policy(folder, trainable=False, temperature=0.7)
    assert not any(one.requires_grad for one in policy.model.parameters())
    assert not policy.model.training
    assert policy.temperature == 0.7


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "float16"}, "loss scaling; use bfloat16"),
        ({"dtype": "int4"}, "one of float32, bfloat16, float64"),
        ({"attention": "flash_attention_2"}, "attention 'flash_attention_2' cannot be had"),
        ({"attention": "magic"}, "attention 'magic' cannot be had"),
        ({"lora": LoraSettings(target_modules=("query",))}, "it has down_proj, gate_proj"),
        ({"lora": LoraSettings(target_modules=("q_proj", "lm_head"))}, "LM head"),
        ({"lora": LoraSettings(target_modules=("embed_tokens",))}, "LM head or the embeddings"),
    ],
)
def test_a_wrong_setting_is_refused_with_what_to_write(folder: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_policy(folder, **settings)


@pytest.mark.parametrize("name", ["/nowhere/model", "./nowhere", "a/b/c"])
def test_a_folder_that_is_not_there_is_never_asked_of_the_hub(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        load_policy(name)


def test_a_hub_name_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"is no folder here, and the Hugging Face hub did not give it.*hf download"):
        load_policy("nobody/no-such-model")


def test_folders_of_other_kinds_are_named(tmp_path: Path, folder: str) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load_policy(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        load_policy(str(tmp_path / "file"))
    load_policy(folder, lora=LORA).model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="holds a LoRA adapter"):
        load_policy(str(tmp_path / "adapter"))
    with pytest.raises(ConfigError, match="holds no adapter"):
        load_policy(folder, adapter=folder)
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}))
    with pytest.raises(ConfigError, match="not a causal language model"):
        load_policy(str(encoder))


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path, folder: str) -> None:
    shutil.copytree(folder, tmp_path / "half")
    file = tmp_path / "half" / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "layers.1." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights of a Qwen3ForCausalLM .*layers.1.* more"):
        load_policy(str(tmp_path / "half"))


# ---- bfloat16


def test_small_updates_are_not_rounded_away_in_bfloat16(folder: str) -> None:
    """200 steps of 1e-5 move a weight of 0.02 by a tenth; each alone is far below bfloat16's last place."""
    how = Optimisation(lr=1e-5, weight_decay=0.0, max_grad_norm=1e9)
    wide, narrow = Learner(load_policy(folder), how), Learner(load_policy(folder, dtype="bfloat16"), how)
    start = weights(narrow.policy)
    for number in range(200):
        wide.step(batch(number % 3, 2))
        narrow.step(batch(number % 3, 2))
    moved = torch.cat([(a.float() - b.float()).flatten() for a, b in zip(weights(narrow.policy), start, strict=True)])
    expected = torch.cat([(a - b.float()).flatten() for a, b in zip(weights(wide.policy), start, strict=True)])
    masters = torch.cat([one.detach().flatten() - s.float().flatten() for one, s in zip(_in_order(narrow), start, strict=True)])
    assert float(torch.nn.functional.cosine_similarity(masters, expected, dim=0)) > 0.9
    assert float((moved - masters).abs().max()) < float(torch.cat([s.float().flatten() for s in start]).abs().max()) * 2**-8


def _in_order(learner: Learner) -> list[torch.Tensor]:
    masters = {id(parameter): master for parameter, master in learner.optimizer.pairs}  # type: ignore[attr-defined]
    return [masters[id(one)] for one in learner.policy.model.parameters()]


def test_gradients_of_micro_batches_add_up_in_float32(folder: str) -> None:
    learner = Learner(load_policy(folder, dtype="bfloat16"), HOW)
    for _ in range(2):
        sum(one.sum() for one in learner.policy.logprobs(batch(1))).backward()  # type: ignore[union-attr]
    assert all(one.grad is None for one in learner.policy.model.parameters())
    assert {one.grad.dtype for one in learner.parameters if one.grad is not None} == {torch.float32}
    twice = [one.grad.clone() for one in learner.parameters if one.grad is not None]
    learner.optimizer.zero_grad()
    sum(one.sum() for one in learner.policy.logprobs(batch(1))).backward()  # type: ignore[union-attr]
    for ours, once in zip(twice, learner.parameters, strict=True):
        assert once.grad is not None
        assert torch.equal(ours, once.grad * 2)


def test_a_bfloat16_checkpoint_is_not_taken_for_a_float32_one(tmp_path: Path, folder: str) -> None:
    wide = Learner(load_policy(folder), HOW)
    wide.step(batch(1))
    place = save(tmp_path, wide, RunState(1, 1))
    with pytest.raises(ConfigError, match="saved by a run in float32"):
        restore(place, Learner(load_policy(str(place / "model"), dtype="bfloat16"), HOW))
    narrow = Learner(load_policy(folder, dtype="bfloat16"), HOW)
    narrow.step(batch(1))
    place = save(tmp_path, narrow, RunState(2, 2))
    with pytest.raises(ConfigError, match="saved by a run in bfloat16"):
        restore(place, Learner(load_policy(str(place / "model")), HOW))


# ---- LoRA


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_adapter_starts_as_the_base_and_trains_alone(folder: str, dtype: str) -> None:
    base, policy = load_policy(folder, dtype=dtype), load_policy(folder, dtype=dtype, lora=LORA)
    assert is_lora(policy)
    assert not is_lora(base)
    names = [name for name, one in policy.model.named_parameters() if one.requires_grad]
    assert names
    assert all("lora_" in name for name in names)
    assert {one.dtype for one in policy.model.parameters() if one.requires_grad} == {torch.float32}
    rows = batch(3)
    for ours, theirs in zip(policy.logprobs(rows), base.logprobs(rows), strict=True):
        assert torch.equal(ours, theirs)
    frozen = [one.detach().clone() for one in policy.model.parameters() if not one.requires_grad]
    Learner(policy, HOW).step(rows)
    after = [one for one in policy.model.parameters() if not one.requires_grad]
    assert all(torch.equal(a, b) for a, b in zip(frozen, after, strict=True))


def test_nobody_is_warned_of_what_peft_calls(folder: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        policy = load_policy(folder, lora=LORA)
        policy.model.save_pretrained(tmp_path)
        load_policy(folder, adapter=tmp_path)


def test_an_adapter_of_a_hubs_model_is_saved_without_asking_the_hub(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", lambda *what, **_: asked.append(what))
    policy = load_policy(folder, lora=LORA)
    policy.model.peft_config["default"].base_model_name_or_path = "someone/model"
    save_model(policy.model, tmp_path / "adapter")
    assert not asked
    assert all("lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


def test_an_adapter_turned_off_is_the_reference(folder: str) -> None:
    policy = load_policy(folder, lora=LORA)
    reference = reference_of(policy, folder)
    assert isinstance(reference, WithoutAdapter)
    rows = batch(4)
    before = [one.detach() for one in policy.logprobs(rows)]
    learner = Learner(policy, HOW, Loss(beta=0.1), reference)
    first = learner.step(rows)
    learner.step(rows)
    last = learner.step(rows)
    assert first.kl == 0
    assert last.kl > 0
    for ours, start in zip(reference.logprobs(rows), before, strict=True):
        assert torch.equal(ours.detach(), start)
    assert not torch.equal(policy.logprobs(rows)[0].detach(), before[0])


def test_a_whole_policys_reference_is_a_frozen_copy(folder: str) -> None:
    policy = load_policy(folder, temperature=0.5)
    reference = reference_of(policy, folder)
    assert reference.temperature == 0.5
    assert not any(one.requires_grad for one in reference.model.parameters())
    assert reference.model is not policy.model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA])
def test_a_run_goes_on_bit_for_bit(tmp_path: Path, folder: str, dtype: str, lora: LoraSettings | None) -> None:
    torch.manual_seed(7)
    straight = Learner(load_policy(folder, dtype=dtype, lora=lora), HOW)
    for number in range(5):
        straight.step(batch(number))
    torch.manual_seed(7)
    learner = Learner(load_policy(folder, dtype=dtype, lora=lora), HOW)
    for number in range(5):
        learner.step(batch(number))
        save(tmp_path, learner, RunState(number + 1, number + 1), keep=1)
        place = latest(tmp_path)
        assert place is not None
        saved = {"model": folder, "adapter": place / "model"} if lora else {"model": str(place / "model")}
        learner = Learner(load_policy(dtype=dtype, **saved), HOW)  # type: ignore[arg-type]
        restore(place, learner)
    assert all(torch.equal(a, b) for a, b in zip(weights(straight.policy), weights(learner.policy), strict=True))
    files = {file.name for file in (place / "model").iterdir()}
    assert ("adapter_model.safetensors" in files) == (lora is not None)
    assert ("model.safetensors" in files) == (lora is None)


def test_a_run_goes_on_where_there_is_no_gpu(tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(load_policy(folder), HOW)
    learner.step(batch(0))
    with monkeypatch.context() as patched:
        patched.setattr(torch.serialization, "location_tag", lambda storage: "cuda:0")  # what a GPU's tensors are saved with
        place = save(tmp_path / "checkpoints", learner, RunState(1, 1))
    again = Learner(load_policy(str(place / "model")), HOW)
    restore(place, again)
    assert torch.equal(again.optimizer.state_dict()["state"][0]["exp_avg"], learner.optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_run_goes_on_with_another_number_of_gpus(count: int, tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Learner(load_policy(folder), HOW)
    place = save(tmp_path / "checkpoints", learner, RunState())
    state = torch.load(place / "state.pt", weights_only=False)
    torch.save({**state, "cuda": [torch.get_rng_state(), torch.get_rng_state()]}, place / "state.pt")
    generators = [torch.Generator() for _ in range(count)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda saved, device: generators[device].set_state(saved))
    restore(place, learner)
    assert [torch.equal(one.get_state(), torch.get_rng_state()) for one in generators] == [number < 2 for number in range(count)]


@pytest.mark.parametrize("tied", [True, False])
def test_a_merged_model_computes_the_same_and_leaves_the_policy_alone(tmp_path: Path, tied: bool) -> None:
    tiny_qwen3(VOCABULARY, tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    policy = load_policy(str(tmp_path / "base"), lora=LORA)
    learner, rows = Learner(policy, HOW), batch(5)
    learner.step(rows)
    learner.step(rows)
    before = weights(policy)
    save_merged(policy.model, tmp_path / "merged")
    assert all(torch.equal(a, b) for a, b in zip(weights(policy), before, strict=True))
    merged = load_policy(str(tmp_path / "merged"))
    assert not is_lora(merged)
    for ours, theirs in zip(policy.logprobs(rows), merged.logprobs(rows), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert set(merged_weights(policy.model)) == set(merged.model.state_dict())


def of_experts(folder: Path) -> str:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**MIXED)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapter_of_experts_is_trained_and_merged_into_each(checkpointing: bool, tmp_path: Path) -> None:
    policy, rows = load_policy(of_experts(tmp_path / "base"), lora=LORA, gradient_checkpointing=checkpointing), batch(5)
    start = policy.logprobs(rows)[0].detach()
    learner = Learner(policy, HOW)
    for _ in range(3):
        learner.step(rows)
    for name, one in policy.model.named_parameters():
        if ".experts." in name and "lora_B" in name:
            assert float(one.detach().abs().max()) > 0, f"{name} is not trained"
            torch.nn.init.normal_(one, std=0.2)
    assert float((policy.logprobs(rows)[0].detach() - start).abs().max()) > 1e-2
    save_merged(policy.model, tmp_path / "merged")
    merged = load_policy(str(tmp_path / "merged"))
    for ours, theirs in zip(policy.logprobs(rows), merged.logprobs(rows), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_added_to_experts_is_as_they_are_laid_out(transposed: bool) -> None:
    """Most are [experts, out, in], some are the other way round. peft itself adds up in the weight's format."""
    model = torch.nn.Module()
    model.experts = torch.nn.Module()
    model.experts.is_transposed = transposed
    model.experts.weight = torch.nn.Parameter(torch.randn(3, 4, 5))
    found = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=[], target_parameters=["experts.weight"], init_lora_weights=False)
    )
    layer = found.base_model.model.experts
    up, down = layer.lora_B["default"].weight, layer.lora_A["default"].weight
    torch.testing.assert_close(_product(layer, up, down) * layer.scaling["default"], layer.get_delta_weight("default"))


def test_what_peft_cannot_adapt_is_said_in_its_words(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be adapted so: .*lora_dropout"):
        load_policy(of_experts(tmp_path), lora=LoraSettings(dropout=0.1))


# ---- gradient checkpointing


@pytest.mark.parametrize("lora", [None, LORA])
def test_gradient_checkpointing_changes_no_gradient(folder: str, lora: LoraSettings | None) -> None:
    rows = batch(6, common=30)
    learners = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        policy = load_policy(folder, dtype="float64", lora=lora, gradient_checkpointing=checkpointing)
        learners.append(Learner(policy, HOW))
        learners[-1].step(rows)
        learners[-1].step(rows)
    for ours, theirs in zip(*(weights(one.policy) for one in learners), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_gradient_checkpointing_never_loses_a_shared_prefix(folder: str) -> None:
    """Layers put no keys and values into a cache while they train under it."""
    policy, rows = load_policy(folder, gradient_checkpointing=True), batch(6, common=64)
    assert policy.choose(rows) == "shared"
    for ours, plain in zip(policy.logprobs(rows), policy.logprobs(rows, "plain"), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-5)
