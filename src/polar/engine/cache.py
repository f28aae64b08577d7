"""Key-value slots and the attention over them.

One slot holds one token sequence: its ids, and for every layer the keys and values of exactly those ids. All sequences of a step
run through the model as one flat row of tokens; only attention looks at them one by one, each over its own slot. So a
sequence's numbers do not depend on who else is in the batch, nothing is padded, and a prefix that two sequences share is copied,
not computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ATTENTION = "polar_slots"
MIN_CAPACITY = 256


class Slot:
    """`length` ids are computed. `used` is a counter of last use, for eviction."""

    def __init__(self, layers: int, heads: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (layers, 2, heads, size)
        self._dtype = dtype
        self._device = device
        self.length = 0
        self.used = 0
        self.busy = False
        self.clear()

    def clear(self) -> None:
        """Forgets everything and gives the memory back."""
        layers, two, heads, size = self._shape
        self.length = 0
        self._ids: NDArray[np.int64] = np.empty(0, np.int64)
        self.store = torch.empty((layers, two, heads, 0, size), dtype=self._dtype, device=self._device)

    @property
    def capacity(self) -> int:
        return int(self.store.shape[3])

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: self.length]

    def reserve(self, tokens: int) -> None:
        """Makes room for `tokens` in all, at least doubling what there is."""
        if tokens <= self.capacity:
            return
        layers, two, heads, size = self._shape
        capacity = max(tokens, 2 * self.capacity, MIN_CAPACITY)
        store = torch.empty((layers, two, heads, capacity, size), dtype=self._dtype, device=self._device)
        store[:, :, :, : self.length] = self.store[:, :, :, : self.length]
        ids = np.empty(capacity, np.int64)
        ids[: self.length] = self.ids
        self.store, self._ids = store, ids

    def append(self, ids: NDArray[np.int64]) -> None:
        """Notes ids whose keys and values the next step writes."""
        self.reserve(self.length + len(ids))
        self._ids[self.length : self.length + len(ids)] = ids
        self.length += len(ids)

    def common(self, ids: NDArray[np.int64]) -> int:
        """How many leading ids are the same."""
        shorter = min(self.length, len(ids))
        unequal = np.nonzero(self._ids[:shorter] != ids[:shorter])[0]
        return int(unequal[0]) if len(unequal) else shorter

    def copy_prefix(self, other: Slot, length: int) -> None:
        """Becomes the first `length` tokens of `other`."""
        self.length = 0
        self.reserve(length)
        self.store[:, :, :, :length] = other.store[:, :, :, :length]
        self._ids[:length] = other.ids[:length]
        self.length = length


@dataclass(slots=True)
class Segment:
    """`count` new tokens of one sequence, at positions `start` onward; its slot already lists their ids."""

    slot: Slot
    start: int
    count: int


@dataclass(slots=True)
class Batch:
    segments: list[Segment] = field(default_factory=list)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    polar_batch: Batch | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function of transformers. `query`: [1, heads, tokens, size]; `key`, `value`: [1, kv heads, tokens, size].
    Returns [1, tokens, heads, size]."""
    assert polar_batch is not None
    layer: int = module.layer_idx  # type: ignore[assignment]
    heads, size = query.shape[1], query.shape[3]
    kv_heads = key.shape[1]
    scale = size**-0.5 if scaling is None else scaling
    out = torch.empty((query.shape[2], heads, value.shape[3]), dtype=query.dtype, device=query.device)
    at = 0
    for segment in polar_batch.segments:
        end, total = at + segment.count, segment.start + segment.count
        keys, values = segment.slot.store[layer, 0], segment.slot.store[layer, 1]
        keys[:, segment.start : total] = key[0, :, at:end]
        values[:, segment.start : total] = value[0, :, at:end]
        keys, values = keys[:, :total], values[:, :total]
        if segment.count == 1:
            grouped = query[0, :, at].reshape(kv_heads, heads // kv_heads, size)
            weights = torch.softmax(torch.matmul(grouped, keys.transpose(1, 2)) * scale, dim=-1)
            out[at] = torch.matmul(weights, values).reshape(heads, -1)
        else:
            mask = None
            if segment.start:
                mask = torch.ones(segment.count, total, dtype=torch.bool, device=query.device).tril(segment.start)
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[:, :, at:end],
                keys.unsqueeze(0),
                values.unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=heads != kv_heads,
            )
            out[at:end] = attended[0].transpose(0, 1)
        at = end
    return out.unsqueeze(0), None


def install() -> None:
    """Makes the attention known to transformers under the name `ATTENTION`; the mask is made here, so transformers makes none."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, attend)
    AttentionMaskInterface.register(ATTENTION, lambda *args, **kwargs: None)
