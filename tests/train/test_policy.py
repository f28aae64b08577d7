"""Every way through a model gives the same log-probabilities and gradients, and a model that would leak is found out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_qwen3 import WIDER, tiny_qwen3
from transformers import Lfm2Config, Lfm2ForCausalLM, Qwen3_5ForCausalLM, Qwen3ForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from polar.errors import ConfigError
from polar.train.policy import Policy, Way
from polar.train.rows import Row

VOCABULARY = 97


def qwen3(tied: bool = True) -> Any:
    return tiny_qwen3(VOCABULARY, max_position_embeddings=512, tie_word_embeddings=tied, **WIDER).to(torch.float64)


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


def gradients(policy: Policy, batch: list[Row], way: Way) -> list[torch.Tensor]:
    policy.model.zero_grad()
    sum(one.sum() for one in policy.logprobs(batch, way)).backward()  # type: ignore[union-attr]
    return [parameter.grad.clone() for parameter in policy.model.parameters() if parameter.grad is not None]


def session(*steps: int) -> list[Row]:
    """Rows of which each begins with all of the one before it, as `per_request` makes them; what a row trained, the next has as context."""
    generator = torch.Generator().manual_seed(1)
    ids, found = torch.zeros(0, dtype=torch.int64), []
    for step in steps:
        ids = torch.cat([ids, torch.randint(0, VOCABULARY, (step,), generator=generator)])
        places = torch.arange(len(ids) - step // 2, len(ids))
        found.append(Row(ids, places, torch.zeros(len(places)), torch.ones(len(places)), 1.0))
    return found


def behind(prefix: torch.Tensor, batch: list[Row]) -> list[Row]:
    return [replace(row, ids=torch.cat([prefix, row.ids]), places=row.places + len(prefix)) for row in batch]


BATCHES = {
    "one prefix": rows(40, 9, 14, 3, 1),
    "two groups behind one prefix": [*rows(70, 9, 14), *behind(rows(70, 1)[0].ids[:33], rows(41, 5, 6))],
    "one session": session(50, 40, 35, 66),
    "nothing in common": [*rows(3, 20), *rows(5, 7), *rows(6, 60)],
    "one row twice": [*rows(64, 7), *rows(64, 7)],
}


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("way", ["padded", "packed", "shared"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3 untied", "qwen3.5"])
def test_every_way_gives_the_log_probabilities_and_gradients_of_plain_rows(model: str, way: Way, batch: list[Row]) -> None:
    policy = Policy({"qwen3": qwen3, "qwen3 untied": lambda: qwen3(False), "qwen3.5": qwen3_5}[model]())
    exact, near = (1e-9, 1e-6) if "3.5" not in model else (1e-5, 1e-4)  # norms and rotations are in float32, recurrences too
    for ours, plain in zip(policy.logprobs(batch, way), policy.logprobs(batch, "plain"), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=exact)
    for ours, plain in zip(gradients(policy, batch, way), gradients(policy, batch, "plain"), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=near)


@pytest.mark.parametrize("way", ["plain", "padded", "packed", "shared"])
@pytest.mark.parametrize("model", ["qwen3", "qwen3.5"])
def test_gradient_checkpointing_changes_nothing(model: str, way: Way) -> None:
    policy, batch = Policy(qwen3() if model == "qwen3" else qwen3_5()), rows(40, 9, 14)
    policy.model.train()
    before = gradients(policy, batch, way)
    policy.model.gradient_checkpointing_enable()
    for ours, theirs in zip(gradients(policy, batch, way), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 if model == "qwen3" else 1e-6)


def test_a_prepared_model_answers_the_engine_as_before() -> None:
    model, ids = qwen3(), torch.arange(11)[None]
    before = model.generate(ids, max_new_tokens=6, do_sample=False)
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.int64), ids], 1)
    mask = torch.cat([torch.zeros(1, 3, dtype=torch.int64), torch.ones_like(ids)], 1)
    Policy(Policy(model).model)
    assert torch.equal(before, model.generate(ids, max_new_tokens=6, do_sample=False))
    assert torch.equal(before[:, 11:], model.generate(padded, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, 14:])


def test_the_log_probabilities_are_those_of_the_plain_softmax() -> None:
    policy, (row,) = Policy(qwen3(), temperature=0.7), rows(5, 12)
    logits = policy.model(input_ids=row.ids[None]).logits[0] / 0.7
    expected = torch.log_softmax(logits, -1)[row.places - 1, row.targets]
    torch.testing.assert_close(policy.logprobs([row])[0], expected)


def test_a_model_that_cannot_keep_rows_apart_is_refused_packing_with_a_word() -> None:
    torch.manual_seed(0)
    model = Lfm2ForCausalLM(  # short convolutions beside attention, which nothing here knows
        Lfm2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
        )
    )
    policy = Policy(model)
    assert "leak" in str(policy.why_not["packed"])
    with pytest.raises(ConfigError, match="cannot take packed rows"):
        policy.logprobs(rows(4, 5, 5), "packed")
    batch = rows(4, 5, 6)
    assert policy.choose(batch) == "padded"
    torch.testing.assert_close(policy.logprobs(batch), [policy.logprobs([row], "plain")[0] for row in batch])


def test_logits_that_are_capped_or_scaled_are_refused() -> None:
    class Capped(Qwen3ForCausalLM):
        def forward(self, *args: Any, **more: Any) -> Any:
            found = super().forward(*args, **more)
            found.logits = 3 * torch.tanh(found.logits)
            return found

    with pytest.raises(ConfigError, match="soft cap"):
        Policy(Capped(qwen3().config))


def test_attention_that_looks_back_a_bounded_way_is_refused_packing_with_a_word() -> None:
    model = qwen3()
    model.model.layers[0].self_attn.sliding_window = 8
    assert "sliding_window" in str(Policy(model).why_not["packed"])


def test_attention_that_cannot_be_exchanged_is_refused_packing_with_a_word() -> None:
    model = qwen3()
    model.set_attn_implementation("eager")
    policy = Policy(model)
    assert "'eager'" in str(policy.why_not["packed"])
    assert policy.choose(rows(40, 5, 5)) == "padded"


def test_the_way_is_chosen_by_what_it_saves() -> None:
    policy = Policy(qwen3())
    assert policy.choose(rows(100, 5, 5)) == "shared"
    assert policy.choose(rows(2, 50, 50)) == "packed"
    assert policy.choose(rows(2, 50)) == "plain"


def test_micro_batches_count_a_common_beginning_once() -> None:
    policy = Policy(qwen3())
    assert policy.pack(rows(64, 10, 10, 10), 100) == [[0, 1, 2]]
    assert len(policy.pack(rows(64, 10, 10, 10), 100, "packed")) == 3
    assert policy.pack([*rows(60, 9), *rows(61, 9), *rows(60, 30)], 160) == [[0, 2], [1]]  # two either way
