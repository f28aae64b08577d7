"""A step of training: rows in micro-batches through the policy, the loss, the optimiser. Knows no engine, no rollout and no file.

The order of rows, the packing and every sum are functions of the batch alone, so that the same batch on the same state gives the same
weights to the last bit: that is what resuming is tested against.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from polar.train.loading import save_model
from polar.train.loss import Loss, Objective, Terms
from polar.train.optimizer import adamw, stepped
from polar.train.policy import Policy, Way
from polar.train.rows import Row

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class Optimisation:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and how its rate goes."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices; norms and other vectors are not decayed."""
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    """Where `linear` and `cosine` reach 0."""
    max_grad_norm: float = 1.0
    token_budget: int = 32_768
    """Tokens of a micro-batch, a beginning that its rows have in common counted once; a longer row goes alone."""
    minibatches: int = 1
    """Optimiser steps a batch. Beyond one, the policy at the batch's start is the proximal one of the clip, and each step's gradient stands
    for that of the whole batch: what it is clipped at does not depend on how many there are."""

    def __post_init__(self) -> None:
        if self.schedule != "constant" and not self.total_steps:
            raise ValueError(f"the schedule {self.schedule} needs total_steps")
        if self.minibatches < 1 or self.token_budget < 1:
            raise ValueError("minibatches and token_budget are 1 or more")

    def factor(self, step: int) -> float:
        """What the rate is multiplied with at optimiser step `step`, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant" or not self.total_steps:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        return 1.0 - done if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))


@dataclass(frozen=True, slots=True)
class StepReport:
    """Means over the trained tokens of a batch; `tokens` of them."""

    loss: float
    tokens: int
    grad_norm: float
    """Before clipping; the mean over the batch's optimiser steps."""
    clipped: float
    """The share of tokens whose gradient the clip took away."""
    ratio: float
    kl: float
    mismatch: float
    """k3 between trainer and engine."""
    capped: float
    lr: float
    micro_batches: int
    skipped: bool = False
    """A gradient that was not finite: the weights were left as they were."""


class Learner:
    """The optimiser of a policy's trainable weights. `reference`: the policy that a KL term is against."""

    def __init__(self, policy: Policy, how: Optimisation, loss: Objective | None = None, reference: Policy | None = None) -> None:
        self.policy = policy
        self.how = how
        self.loss: Objective = loss or Loss()
        self.reference = reference
        if self.loss.beta and reference is None:
            raise ValueError("a KL term (beta) needs a reference policy")
        self.parameters = [one for one in policy.model.parameters() if one.requires_grad]
        decayed = [one for one in self.parameters if one.ndim >= 2]
        rest = [one for one in self.parameters if one.ndim < 2]
        self.optimizer = adamw(
            [{"params": decayed, "weight_decay": how.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            lr=how.lr,
            betas=how.betas,
            eps=how.epsilon,
        )
        self.parameters = stepped(self.optimizer)
        self.steps = 0
        """Optimiser steps taken."""

    @property
    def whole(self) -> bool:
        """Whether it can be asked for anything; of several processes, one may have failed."""
        return True

    def step(self, rows: Sequence[Row], way: Way | None = None) -> StepReport:
        """One batch. Rows without trained ids are left out. Raises `ValueError` for a batch with nothing to train."""
        rows = [row for row in rows if len(row.places)]
        if not rows:
            raise ValueError("nothing to train: no row of the batch has a token with a weight")
        self.policy.model.train()
        old = self._logprobs_of(self.policy, rows, way) if self.how.minibatches > 1 else None
        reference = self._logprobs_of(self.reference, rows, way) if self.reference is not None else None
        totals = torch.zeros(7, dtype=torch.float64)
        norms: list[float] = []
        micro_batches = 0
        skipped = False
        shares = list(_shares(len(rows), self.how.minibatches))
        for numbers in shares:
            self.optimizer.zero_grad(set_to_none=True)
            for part in self._micro_batches(rows, numbers):
                terms = self._terms(rows, part, old, reference, way)
                (terms.loss * len(shares)).backward()  # type: ignore[no-untyped-call]
                totals += _sums(terms)
                micro_batches += 1
            norm = self._clip()
            norms.append(norm)
            if math.isfinite(norm):
                self._advance()
            else:
                skipped = True
        self.optimizer.zero_grad(set_to_none=True)
        loss, tokens, clipped, ratio, kl, mismatch, capped = self._everywhere(totals).tolist()
        return StepReport(
            loss=loss,
            tokens=int(tokens),
            grad_norm=sum(norms) / len(norms),
            clipped=clipped / tokens,
            ratio=ratio / tokens,
            kl=kl / tokens,
            mismatch=mismatch / tokens,
            capped=capped / tokens,
            lr=self.optimizer.param_groups[0]["lr"],
            micro_batches=micro_batches,
            skipped=skipped,
        )

    def logprobs(self, rows: Sequence[Row], way: Way | None = None) -> list[Tensor]:
        """As the policy is now, without gradients: for the gate."""
        return self._logprobs_of(self.policy, rows, way)

    def save_model(self, folder: Path) -> None:
        """What `load_policy` takes: the whole model, or the adapter alone."""
        save_model(self.policy.model, folder)

    def optimizer_state(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Raises `ValueError` for the state of another model or optimiser."""
        self.optimizer.load_state_dict(state)

    def _micro_batches(self, rows: Sequence[Row], numbers: list[int]) -> list[list[int]]:
        """Row numbers of each forward and backward pass. With several processes, this one's share (`polar.train.parallel`)."""
        bins = self.policy.pack([rows[number] for number in numbers], self.how.token_budget)
        return [[numbers[place] for place in chosen] for chosen in bins]

    def _clip(self) -> float:
        """Clips the whole batch's gradient and returns its norm before that."""
        return float(torch.nn.utils.clip_grad_norm_(self.parameters, self.how.max_grad_norm))

    def _everywhere(self, totals: Tensor) -> Tensor:
        """Sums over all processes."""
        return totals

    def _advance(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.how.lr * self.how.factor(self.steps)
        self.optimizer.step()
        self.steps += 1

    def _terms(
        self, rows: Sequence[Row], part: list[int], old: list[Tensor] | None, reference: list[Tensor] | None, way: Way | None
    ) -> Terms:
        chosen = [rows[number] for number in part]
        new = torch.cat(self.policy.logprobs(chosen, way))
        device, dtype = new.device, new.dtype

        def joined(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(parts)).to(device, dtype)

        return self.loss.terms(
            new,
            joined([torch.full((len(row.places),), row.advantage) for row in chosen]),
            joined([row.weights for row in chosen]),
            joined([row.recorded for row in chosen]),
            old=None if old is None else joined([old[number] for number in part]),
            reference=None if reference is None else joined([reference[number] for number in part]),
        )

    def _logprobs_of(self, policy: Policy, rows: Sequence[Row], way: Way | None) -> list[Tensor]:
        """Without dropout, if there is any."""
        found: list[Tensor | None] = [None] * len(rows)
        with policy.quietly():
            for part in policy.pack(rows, self.how.token_budget, way):
                for number, values in zip(part, policy.logprobs([rows[number] for number in part], way), strict=True):
                    found[number] = values.detach()
        return [values for values in found if values is not None]


def _shares(count: int, parts: int) -> Iterator[list[int]]:
    """Row numbers in `parts` shares of about equal size, none empty."""
    parts = min(parts, count)
    for part in range(parts):
        yield list(range(part, count, parts))


def _sums(terms: Terms) -> Tensor:
    parts = (terms.loss, terms.tokens, terms.clipped, terms.ratio, terms.kl, terms.mismatch, terms.capped)
    return torch.stack([part.detach().double().cpu() for part in parts])
