"""Which rows go through the model together: micro-batches by a budget of tokens. Pure, and the same for the same lengths."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polar.train.forest import GRAIN, common, in_order


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Bins of row numbers, none over `budget` tokens unless it holds a single row that is; every row is in exactly one bin.

    Longest first, each into the fullest bin that still takes it (best fit decreasing: at most 11/9 of the fewest bins, plus one). Raises
    `ValueError` for a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} tokens holds no row")
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (what is left, bin), smallest first
    for row in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        place = next((index for index, (left, _) in enumerate(room) if left >= lengths[row]), None)
        if place is None:
            bins.append([row])
            left, number = budget - lengths[row], len(bins) - 1
        else:
            left, number = room.pop(place)
            bins[number].append(row)
            left -= lengths[row]
        if left > 0:
            insort(room, (left, number))
    return [sorted(rows) for rows in bins]


def pack_shared(rows: Sequence[NDArray[np.int64]], budget: int, *, grain: int = GRAIN) -> list[list[int]]:
    """Bins of row numbers as of `pack`, where a beginning that rows of a bin have in common counts once (`polar.train.forest`).

    In the order of the ids, so that what is alike comes together; a bin is closed when the next row no longer fits. Raises `ValueError` for
    a budget below 1.
    """
    if budget < 1:
        raise ValueError(f"a budget of {budget} tokens holds no row")
    bins: list[list[int]] = []
    used = 0
    for number in in_order(rows):
        fresh = len(rows[number]) - (common(rows[bins[-1][-1]], rows[number]) // grain * grain if bins else 0)
        if bins and used + fresh <= budget:
            bins[-1].append(number)
            used += fresh
        else:
            bins.append([number])
            used = len(rows[number])
    return [sorted(numbers) for numbers in bins]


def balance(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Row numbers for each of `parts` workers, of about equal tokens: longest first, each to the one with the least. Some may be empty."""
    if parts < 1:
        raise ValueError("there must be at least one worker")
    loads = [(0, part) for part in range(parts)]
    shares: list[list[int]] = [[] for _ in range(parts)]
    for row in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        load, part = heapq.heappop(loads)
        shares[part].append(row)
        heapq.heappush(loads, (load + lengths[row], part))
    return [sorted(share) for share in shares]
