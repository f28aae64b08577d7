"""The tiny Qwen3 network and its training forward. Knows no text: ids in, loss out."""

from __future__ import annotations

import torch
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


def loss(model: Qwen3ForCausalLM, rows: Tensor, learned: Tensor, lengths: Tensor, prefix: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of the learned tokens, and the share of them that the model ranks first.

    `rows`: int64[n, t], right-padded; `learned`: bool[n, t], true where a token is a target; `lengths`: int64[n]. `prefix`: int64[p]
    is read once and its keys and values are shared by all rows, gradients included: equal to putting it before each row, and cheaper.
    """
    count, width = rows.shape
    mask = torch.arange(width)[None, :] < lengths[:, None]
    cache = None
    if prefix is not None:
        shared = DynamicCache(config=model.config)
        model.model(input_ids=prefix[None, :], past_key_values=shared, use_cache=True)
        cache = DynamicCache(config=model.config)
        for index, layer in enumerate(shared.layers):
            cache.update(layer.keys.expand(count, -1, -1, -1), layer.values.expand(count, -1, -1, -1), index)
        mask = torch.cat([torch.ones(count, len(prefix), dtype=torch.bool), mask], dim=1)
    hidden = model.model(input_ids=rows, attention_mask=mask, past_key_values=cache, use_cache=cache is not None).last_hidden_state
    wanted = learned[:, 1:]
    logits = model.lm_head(hidden[:, :-1][wanted])
    targets = rows[:, 1:][wanted]
    return functional.cross_entropy(logits, targets), (logits.argmax(-1) == targets).float().mean()
