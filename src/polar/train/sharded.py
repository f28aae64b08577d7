"""A policy whose weights lie in pieces on several GPUs (FSDP2, `torch.distributed.fsdp.fully_shard`; Zhao et al. 2023, arXiv:2304.11277).

Every layer is gathered when it computes and let go again, so a process holds its share of weights, gradients and moments, and one layer
whole. Each pass through a layer is a collective: all processes have to make the same number of them, in the same order. So a micro-batch is
always one pass through the backbone, and who has nothing left to do goes along with an idle row (`polar.train.parallel`).

Only rank 0 reads the model; the others get its configuration and their pieces from it. Knows no optimiser and no rows' meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from polar.errors import ConfigError
from polar.train.forest import GRAIN
from polar.train.policy import Policy, Way
from polar.train.rows import Row

_ENTRY = "polar_logprobs"


class ShardedPolicy(Policy):
    """`model`: made by `shard`. Every process calls `logprobs`, each with its own rows, and all the same number of times."""

    def __init__(self, model: Any, *, temperature: float = 1.0, half: torch.dtype | None = None) -> None:
        self.half = half
        """The format that the passes compute in, where the weights are float32."""
        self.has_masters = half is not None and any("lora_" not in name for name, one in model.named_parameters() if one.requires_grad)
        setattr(model, _ENTRY, lambda *arguments: torch.cat(super(ShardedPolicy, self)._logprobs(*arguments)))
        register_fsdp_forward_method(model, _ENTRY)
        super().__init__(model, temperature=temperature)

    def choose(self, rows: Sequence[Row]) -> Way:
        way = super().choose(rows)
        if way == "padded" or (way == "plain" and len(rows) > 1):
            raise ConfigError(f"a sharded {type(self.model).__name__} takes one row at a time: {self.why_not['packed']}")
        return way

    def pack(self, rows: Sequence[Row], budget: int, way: Way | None = None) -> list[list[int]]:
        """One pass each: rows of a model that cannot be packed go alone, longest first, so that those of all processes are about equal."""
        if self.why_not["packed"] is not None or way in ("plain", "padded"):
            return [[number] for number in sorted(range(len(rows)), key=lambda number: (-len(rows[number]), number))]
        return super().pack(rows, budget, way)

    def _logprobs(self, rows: Sequence[Row], way: Way, grain: int = GRAIN) -> list[Tensor]:
        """Through the model's hooks: the head's weight is gathered as well."""
        found: Tensor = getattr(self.model, _ENTRY)(rows, way, grain)
        if not torch.is_grad_enabled():
            reshard(self.model)
        return list(found.split([len(row.places) for row in rows]))  # type: ignore[no-untyped-call]


def shard(model: nn.Module, mesh: DeviceMesh, compute: torch.dtype | None) -> nn.Module:
    """`model` in place: one unit for each layer and one for the rest. `compute`: the format of weights in the passes, where it is another
    than theirs; gradients are then added up in float32. Raises `ConfigError` for a model without a list of layers."""
    layers = _layers(model)
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if compute is None else torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a batch's loss is a sum over all processes: its weights know the whole batch
            module.set_force_sum_reduction_for_comms(True)
    return model


def reshard(model: nn.Module) -> None:
    """After a pass without a backward one, which leaves the outermost unit whole: who asks for the model's parameters gets the pieces."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _layers(model: nn.Module) -> list[nn.Module]:
    lists = [list(one) for one in model.modules() if isinstance(one, nn.ModuleList)]
    longest = max(lists, key=len, default=[])
    if not longest:
        raise ConfigError(f"{type(model).__name__} has no list of layers to shard by: set sharding to none")
    return longest


def gather(policy: ShardedPolicy, keep: bool) -> dict[str, Tensor]:
    """All weights in one piece, by the names of `state_dict`, in the format they compute in; nothing where not `keep`. All call it."""
    found: dict[str, Tensor] = {}
    done: dict[int, Tensor] = {}
    for name, one in policy.model.named_parameters(remove_duplicate=False):
        if id(one) not in done:
            value = whole(one, keep)
            if value is not None and one.requires_grad and policy.half is not None and "lora_" not in name:
                value = value.to(policy.half)
            done[id(one)] = value
        if keep:
            found[name] = done[id(one)]
    if keep:
        names = set(policy.model.state_dict())
        found.update((name, one.detach().cpu()) for name, one in policy.model.named_buffers() if name in names)
    return found


@torch.no_grad()
def fill(parameter: Tensor, value: Tensor | None) -> None:
    """Gives a parameter rank 0's `value` (elsewhere `None`), or each process its piece of it. All processes call it."""
    parameter.copy_(received(parameter, value))


@torch.no_grad()
def received(like: Tensor, value: Tensor | None) -> Tensor:
    """Rank 0's `value` (elsewhere `None`): whole, or in pieces as `like` is. All processes call it."""
    if value is None:
        ready = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    else:
        ready = value.detach().to(like.device, like.dtype, copy=True).contiguous()
    if isinstance(like, DTensor):
        return distribute_tensor(ready, like.device_mesh, like.placements)
    torch.distributed.broadcast(ready, 0)
    return ready


def whole(value: Any, keep: bool) -> Any:
    """A tensor in one piece, on the CPU (`keep`) or nowhere, so that only one process holds it. All call it, in the same order."""
    if not isinstance(value, Tensor):
        return value
    found: Tensor = value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()
    return found.cpu() if keep else None
