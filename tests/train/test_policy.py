"""Every way through a model gives the same log-probabilities and gradients, and a model that would leak is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM, Qwen3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from polar.errors import ConfigError
from polar.train.policy import Policy
from polar.train.rows import Row, shared_prefix

VOCABULARY = 97


def qwen3(tied: bool = True) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            tie_word_embeddings=tied,
        )
    ).to(torch.float64)


def qwen3_5() -> Any:
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            max_position_embeddings=512,
        )
    )


def rows(prefix: int, *rests: int) -> list[Row]:
    generator = torch.Generator().manual_seed(prefix)
    common = torch.randint(0, VOCABULARY, (prefix,), generator=generator)
    found = []
    for rest in rests:
        ids = torch.cat([common, torch.randint(0, VOCABULARY, (rest,), generator=generator)])
        places = torch.arange(prefix, len(ids))[torch.rand(rest, generator=generator) < 0.6]
        found.append(Row(ids, places, torch.zeros(len(places)), torch.ones(len(places)), 1.0))
    return found


def gradients(policy: Policy, batch: list[Row], way: str) -> list[torch.Tensor]:
    policy.model.zero_grad()
    sum(one.sum() for one in policy.logprobs(batch, way)).backward()  # type: ignore[arg-type, union-attr]
    return [parameter.grad.clone() for parameter in policy.model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("way", ["packed", "shared"])
def test_packed_and_shared_rows_equal_plain_ones(way: str, tied: bool) -> None:
    policy, batch = Policy(qwen3(tied)), rows(20, 9, 14, 3, 1)
    for ours, plain in zip(policy.logprobs(batch, way), policy.logprobs(batch, "plain"), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-9)
    for ours, plain in zip(gradients(policy, batch, way), gradients(policy, batch, "plain"), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)  # norms and rotations are in float32


def test_the_log_probabilities_are_those_of_the_plain_softmax() -> None:
    policy, (row,) = Policy(qwen3(), temperature=0.7), rows(5, 12)
    logits = policy.model(input_ids=row.ids[None]).logits[0] / 0.7
    expected = torch.log_softmax(logits, -1)[row.places - 1, row.targets]
    torch.testing.assert_close(policy.logprobs([row])[0], expected)


def test_a_model_with_recurrent_layers_is_refused_packing_with_a_word() -> None:
    policy = Policy(qwen3_5())
    assert policy.why_not_packed is not None
    assert "leak" in policy.why_not_packed
    with pytest.raises(ConfigError, match="cannot take packed rows"):
        policy.logprobs(rows(4, 5, 5), "packed")
    batch = rows(4, 5, 6)
    torch.testing.assert_close(policy.logprobs(batch), [policy.logprobs([row], "plain")[0] for row in batch])


def test_the_way_is_chosen_by_what_it_saves() -> None:
    policy = Policy(qwen3())
    assert policy.choose(rows(100, 5, 5)) == "shared"
    assert policy.choose(rows(2, 50, 50)) == "packed"
    assert policy.choose(rows(2, 50)) == "plain"


def test_a_prefix_ends_before_the_first_trained_id() -> None:
    same = torch.arange(10)
    row = Row(same, torch.tensor([4, 7]), torch.zeros(2), torch.ones(2), 0.0)
    assert shared_prefix([row, row]) == 4
    assert shared_prefix([]) == 0
