"""Attention inside rows, where rows stand end to end and share beginnings: each id sees its own row before it, and nothing else.

transformers' own way with such a sequence is a mask over all pairs, of which it computes every one. Here each segment of the forest is two
calls of the fused kernel, on slices, without a mask: the segment on itself (causal), and all that grows from it on the segment (whole).
An id's parts are joined by their log-sum-exp, as between the blocks of FlashAttention (Dao 2023, arXiv:2307.08691) and RingAttention (Liu
et al. 2023, arXiv:2310.01889); backwards, the kernel's gradient of a part takes the joined output and normaliser, which makes it exact.

Registered under names of transformers' `AttentionInterface`, each beside one that was there (`polar_sdpa` for `sdpa`), to which a call
without a forest goes on. Kernels of fused attention are PyTorch's own; where none fits (float32 on a GPU), plain `sdpa` a segment.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from polar.errors import ConfigError
from polar.train.forest import Forest, Segment, rectangles

PREFIX = "polar_"
FOREST = "polar_forest"
"""The keyword under which a forest goes through a model's forward pass to its token mixers."""


class Kernel(Protocol):
    """Fused attention. `q`: float[1, heads, n, d]; `k`, `v`: float[1, fewer heads, m, d]. `lse`: float[1, heads, n]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]: ...
    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class FlashCpu:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return found


class FlashCuda:
    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        none = torch.zeros((), dtype=torch.int64, device=q.device)  # the state of dropout's generator: there is no dropout
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, none, none, scale=scale
        )
        return found


def kernel_for(device: torch.device, dtype: torch.dtype, heads: int, groups: int, size: int) -> Kernel | None:
    """The fused kernel for `heads` query heads over `groups` key heads of `size`, tried out against plain attention, gradients included.
    `None`: none that gives the same; `grow` then does without."""
    kernel: Kernel = FlashCpu() if device.type == "cpu" else FlashCuda()
    segments = (Segment(0, 6, 20, 0), Segment(6, 13, 13, 1), Segment(13, 17, 20, 1), Segment(17, 20, 20, 2))
    generator = torch.Generator().manual_seed(0)

    def made(count: int) -> Tensor:
        return torch.randn(1, 20, count, size, generator=generator).to(device, dtype).transpose(1, 2).requires_grad_()

    inputs, towards = (made(heads), made(groups), made(groups)), made(heads).detach()
    results = []
    for one in (kernel, None):
        try:
            with torch.enable_grad():
                out = grow(*inputs, parts_of(segments), segments, size**-0.5, one)
                results.append((out.detach(), *torch.autograd.grad(out, inputs, towards)))
        except (NotImplementedError, RuntimeError, TypeError):
            return None
    allowed = {torch.bfloat16: 0.1, torch.float16: 0.02}.get(dtype, 1e-4)
    return kernel if all(torch.allclose(a, b, rtol=allowed, atol=allowed) for a, b in zip(*results, strict=True)) else None


class Part(NamedTuple):
    """A call of the kernel: `here` attend to `seen`, of which they see all or, if `causal`, what stands before them. `first`: these queries
    saw nothing yet."""

    here: slice | Tensor
    seen: slice
    causal: bool
    first: bool


def parts_of(segments: Sequence[Segment], wanted: Tensor | None = None) -> list[Part]:
    """What grows from a segment stands directly behind it: one call for all. `wanted`: int64[k], ascending; of other ids, the output does
    not matter, and is computed where that is no more work."""
    found = []
    for segment in segments:
        own, later = slice(segment.start, segment.end), slice(segment.end, segment.stop)
        first = segment.level == 0
        if wanted is None:
            found.append(Part(own, own, True, first))
            if segment.stop > segment.end:
                found.append(Part(later, own, False, first))
            continue
        start, end, stop = torch.searchsorted(wanted, torch.tensor([segment.start, segment.end, segment.stop])).tolist()
        if end > start:
            found.append(Part(own, own, True, first))
        if stop > end:
            found.append(Part(wanted[end:stop], own, False, first))
    return found


def grow(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], segments: Sequence[Segment], scale: float, kernel: Kernel | None
) -> Tensor:
    """Attention of every id to those before it on its way from the root. `q`: float[1, heads, n, d]; `k`, `v`: float[1, fewer heads, n, d];
    returns float[1, heads, n, d]. `parts` are those of `segments`."""
    if kernel is not None:
        result: Tensor = _Grow.apply(q, k, v, parts, scale, kernel)  # type: ignore[no-untyped-call]
        return result
    way: list[Segment] = []
    found = []
    for segment in segments:
        del way[segment.level :]
        way.append(segment)
        keys, values = (torch.cat([one[:, :, part.start : part.end] for part in way], 2) for one in (k, v))
        query = q[:, :, segment.start : segment.end]
        seen = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=q.device).tril(keys.shape[2] - query.shape[2])
        repeats = q.shape[1] // k.shape[1]
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
        found.append(scaled_dot_product_attention(query, keys, values, seen, scale=scale))
    return torch.cat(found, 2)


class _Grow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], scale: float, kernel: Kernel) -> Tensor:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.zeros((*q.shape[:1], q.shape[2], q.shape[1], v.shape[3]), dtype=wide, device=q.device).transpose(1, 2)
        lse = torch.zeros(q.shape[:3], dtype=wide, device=q.device)
        for here, seen, causal, first in parts:
            part, norm = kernel.forward(q[:, :, here], k[:, :, seen], v[:, :, seen], causal, scale)
            if not first:  # joined with what these queries saw before
                before, part_norm = lse[:, :, here], norm
                norm = torch.logaddexp(before, part_norm)
                part = out[:, :, here] * torch.exp(before - norm)[..., None] + part * torch.exp(part_norm - norm)[..., None]
            out[:, :, here], lse[:, :, here] = part.to(wide), norm
        out = out.to(q.dtype)
        ctx.parts, ctx.scale, ctx.kernel = parts, scale, kernel
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = gradients
        q, k, v, out, lse = ctx.saved_tensors
        alone = all(part.first and part.causal for part in ctx.parts)
        wide = q.dtype if alone or q.dtype == torch.float64 else torch.float32  # of sums over parts
        to_q, to_k, to_v = (torch.zeros_like(one, dtype=wide) for one in (q, k, v))
        for here, seen, causal, _ in ctx.parts:
            for total, where, part in zip(
                (to_q, to_k, to_v),
                (here, seen, seen),
                ctx.kernel.backward(
                    grad[:, :, here], q[:, :, here], k[:, :, seen], v[:, :, seen], out[:, :, here], lse[:, :, here], causal, ctx.scale
                ),
                strict=True,
            ):
                total[:, :, where] += part
        return to_q.to(q.dtype), to_k.to(k.dtype), to_v.to(v.dtype), None, None, None


class Layout:
    """What goes through the model to its mixers: the forest (on the model's device) and the kernel for it.

    `wanted`: int64[k], ascending, on the CPU: the ids whose hidden states are read in the end. In the last of the model's `layers`, the
    others need not look at anything.
    """

    def __init__(self, forest: Forest, kernel: Kernel | None, wanted: Tensor, layers: int) -> None:
        self.forest = forest
        self.kernel = kernel
        self.last = layers - 1
        self.parts = parts_of(forest.segments)
        self.parts_in_last = [
            part._replace(here=part.here.to(forest.ids.device) if isinstance(part.here, Tensor) else part.here)
            for part in parts_of(forest.segments, wanted)
        ]

    @cached_property
    def whole_rows(self) -> tuple[list[Tensor], Tensor]:
        """Rectangles int64[rows, longest] of all rows' places; int64[n], where each id's output stands in theirs, end to end."""
        paths = self.forest.paths
        source = torch.empty_like(self.forest.ids)
        found: list[Tensor] = []
        filled = 0
        for rectangle in rectangles(paths):
            found.append(rectangle.places)
            for number in rectangle.numbers:
                source[paths[number]] = torch.arange(filled, filled + len(paths[number]), device=source.device)
                filled += rectangle.places.shape[1]
        return found, source

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, layer: int | None) -> Tensor:
        parts = self.parts_in_last if layer == self.last else self.parts
        return grow(q, k, v, parts, self.forest.segments, scale, self.kernel)


def prepare(backbone: nn.Module) -> None:
    """Makes a model's mixers understand forests: attention through transformers' registry, recurrent ones (`linear_attn`: gated delta rule
    and the like) by running them on each row's whole path. Without a forest, all compute what they did before; a second call changes
    nothing. Raises `ConfigError` for a model whose attention cannot be exchanged."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config: Any = backbone.config
    before = str(config._attn_implementation)
    if not before.startswith(PREFIX):
        if before not in ALL_ATTENTION_FUNCTIONS:
            raise ConfigError(f"its attention is {before!r}, which cannot be exchanged: load it with 'sdpa'")
        name = PREFIX + before
        AttentionInterface.register(name, _Attention(ALL_ATTENTION_FUNCTIONS[before]))
        AttentionMaskInterface.register(name, AttentionMaskInterface()[before])
        config._attn_implementation = name
    for module in backbone.modules():
        mixer = getattr(module, "linear_attn", None)
        if isinstance(mixer, nn.Module) and "forward" not in vars(mixer):
            mixer.forward = types.MethodType(_by_rows, mixer)


class _Attention:
    """An attention function of transformers beside which forests are understood."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any) -> Any:
        layout: Layout | None = more.pop(FOREST, None)
        if layout is None:
            return self.before(module, query, key, value, mask, **more)
        for name in ("sliding_window", "softcap", "s_aux", "position_bias", "dropout"):
            if more.get(name):
                raise NotImplementedError(f"{type(module).__name__} attends with {name}")
        scale = more.get("scaling") or query.shape[-1] ** -0.5
        found = layout.attend(query, key, value, scale, getattr(module, "layer_idx", None))
        return found.transpose(1, 2).contiguous(), None


def _by_rows(self: Any, hidden_states: Tensor, *positional: Any, **more: Any) -> Any:
    """The forward pass of a recurrent mixer. With a forest, on rectangles of whole rows: a shared beginning is run through by each row, and
    every id's output is that of one of the rows that have it: it is the same in all."""
    layout: Layout | None = more.pop(FOREST, None)
    forward = type(self).forward
    if layout is None:
        return forward(self, hidden_states, *positional, **more)
    more["attention_mask"] = None
    places, source = layout.whole_rows
    outputs = [forward(self, hidden_states[0][part], *positional, **more).flatten(0, 1) for part in places]
    return torch.cat(outputs)[source][None]
