"""GRPO's loss, term by term, over any number of tokens. Knows no model: log-probabilities in, a scalar out.

For each trained token with advantage A, log-probability `new` under the policy that is trained, `old` under the policy at the start of the
step (the proximal one), and `recorded`, what the engine said when it sampled the token:

    ratio = exp(new - old)
    surrogate = min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)        PPO, Schulman et al. 2017, arXiv:1707.06347, eq. 7;
                                                                          high > low: DAPO, Yu et al. 2025, arXiv:2503.14476, eq. 10
    correction = min(exp(old - recorded), cap)                            truncated importance sampling: Yao et al. 2025, "Your efficient RL
                                                                          framework secretly brings you off-policy RL training"
    kl = exp(reference - new) - (reference - new) - 1                     k3, Schulman 2020, "Approximating KL divergence"
                                                                          (times ratio if `unbiased_kl`: DeepSeek-V3.2, arXiv:2512.02556)
    loss = sum over tokens of weight * (-correction * surrogate + beta * kl)

`weight` carries the aggregation (`polar.train.weights`), so a batch's loss is the sum of its micro-batches' losses.

A log-ratio beyond `FAR` is taken for `FAR`: one token of a policy that ran away must not make the whole batch's gradient infinite.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

FAR = 20.0
"""Nats. No clip reaches so far, and beyond 88 the exponential is infinite in float32: its gradient is then NaN even where a clip takes it
away."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The settings. `clip_low` and `clip_high` are distances from a ratio of 1. `tis_cap` of `None` leaves the correction out; `beta` of 0
    leaves the KL term out; with `unbiased_kl` the expectation of its gradient is that of the reverse KL divergence. `dual_clip`: for
    negative advantages, the surrogate is no less than `dual_clip * A` (Ye et al. 2020, arXiv:1912.09729, eq. 5)."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    tis_cap: float | None = 2.0
    beta: float = 0.0
    dual_clip: float | None = None
    unbiased_kl: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low < 1 or self.clip_high < 0:
            raise ValueError("clip_low must be in [0, 1) and clip_high 0 or more")
        if self.tis_cap is not None and self.tis_cap <= 0:
            raise ValueError("tis_cap must be over 0")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError("dual_clip must be over 1")

    def terms(
        self,
        new: Tensor,
        advantages: Tensor,
        weights: Tensor,
        recorded: Tensor,
        *,
        old: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> Terms:
        """`grpo_loss` with these settings."""
        return grpo_loss(new, advantages, weights, recorded, old=old, reference=reference, how=self)


class Objective(Protocol):
    """What a learner makes smaller. `beta`: beyond 0, `terms` needs a reference's log-probabilities."""

    @property
    def beta(self) -> float: ...

    def terms(
        self,
        new: Tensor,
        advantages: Tensor,
        weights: Tensor,
        recorded: Tensor,
        *,
        old: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> Terms:
        """Of float[n], one entry a token, as of `grpo_loss`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """`loss`: a scalar with a gradient to `new`. The rest are sums over tokens, detached, to be added up over micro-batches."""

    loss: Tensor
    tokens: Tensor
    clipped: Tensor
    """Tokens whose gradient the clip took away."""
    ratio: Tensor
    kl: Tensor
    """k3 against the reference; 0 without one."""
    mismatch: Tensor
    """k3 between the trainer (`old`) and the engine (`recorded`): the number to watch."""
    capped: Tensor
    """Tokens whose correction was cut at the cap."""


def grpo_loss(
    new: Tensor,
    advantages: Tensor,
    weights: Tensor,
    recorded: Tensor,
    *,
    old: Tensor | None = None,
    reference: Tensor | None = None,
    how: Loss | None = None,
) -> Terms:
    """All arguments: float[n], one entry a token; those with a weight of 0 are ignored, whatever they hold.

    `old` of `None` means one step a batch: the proximal policy is the present one, and the ratio is 1 with a gradient. Raises `ValueError`
    where `beta` is set and there is no reference.
    """
    how = how or Loss()
    if how.beta and reference is None:
        raise ValueError("a KL term (beta) needs the reference's log-probabilities")
    live = weights != 0
    new, advantages, weights, recorded = new[live], advantages[live], weights[live], recorded[live]
    proximal = new.detach() if old is None else old[live]
    ratio = torch.exp(torch.clamp(new - proximal, -FAR, FAR))
    clipped_ratio = torch.clamp(ratio, 1 - how.clip_low, 1 + how.clip_high)
    plain, clipped = ratio * advantages, clipped_ratio * advantages
    surrogate = torch.minimum(plain, clipped)
    cut = clipped < plain
    if how.dual_clip is not None:
        floor = how.dual_clip * advantages
        cut = cut | ((advantages < 0) & (floor > surrogate))
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, floor), surrogate)
    gap = proximal - recorded
    capped = torch.zeros_like(cut)
    if how.tis_cap is not None:
        correction = torch.exp(gap).detach()
        capped = correction > how.tis_cap
        surrogate = surrogate * torch.clamp(correction, max=how.tis_cap)
    term = -surrogate
    kl = torch.zeros_like(new)
    if reference is not None:
        distance = reference[live] - new
        distance = distance - torch.clamp(distance.detach() - FAR, min=0)  # its gradient stays: it leads back
        kl = torch.exp(distance) - distance - 1
        term = term + how.beta * (kl * ratio if how.unbiased_kl else kl)
    with torch.no_grad():
        mismatch = torch.exp(torch.clamp(-gap, max=FAR)) + gap - 1
        sums = [part.sum() for part in (live, cut, ratio, kl, mismatch, capped)]
    return Terms((weights * term).sum(), *sums)
