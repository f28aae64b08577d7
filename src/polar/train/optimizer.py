"""AdamW whose steps are in float32 at least, whatever the model computes in.

bfloat16 keeps 8 bits of a weight: at a rate of 1e-6 nearly every update is less than half of the last of them and would be rounded away. A
model that is held in bfloat16 is therefore trained through float32 masters (Micikevicius et al. 2018, "Mixed precision training",
arXiv:1710.03740, section 3.1): the optimiser steps these, and the model's weights are their rounding, which is also what the engine gets.
Gradients of micro-batches are added up in float32. It costs 18 bytes a weight (2 model, 4 master, 4 gradient, 8 moments) where a float32
model costs 16, and computes at the speed of bfloat16, in the numbers that the engine computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

SETTINGS = ("betas", "eps", "weight_decay")
HALVES = (torch.bfloat16, torch.float16)


def adamw(groups: list[dict[str, Any]], **how: Any) -> torch.optim.AdamW:
    """Of the parameters in `groups`: `WideAdamW` where all of them are float32 or better, else `MasterAdamW`."""
    halves = any(one.dtype in HALVES for group in groups for one in group["params"])
    return MasterAdamW(groups, **how) if halves else WideAdamW(groups, **how)


def stepped(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors that it steps, in its order: where the batch's gradient is, to be clipped."""
    return [one for group in optimizer.param_groups for one in group["params"]]


@contextmanager
def _own_settings(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A state that is loaded brings moments and the present rate, not the settings of the run that saved it: whoever goes on with another
    weight decay gets it."""
    before = [{name: group[name] for name in SETTINGS} for group in optimizer.param_groups]
    yield
    for group, own in zip(optimizer.param_groups, before, strict=True):
        group.update(own)


class WideAdamW(torch.optim.AdamW):
    """PyTorch's own, which also sees that a state is of its kind."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps its own settings. Raises `ValueError` for a state with masters: the weights beside it are rounded ones."""
        if state_dict.get("masters"):
            raise ValueError("it was saved by a run in bfloat16; this one is in float32")
        with _own_settings(self):
            super().load_state_dict(state_dict)


class MasterAdamW(torch.optim.AdamW):
    """Steps float32 copies of the given parameters and rounds them into the parameters. A gradient that a backward pass leaves at a
    parameter goes to its master at once, and is freed. `state_dict` holds the masters, so that what resumes from it goes on bit for bit."""

    def __init__(self, groups: list[dict[str, Any]], **how: Any) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Model's parameter, master."""
        super().__init__([{**group, "params": [self._master(one) for one in group["params"]]} for group in groups], **how)

    def _master(self, parameter: Tensor) -> Tensor:
        if parameter.dtype not in HALVES:
            return parameter
        master = parameter.detach().to(torch.float32, copy=True).requires_grad_()
        self.pairs.append((parameter, master))

        def take(given: Tensor) -> None:
            if given.grad is None:
                return
            if master.grad is None:
                master.grad = given.grad.to(master.dtype)
            else:
                master.grad += given.grad
            given.grad = None

        parameter.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        return master

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        result = super().step(closure)
        self._round()
        return result

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "masters": [master.detach() for _, master in self.pairs]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps its own settings. Raises `ValueError` for a state without these masters."""
        masters: Iterable[Tensor] | None = state_dict.get("masters")
        if masters is None:
            raise ValueError("it was saved by a run in float32; this one is in bfloat16")
        with _own_settings(self):
            super().load_state_dict({key: value for key, value in state_dict.items() if key != "masters"})
        with torch.no_grad():
            for (_, master), saved in zip(self.pairs, masters, strict=True):
                master.copy_(saved)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for parameter, master in self.pairs:
            parameter.copy_(master)
