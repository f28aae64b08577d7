"""The forest: parents by definition, one copy of every id, and what an addition may not be."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_samples import call, ids, sessions

from polar.records import Completion
from polar.trajectory import Forest


@given(sessions(), st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_the_parent_is_the_longest_stream_that_the_prompt_starts_with(completions: list[Completion], random: Random) -> None:
    random.shuffle(completions)
    forest = Forest("s", completions)
    streams = {number: forest.stream(number).tolist() for number in forest.nodes}
    for number, node in forest.nodes.items():
        prompt = streams[number][: node.start]
        fitting = [other for other, stream in streams.items() if other != number and prompt[: len(stream)] == stream]
        parent = forest.parent(number)
        if not fitting:
            assert parent is None
        else:
            assert parent is not None
            assert streams[parent] == max((streams[other] for other in fitting), key=len)


@given(sessions(), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_streams_come_back_as_they_were_given(completions: list[Completion], random: Random) -> None:
    random.shuffle(completions)
    forest = Forest("s", completions)
    for one in completions:
        if one.number in forest.nodes:
            stream = one.ids
            assert stream is not None
            assert one.prompt_ids is not None
            assert forest.stream(one.number).tolist() == stream.tolist()
            assert forest.prompt(one.number).tolist() == one.prompt_ids.tolist()
            for start in range(len(stream)):
                assert forest.piece(one.number, start, start + 3).tolist() == stream[start : start + 3].tolist()


@given(sessions())
@settings(max_examples=200, deadline=None)
def test_common_starts_and_extension_are_those_of_the_ids(completions: list[Completion]) -> None:
    forest = Forest("s", completions)
    for one in forest.nodes:
        for other in forest.nodes:
            a, b = forest.stream(one).tolist(), forest.stream(other).tolist()
            shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            assert forest.common(one, other) == shared
            assert forest.extends(one, other) == (a[: forest.nodes[one].start][: len(b)] == b)


@given(sessions())
@settings(max_examples=200, deadline=None)
def test_ids_that_streams_share_are_held_once(completions: list[Completion]) -> None:
    forest = Forest("s", completions)
    starts = {tuple(forest.stream(number)[:end].tolist()) for number, node in forest.nodes.items() for end in range(1, node.end + 1)}
    assert forest.held() == len(starts)


def test_a_conversation_of_many_turns_holds_what_its_last_stream_holds() -> None:
    forest = Forest("s")
    stream = list(range(50))
    for number in range(200):
        sampled = [1000 + number, number]
        forest.add(call(number, stream, sampled, parent=number - 1 if number else None))
        stream = [*stream, *sampled, 7]
    assert forest.held() == len(stream) - 1
    lines = {id(node.line) for node in forest.nodes.values()}
    assert len(lines) == 1  # one prompt is kept alive, not two hundred


def test_the_stored_parent_is_verified_and_not_believed() -> None:
    forest = Forest("s", [call(0, [1, 2], [3]), call(1, [1, 2, 4, 5], [6], parent=0)])
    assert forest.parent(1) is None


def test_a_branch_does_not_pass_for_the_conversation_that_it_left() -> None:
    forest = Forest("s", [call(0, [1], [2]), call(1, [1, 2, 3], [4], parent=0), call(2, [1, 2, 7], [8], parent=0)])
    forest.add(call(3, [1, 2, 7, 8, 9], [5], parent=1))  # the store says 1; the ids say 2
    assert forest.parent(3) == 2
    assert forest.stream(3).tolist() == [1, 2, 7, 8, 9, 5]


def test_a_wrong_stored_parent_does_not_hide_the_right_one() -> None:
    forest = Forest("s", [call(0, [1], [2]), call(1, [1, 2, 3], [4]), call(2, [1, 2, 3, 4, 5], [6], parent=0)])
    assert forest.parent(2) == 1


def test_among_equal_streams_the_stored_parent_then_the_delivered_then_the_latest_is_chosen() -> None:
    twins = [call(0, [1], [2], delivered=False), call(1, [1], [2], delivered=True), call(2, [1], [2], delivered=False)]
    assert Forest("s", [*twins, call(3, [1, 2, 3], [4], parent=0)]).parent(3) == 0
    assert Forest("s", [*twins, call(3, [1, 2, 3], [4])]).parent(3) == 1
    assert Forest("s", [twins[0], twins[2], call(3, [1, 2, 3], [4])]).parent(3) == 2


def test_a_parent_may_arrive_after_its_children() -> None:
    forest = Forest("s", [call(2, [1, 2, 3], [4]), call(0, [1], [2])])
    assert forest.parent(2) == 0


@pytest.mark.parametrize(
    "other",
    [
        call(0, [1, 2], [4]),
        call(0, [1, 9], [3]),
        call(0, [1, 2], [3], [-0.25]),
        call(0, None, [3]),
        replace(call(0, [1, 2], [3]), status="aborted"),
    ],
)
def test_two_different_completions_of_one_number_are_refused(other: Completion) -> None:
    forest = Forest("s", [call(0, [1, 2], [3])])
    with pytest.raises(ValueError, match="two different completions 0"):
        forest.add(other)


def test_a_late_delivery_is_taken_over() -> None:
    forest = Forest("s", [call(0, [1], [2], delivered=False)])
    forest.add(call(0, [1], [2], delivered=True))
    assert forest.nodes[0].record.delivered


def test_another_sessions_completion_is_refused() -> None:
    with pytest.raises(ValueError, match="belongs to session 'other'"):
        Forest("s").add(call(0, [1], [2], session="other"))


def test_ids_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        Forest("s").add(replace(call(0, [1], [2]), prompt_ids=np.array([1], np.int64)))  # type: ignore[arg-type]


def test_the_callers_completion_is_not_touched() -> None:
    one = call(0, [1, 2], [3])
    Forest("s", [one])
    assert one.prompt_ids is not None
    assert one.prompt_ids.tolist() == [1, 2]


def test_what_cannot_stand_in_a_row_is_kept_beside_the_tree() -> None:
    forest = Forest("s", [call(0, None, [1]), call(1, [], [1, 2]), call(2, [1], []), call(3, [1], None)])
    assert (set(forest.nodes), set(forest.unplaced), set(forest.empty)) == (set(), {0, 1}, {2, 3})
    assert forest.sampled() == {0: 1, 1: 2}
    assert len(forest) == 4


def test_an_empty_prefix_is_found_in_ids_with_nothing_in_common() -> None:
    forest = Forest("s", [call(0, [1], [2]), call(1, [3], [4])])
    assert forest.common(0, 1) == 0
    assert forest.piece(0, 5, 9).tolist() == ids().tolist()
