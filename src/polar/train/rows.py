"""What the trainer needs of a training row, as tensors. Knows no model.

A row's position `i` predicts its id `i + 1`, so the log-probability of a trained id at `i` comes from the hidden state at `i - 1`; an id at
position 0 has none before it and cannot be trained, which no row of a real session ever asks for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polar.trajectory.row import Trace


@dataclass(frozen=True, slots=True)
class Row:
    """`ids`: int64[n]. `places`: int64[k], where the k trained ids stand, ascending. `recorded`: float32[k], what the engine said of them.
    `weights`: float32[k]. `advantage`: of the rollout. `name`: for reports."""

    ids: Tensor
    places: Tensor
    recorded: Tensor
    weights: Tensor
    advantage: float
    name: str = ""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> Tensor:
        return self.ids[self.places]


def row_of(trace: Trace, *, mask: np.ndarray | None = None, weights: np.ndarray | None = None, advantage: float = 0.0) -> Row:
    """`mask` and `weights` are over the whole row (`polar.train.weights`); by default the trace's own mask and weights of 1.

    Raises `ValueError` if the id at position 0 is to be trained.
    """
    chosen = trace.mask if mask is None else mask
    if len(chosen) and chosen[0]:
        raise ValueError(f"row of session {trace.session!r}: nothing stands before its first id, which therefore cannot be trained")
    places = np.flatnonzero(chosen)
    shares = np.ones(len(places), np.float32) if weights is None else weights[places]
    return Row(
        ids=torch.from_numpy(trace.ids.astype(np.int64)),
        places=torch.from_numpy(places),
        recorded=torch.from_numpy(trace.logprobs[places].copy()),
        weights=torch.from_numpy(np.ascontiguousarray(shares, np.float32)),
        advantage=advantage,
        name=trace.session,
    )
