"""Rows laid end to end in one sequence, in which a beginning that several rows have in common stands once. Knows no model.

The rows of a batch share much: system prompt and tools, a group's task, and with one row for each request all that went before. As a
forest (a prefix tree, or several), each shared piece is computed once and every row goes on from it (Tree Training, arXiv:2511.00413). The
hidden state of an id depends only on what stands before it, so the forest gives each row exactly what it would get alone, and gradients of
all rows through a shared piece add up by themselves. Shared ids may be trained: a row picks its hidden states by its path.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GRAIN = 32
"""Rows share whole multiples of so many ids: a shorter piece costs more in calls than it saves."""
WASTE = 0.25
"""The largest share of filling in a rectangle of rows."""


class Segment(NamedTuple):
    """Ids `[start, end)` of the sequence, which follow each other; what grows from them stands at `[end, stop)`, directly behind.
    `level`: how many segments stand before it on the way from its root."""

    start: int
    end: int
    stop: int
    level: int


@dataclass(frozen=True, slots=True, eq=False)
class Forest:
    """`ids`, `positions`: int64[n], the sequence and each id's position in its row. `paths[i]`: int64[length of row i], where row i's ids
    stand in the sequence. `segments` cover the sequence without gap or overlap, a parent before its children."""

    ids: Tensor
    positions: Tensor
    paths: tuple[Tensor, ...]
    segments: tuple[Segment, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def to(self, device: torch.device) -> Forest:
        return Forest(self.ids.to(device), self.positions.to(device), tuple(path.to(device) for path in self.paths), self.segments)


def plant(rows: Sequence[Tensor], *, grain: int | None = GRAIN) -> Forest:
    """`rows`: int64[n] each. `grain` of `None` shares nothing: rows end to end in their order, which is what packing is."""
    ids = [row.numpy() for row in rows]
    order = list(range(len(ids))) if grain is None else in_order(ids)
    shared = [0, *(0 if grain is None else common(ids[a], ids[b]) // grain * grain for a, b in itertools.pairwise(order))]
    offsets = [0]
    paths: dict[int, NDArray[np.int64]] = {}
    before = np.zeros(0, np.int64)
    for number, kept in zip(order, shared, strict=False):
        fresh = len(ids[number]) - kept
        before = np.concatenate([before[:kept], np.arange(offsets[-1], offsets[-1] + fresh)])
        paths[number] = before
        offsets.append(offsets[-1] + fresh)
    new = [(ids[number][kept:], kept) for number, kept in zip(order, shared, strict=False)]
    return Forest(
        ids=_tensor([part for part, _ in new]),
        positions=_tensor([np.arange(kept, kept + len(part)) for part, kept in new]),
        paths=tuple(torch.from_numpy(paths[number]) for number in range(len(ids))),
        segments=_segments([len(ids[number]) for number in order], shared, offsets),
    )


def _segments(lengths: Sequence[int], shared: Sequence[int], offsets: Sequence[int]) -> tuple[Segment, ...]:
    """Of rows in order: row i has `shared[i]` ids in common with the one before it, and its others stand from `offsets[i]` on."""
    found: list[Segment] = []
    todo = [(0, len(lengths), 0, 0)] if lengths else []
    while todo:
        first, last, depth, level = todo.pop()
        end = min(shared[first + 1 : last], default=lengths[first])
        if end > depth:
            start = offsets[first] + depth - shared[first]
            found.append(Segment(start, start + end - depth, offsets[last], level))
            level += 1
        if last - first > 1:
            bounds = [first, *(row for row in range(first + 1, last) if shared[row] == end), last]
            todo.extend((a, b, end, level) for a, b in reversed(list(itertools.pairwise(bounds))))
    return tuple(found)


def in_order(rows: Sequence[NDArray[np.int64]]) -> list[int]:
    """Row numbers in lexicographic order of their ids: of all rows before it, a row has most in common with its predecessor."""
    keys = [row.astype(">i8").tobytes() for row in rows]
    return sorted(range(len(rows)), key=lambda number: (keys[number], number))


def common(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """How many leading ids two rows have in common."""
    length = min(len(first), len(second))
    different = first[:length] != second[:length]
    return int(different.argmax()) if different.any() else length


@dataclass(frozen=True, slots=True, eq=False)
class Rectangle:
    """`numbers`: of rows of about equal length. `places`: int64[rows, longest], where each row's ids stand; behind a short row's end, 0."""

    numbers: tuple[int, ...]
    places: Tensor


def rectangles(paths: Sequence[Tensor], waste: float = WASTE) -> list[Rectangle]:
    """Rows by length in rectangles of which at most `waste` is filling. Whatever is causal may read them without a mask: what stands behind
    a row's end reaches nothing of the row."""
    order = sorted(range(len(paths)), key=lambda number: (-len(paths[number]), number))
    groups: list[list[int]] = []
    used = 0
    for number in order:
        longest = len(paths[groups[-1][0]]) if groups else 0
        if groups and used + len(paths[number]) >= (1 - waste) * longest * (len(groups[-1]) + 1):
            groups[-1].append(number)
            used += len(paths[number])
        else:
            groups.append([number])
            used = len(paths[number])
    return [Rectangle(tuple(group), torch.nn.utils.rnn.pad_sequence([paths[number] for number in group], True)) for group in groups]


def _tensor(parts: Sequence[NDArray[np.int64]]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, np.int64))
