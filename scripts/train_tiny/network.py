"""The tiny Qwen3 network and its training forward. Knows no text: ids in, loss out."""

from __future__ import annotations

import torch
from data import Batch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM


def build(vocabulary: int, context: int, *, stop: int, pad: int, seed: int) -> Qwen3ForCausalLM:
    """About two million parameters. Untied, so that an engine can reload the head in place; the head starts as the embedding's copy."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=stop,
        pad_token_id=pad,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.5)
        model.lm_head.weight.copy_(model.model.embed_tokens.weight * 0.2)
    return model


def loss(model: Qwen3ForCausalLM, batch: Batch, *, through: bool = True) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the learned tokens, and the share of them that the model ranks first.

    A token sees the prefix and what comes before it in its own dialogue. The prefix is read once and its keys and values are shared by
    all rows, gradients included: equal to putting it before each dialogue, and far cheaper. Without `through`, the prefix gets no gradient:
    a third of its cost.
    """
    count, width = batch.rows.shape
    seen = (batch.owner[:, :, None] == batch.owner[:, None, :]) & torch.ones(width, width, dtype=torch.bool).tril()
    cache, places = None, batch.places
    if batch.prefix is not None:
        shared = DynamicCache(config=model.config)
        with torch.set_grad_enabled(through):
            model.model(input_ids=batch.prefix[None, :], past_key_values=shared, use_cache=True)
        cache = DynamicCache(config=model.config)
        for index, layer in enumerate(shared.layers):
            cache.update(layer.keys.expand(count, -1, -1, -1), layer.values.expand(count, -1, -1, -1), index)
        places = places + len(batch.prefix)
        seen = torch.cat([torch.ones(count, width, len(batch.prefix), dtype=torch.bool), seen], dim=2)
    output = model.model(
        input_ids=batch.rows, attention_mask=seen[:, None], position_ids=places, past_key_values=cache, use_cache=cache is not None
    )
    wanted = batch.learned[:, 1:]
    logits = model.lm_head(output.last_hidden_state[:, :-1][wanted])
    targets = batch.rows[:, 1:][wanted]
    return functional.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()
