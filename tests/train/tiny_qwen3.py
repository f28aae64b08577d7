"""A random Qwen3 of two layers and some thousand weights, for tests of training. `tests/engines/tiny.py` makes ones for servers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config


def tiny_config(vocabulary: int, **more: Any) -> Qwen3Config:
    """`more` are settings of transformers' `Qwen3Config`."""
    small = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    return Qwen3Config(vocab_size=vocabulary, **{**small, **more})


def tiny_qwen3(vocabulary: int, seed: int = 0, **more: Any) -> Any:
    """The same weights for the same arguments."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(tiny_config(vocabulary, **more))


WIDER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
"""For what has to tell heads apart."""
