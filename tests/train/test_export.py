"""What is exported is the policy, untied, whole or not there at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gateway_rig import make_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FalconConfig, GemmaConfig, GPT2Config, PreTrainedConfig

from polar.errors import ConfigError
from polar.train.export import Exports, export_model, untie
from polar.train.loading import LoraSettings, load_policy
from polar.train.policy import Policy

IDS = torch.arange(24)[None] * 7 % 250


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "base", tied=request.param)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def logits(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def reloaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def test_the_policy_comes_out_as_it_is_with_a_head_of_its_own(model: Path, tmp_path: Path) -> None:
    policy = Policy.load(str(model))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.01)
    folder = export_model(policy, tmp_path / "policy", tokenizer=model)
    assert "lm_head.weight" in tensors(folder)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert torch.equal(logits(reloaded(folder)), logits(policy.model))
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_exporting_leaves_the_policy_as_it_was(model: Path, tmp_path: Path) -> None:
    policy = Policy.load(str(model))
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    export_model(policy, tmp_path / "policy")
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    assert policy.model.config.tie_word_embeddings == json.loads((model / "config.json").read_text())["tie_word_embeddings"]


def test_an_adapter_is_merged_or_written_alone(model: Path, tmp_path: Path) -> None:
    policy = load_policy(str(model), lora=LoraSettings(r=4))
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    merged = export_model(policy, tmp_path / "merged")
    assert not any("lora" in name for name in tensors(merged))
    torch.testing.assert_close(logits(reloaded(merged)), logits(policy.model), rtol=0, atol=1e-4)
    alone = export_model(policy, tmp_path / "alone", adapter_only=True)
    assert (alone / "adapter_config.json").is_file()
    assert all("lora" in name for name in tensors(alone))
    with pytest.raises(ConfigError, match="no adapter"):
        export_model(Policy.load(str(model)), tmp_path / "none", adapter_only=True)


def test_a_folder_is_untied_without_being_loaded(model: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    folder = untie(model, tmp_path / "untied")
    assert "lm_head.weight" in tensors(folder)
    assert torch.equal(logits(reloaded(folder)), logits(reloaded(model)))
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    with pytest.raises(ConfigError, match="is there already"):
        untie(model, folder)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        untie(tmp_path, tmp_path / "nothing")


def test_a_model_whose_config_does_not_say_that_it_is_tied_is_untied(tmp_path: Path) -> None:
    """Gemma's config.json, and others, leave it to what such models are."""
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(GemmaConfig(vocab_size=256, head_dim=8, **shape)).save_pretrained(tmp_path / "base")
    config = tmp_path / "base" / "config.json"
    facts = json.loads(config.read_text())
    del facts["tie_word_embeddings"]
    config.write_text(json.dumps(facts))
    folder = untie(tmp_path / "base", tmp_path / "untied")
    assert "lm_head.weight" in tensors(folder)
    assert torch.equal(logits(reloaded(folder)), logits(reloaded(tmp_path / "base")))
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "shape",
    [
        GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=1),
        FalconConfig(vocab_size=256, hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
    ],
    ids=["GPT-2", "Falcon"],
)
def test_an_embedding_by_another_name_is_untied_too(shape: PreTrainedConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(shape).save_pretrained(tmp_path / "base")
    folder = export_model(load_policy(str(tmp_path / "base"), device="cpu"), tmp_path / "version")
    assert "lm_head.weight" in tensors(folder)
    assert torch.equal(logits(reloaded(folder)), logits(reloaded(tmp_path / "base")))


def test_a_model_in_several_files_is_untied_too(tmp_path: Path) -> None:
    source = make_model(tmp_path / "one", tied=True)
    reloaded(source).save_pretrained(tmp_path / "several", max_shard_size="100KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 1
    folder = untie(tmp_path / "several", tmp_path / "untied")
    assert torch.equal(logits(reloaded(folder)), logits(reloaded(source)))


def test_versions_have_folders_of_their_own_and_old_ones_go(model: Path, tmp_path: Path) -> None:
    policy = Policy.load(str(model))
    exports = Exports(tmp_path / "weights", keep=2)
    for version in range(4):
        assert exports.write(policy, version).name == f"policy-{version:06d}"
    assert sorted(path.name for path in (tmp_path / "weights").iterdir()) == ["policy-000002", "policy-000003"]
    with pytest.raises(ConfigError, match="a folder of its own"):
        export_model(policy, tmp_path / "weights" / "policy-000003")


def test_a_version_that_an_earlier_run_left_is_written_anew(model: Path, tmp_path: Path) -> None:
    policy = Policy.load(str(model))
    exports = Exports(tmp_path / "weights")
    exports.write(policy, 7)
    (tmp_path / "weights" / ".policy-000008.99").mkdir()
    with torch.no_grad():
        next(iter(policy.model.parameters())).add_(1.0)
    folder = exports.write(policy, 7)
    assert torch.equal(logits(reloaded(folder)), logits(policy.model))
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["policy-000007"]
