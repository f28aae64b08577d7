"""Log-probabilities of given tokens from hidden states, a chunk of rows at a time: no [tokens, vocabulary] matrix ever exists.

With 248,320 entries (Qwen3.5), the logits of a 30,000-token row in float32 would be 30 GB, and their gradient as much again. Here each
chunk's logits live for as long as the chunk is worked on, in the forward and again in the backward pass, which computes them a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
"""Of float32 logits at once; a chunk has at least one row. About what a processor's cache holds."""
CHUNK_BYTES_GPU = 512 << 20
"""On a GPU, where every chunk reads the whole LM head from memory once more."""


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int | None = None) -> Tensor:
    """The log-probability of `targets[i]` under `softmax(hidden[i] @ weight.T / temperature)`.

    `hidden`: float[n, d]; `weight`: float[v, d], the LM head; `targets`: int64[n]. Returns float32[n] (float64 for float64 input), with
    gradients to `hidden` and `weight`. `chunk` is in rows; `None` takes as many as fit `CHUNK_BYTES`. Softmax and sums over chunks are in
    float32 at least; products are in the weights' own format, forward and backward, as in any model.
    Raises `ValueError` for a temperature that is not over 0: at 0 nothing was sampled from a distribution.
    """
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: log-probabilities need one over 0")
    size = CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES_GPU
    rows = chunk or max(1, size // (4 * weight.shape[0]))
    result: Tensor = _TokenLogprobs.apply(hidden, weight, targets, float(temperature), rows)  # type: ignore[no-untyped-call]
    return result


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, rows: int) -> Tensor:
        found, normalisers = [], []
        for start in range(0, len(hidden), rows):
            logits = _logits(hidden[start : start + rows], weight, temperature)
            wanted = targets[start : start + rows]
            normaliser = torch.logsumexp(logits, dim=-1)
            found.append(logits.gather(1, wanted[:, None])[:, 0] - normaliser)
            normalisers.append(normaliser)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.save_for_backward(hidden, weight, targets, torch.cat(normalisers) if normalisers else hidden.new_zeros(0))
        return torch.cat(found) if found else hidden.new_zeros(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, targets, normalisers = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        to_weight = torch.zeros_like(weight, dtype=normalisers.dtype) if ctx.needs_input_grad[1] else None
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            share = -torch.exp(_logits(hidden[part], weight, ctx.temperature) - normalisers[part, None])
            share.scatter_add_(1, targets[part, None], torch.ones_like(share[:, :1]))
            share *= gradient[part, None] / ctx.temperature
            share = share.to(weight.dtype)
            if to_hidden is not None:
                to_hidden[part] = share @ weight
            if to_weight is not None:
                _add_product(to_weight, share.T, hidden[part])
        return to_hidden, None if to_weight is None else to_weight.to(weight.dtype), None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """In float32 at least: the engine's softmax is, too."""
    product = hidden @ weight.T
    if product.dtype in (torch.bfloat16, torch.float16):
        product = product.float()
    return product if temperature == 1.0 else product / temperature
