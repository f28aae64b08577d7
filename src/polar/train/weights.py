"""What a token weighs in the batch's loss. Pure numpy; the weights of a whole batch are known before its first forward pass.

A batch's loss is the sum over trained tokens of weight times term, so it does not depend on how rows are packed or split.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polar.records import Floats
from polar.trajectory.row import Mask, Trace

Aggregation = Literal["token_mean", "sequence_mean", "fixed_length"]
"""* `token_mean`: every trained token weighs the same (DAPO, arXiv:2503.14476, eq. 8).
* `sequence_mean`: every rollout weighs the same, its tokens share that (GRPO, arXiv:2402.03300, eq. 3). A rollout's rows share it together.
* `fixed_length`: the sum over tokens, divided by rollouts times a constant (Dr. GRPO, arXiv:2503.20783, section 3.1): no bias by length."""


@dataclass(frozen=True, slots=True)
class Weights:
    """`rows[i]`: float32[len(trace i)], 0 where nothing is trained. `stepped`: the number of tokens with a weight; `stale`: tokens that
    too old a policy sampled. Law 3 for the trainer: `stepped + stale + other = sum of masks`."""

    rows: tuple[Floats, ...]
    masks: tuple[Mask, ...]
    stepped: int
    stale: int
    other: int
    """Trained tokens of rows whose rollout has no advantage."""


def version_number(version: str | None) -> int | None:
    """A policy version as the trainer counts them; `None` for what is none (an engine's own name for its weights)."""
    try:
        return None if version is None else int(version)
    except (TypeError, ValueError):
        return None


def weights(
    traces: Sequence[Trace],
    trained: Sequence[bool],
    *,
    aggregation: Aggregation = "token_mean",
    fixed_length: int | None = None,
    policy_version: int | None = None,
    max_staleness: int | None = None,
) -> Weights:
    """`trained[i]`: whether row i's rollout has an advantage. With `policy_version` and `max_staleness`, spans sampled by a version older
    than `policy_version - max_staleness` are not trained, and neither is one whose version is unknown; the rest of the row is.

    Raises `ValueError` for `fixed_length` without a length, and for a bound without a version.
    """
    if aggregation == "fixed_length" and not fixed_length:
        raise ValueError("the aggregation fixed_length needs its length: the longest answer that a rollout may sample, in tokens")
    if max_staleness is not None and policy_version is None:
        raise ValueError("a bound on staleness needs the present policy version")
    masks: list[Mask] = []
    stale = other = 0
    for trace, wanted in zip(traces, trained, strict=True):
        mask = trace.mask.copy()
        if not wanted:
            other += int(np.count_nonzero(mask))
            mask[:] = False
        elif max_staleness is not None and policy_version is not None:
            for span in trace.spans:
                if _too_old(span.policy_version, policy_version - max_staleness):
                    stale += int(np.count_nonzero(mask[span.start : span.end]))
                    mask[span.start : span.end] = False
        masks.append(mask)
    counts: dict[str, int] = defaultdict(int)
    for trace, mask in zip(traces, masks, strict=True):
        counts[trace.rollout_id] += int(np.count_nonzero(mask))
    total = sum(counts.values())
    rollouts = sum(count > 0 for count in counts.values())
    rows = []
    for trace, mask in zip(traces, masks, strict=True):
        match aggregation:
            case "token_mean":
                share = total
            case "sequence_mean":
                share = rollouts * counts[trace.rollout_id]
            case "fixed_length":
                share = rollouts * int(fixed_length or 0)
        rows.append(_weighted(mask, share))
    return Weights(tuple(rows), tuple(masks), total, stale, other)


def _weighted(mask: Mask, share: int) -> NDArray[np.float32]:
    return np.where(mask, np.float32(1.0 / share if share else 0.0), np.float32(0.0)).astype(np.float32)


def _too_old(version: str | None, oldest: int) -> bool:
    number = version_number(version)
    return number is None or number < oldest
