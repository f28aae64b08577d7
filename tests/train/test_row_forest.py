"""Rows that share beginnings, laid out: every row is all there, what is common stands once, and pieces follow their parents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polar.train.attention import FlashCpu, grow, kernel_for, parts_of
from polar.train.forest import Segment, plant, rectangles
from polar.train.packing import pack_shared

rows = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def tensors(values: list[list[int]]) -> list[torch.Tensor]:
    return [torch.tensor(value) for value in values]


@given(rows, st.sampled_from([None, 1, 2, 3]))
def test_every_row_is_there_and_sees_itself_only(values: list[list[int]], grain: int | None) -> None:
    forest = plant(tensors(values), grain=grain)
    seen = torch.zeros(len(forest), len(forest), dtype=torch.bool)
    way: list[Segment] = []
    at = 0
    for segment in forest.segments:
        assert segment.start == at
        at = segment.end
        del way[segment.level :]
        way.append(segment)
        for place in range(segment.start, segment.end):
            for part in way:
                assert part.start <= segment.start < part.stop
                seen[place, part.start : min(part.end, place + 1)] = True
    assert at == len(forest)
    for value, path in zip(values, forest.paths, strict=True):
        assert forest.ids[path].tolist() == value
        assert forest.positions[path].tolist() == list(range(len(value)))
        for depth, place in enumerate(path):
            assert seen[place].nonzero()[:, 0].tolist() == path[: depth + 1].tolist()


@given(rows)
def test_with_a_grain_of_one_nothing_stands_twice(values: list[list[int]]) -> None:
    beginnings = {tuple(value[: length + 1]) for value in values for length in range(len(value))}
    assert len(plant(tensors(values), grain=1)) == len(beginnings)


@given(rows, st.integers(1, 30), st.sampled_from([1, 2, 4]))
def test_bins_hold_what_their_forest_is_long(values: list[list[int]], budget: int, grain: int) -> None:
    bins = pack_shared([np.array(value) for value in values], budget, grain=grain)
    assert sorted(number for one in bins for number in one) == list(range(len(values)))
    for one in bins:
        assert len(one) == 1 or len(plant(tensors([values[number] for number in one]), grain=grain)) <= budget


def test_a_budget_holds_more_rows_of_one_beginning() -> None:
    common = list(range(64))
    values = [np.array([*common, 100 + number]) for number in range(10)]
    assert pack_shared(values, 80) == [list(range(10))]
    with pytest.raises(ValueError, match="holds no row"):
        pack_shared(values, 0)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.floats(0, 0.6))
def test_rectangles_hold_every_row_and_little_else(lengths: list[int], waste: float) -> None:
    paths = [torch.arange(length) + 1 for length in lengths]
    found = rectangles(paths, waste)
    assert sorted(number for one in found for number in one.numbers) == list(range(len(lengths)))
    for one in found:
        filled = sum(lengths[number] for number in one.numbers)
        assert filled >= (1 - waste) * one.places.numel() - 1e-9
        for number, line in zip(one.numbers, one.places, strict=True):
            assert line[: lengths[number]].tolist() == paths[number].tolist()


@given(rows)
def test_the_fused_kernel_equals_plain_attention_over_any_forest(values: list[list[int]]) -> None:
    forest = plant(tensors(values), grain=1)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, len(forest), count, 8, dtype=torch.float64, generator=generator).transpose(1, 2).requires_grad_()
        for count in (4, 2, 2)
    )
    found = []
    for kernel in (FlashCpu(), None):
        out = grow(q, k, v, parts_of(forest.segments), forest.segments, 0.3, kernel)
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-10)


@given(rows, st.data())
def test_what_nobody_reads_need_not_be_computed(values: list[list[int]], data: st.DataObject) -> None:
    forest = plant(tensors(values), grain=1)
    wanted = torch.tensor(sorted(data.draw(st.sets(st.integers(0, len(forest) - 1), min_size=1))))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, len(forest), 8, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3))
    found = []
    for parts in (parts_of(forest.segments, wanted), parts_of(forest.segments)):
        out = grow(q, k, v, parts, forest.segments, 0.3, FlashCpu())[:, :, wanted]
        found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for ours, whole in zip(*found, strict=True):
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_kernel_is_tried_out_first(dtype: torch.dtype) -> None:
    assert isinstance(kernel_for(torch.device("cpu"), dtype, 4, 2, 16), FlashCpu)


def test_a_kernel_that_gives_other_numbers_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FlashCpu.backward

    def wrong(self, grad, q, k, v, out, lse, causal, scale):  # type: ignore[no-untyped-def]
        return tuple(1.1 * one for one in right(self, grad, q, k, v, out, lse, causal, scale))

    monkeypatch.setattr(FlashCpu, "backward", wrong)
    assert kernel_for(torch.device("cpu"), torch.float32, 4, 2, 16) is None
