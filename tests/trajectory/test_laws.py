"""Laws 1 to 3, independence of order and idempotence, on arbitrary sessions. Nothing here uses the builders' own checks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajectory_samples import DRAWN, EVERYTHING, SESSION, options, sessions

from polar.records import Completion
from polar.trajectory import Builder, Forest, Options, PerRequest, PrefixMerging, Trajectory
from polar.trajectory.drift import FIXES

builders = st.one_of(
    options.map(PrefixMerging),
    options.map(PerRequest),
    options.map(lambda drawn: PrefixMerging(replace(drawn, max_length=None, on_break="splice"))),
)


def made(builder: Builder, completions: list[Completion]) -> Trajectory:
    return builder.build(Forest("s", completions), SESSION, DRAWN)


@given(sessions(), builders)
@settings(max_examples=400, deadline=None)
def test_law_1_ids_and_log_probabilities_are_the_engines(completions: list[Completion], builder: Builder) -> None:
    known = {one.number: one for one in completions}
    for trace in made(builder, completions).traces:
        assert (trace.ids.dtype, trace.mask.dtype, trace.logprobs.dtype) == (np.int32, np.bool_, np.float32)
        for span in trace.spans:
            one = known[span.completion]
            assert one.sampled_ids is not None
            assert trace.ids[span.start : span.end].tolist() == one.sampled_ids[: len(span)].tolist()
            if span.trained:
                assert one.logprobs is not None
                kept = trace.mask[span.start : span.end]
                assert trace.logprobs[span.start : span.end][kept].tobytes() == one.logprobs[: len(span)][kept].tobytes()
                assert np.isfinite(one.logprobs[: len(span)]).tolist() == kept.tolist()


@given(sessions(), options, st.booleans())
@settings(max_examples=400, deadline=None)
def test_law_2_every_trained_token_follows_exactly_its_prompt(completions: list[Completion], drawn: Options, single: bool) -> None:
    known = {one.number: one for one in completions}
    for trace in made(PerRequest(drawn) if single else PrefixMerging(drawn), completions).traces:
        assert trace.faithful
        for span in trace.spans:
            prompt = known[span.completion].prompt_ids
            assert prompt is not None
            assert trace.ids[: span.start].tolist() == prompt.tolist()


@given(sessions(), builders)
@settings(max_examples=400, deadline=None)
def test_law_3_every_sampled_token_is_in_one_row_or_in_the_ledger(completions: list[Completion], builder: Builder) -> None:
    sampled = Counter((one.number, place) for one in completions for place in range(0 if one.sampled_ids is None else len(one.sampled_ids)))
    trajectory = made(builder, completions)
    found: Counter[tuple[int, int]] = Counter()
    for trace in trajectory.traces:
        for span in trace.spans:
            found.update((span.completion, place) for place in range(len(span)) if trace.mask[span.start + place])
        assert trace.mask.sum() == sum(trace.mask[span.start : span.end].sum() for span in trace.spans if span.trained)
    for line in trajectory.ledger:
        found.update((line.completion, place) for place in range(line.start, line.end))
        assert line.reason
        assert line.rule
    assert found == sampled
    assert trajectory.in_rows + trajectory.ledger.tokens == trajectory.sampled == sampled.total()


@given(sessions(), builders, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_rows_do_not_depend_on_the_order_of_arrival(completions: list[Completion], builder: Builder, random: Random) -> None:
    shuffled = list(completions)
    random.shuffle(shuffled)
    assert made(builder, completions) == made(builder, shuffled)


@given(sessions(), builders)
@settings(max_examples=100, deadline=None)
def test_completions_that_come_twice_change_nothing(completions: list[Completion], builder: Builder) -> None:
    assert made(builder, completions) == made(builder, [*completions, *completions[::-1]])


@given(sessions(), builders)
@settings(max_examples=100, deadline=None)
def test_building_from_a_growing_forest_gives_what_building_at_once_gives(completions: list[Completion], builder: Builder) -> None:
    forest = Forest("s")
    for count, one in enumerate(completions, 1):
        forest.add(one)
        assert builder.build(forest, SESSION, DRAWN) == made(builder, completions[:count])


@given(sessions(), builders)
@settings(max_examples=100, deadline=None)
def test_a_trajectory_survives_its_json_form(completions: list[Completion], builder: Builder) -> None:
    trajectory = made(builder, completions)
    assert Trajectory.loads(trajectory.dumps()) == trajectory
    assert Trajectory.from_json(trajectory.to_json()) == trajectory


@given(sessions(clean=True))
@settings(max_examples=300, deadline=None)
def test_rows_are_roots_plus_named_breaks(completions: list[Completion]) -> None:
    trajectory = made(PrefixMerging(EVERYTHING), completions)
    with_tokens = [one for one in completions if one.sampled_ids is not None and len(one.sampled_ids)]
    assert len(trajectory.traces) == trajectory.builder["roots"] + trajectory.builder["breaks"]
    assert len(trajectory.drift) == trajectory.builder["breaks"]
    assert trajectory.in_rows == sum(len(one.sampled_ids) for one in with_tokens if one.sampled_ids is not None)


@given(sessions())
@settings(max_examples=300, deadline=None)
def test_law_8_every_break_has_a_cause_and_a_place(completions: list[Completion]) -> None:
    forest = Forest("s", completions)
    for line in made(PrefixMerging(), completions).drift:
        assert line.cause in FIXES
        assert line.parent is not None
        prompt, before = forest.prompt(line.completion), forest.stream(line.parent)
        assert prompt[: line.position].tolist() == before[: line.position].tolist()
        assert (line.before_id, line.after_id) == (
            int(before[line.position]) if line.position < len(before) else None,
            int(prompt[line.position]) if line.position < len(prompt) else None,
        )
        assert line.before_id is None or line.before_id != line.after_id


@given(sessions(), options)
@settings(max_examples=200, deadline=None)
def test_a_row_longer_than_allowed_is_never_made(completions: list[Completion], drawn: Options) -> None:
    for trace in made(PrefixMerging(drawn), completions).traces:
        assert drawn.max_length is None or len(trace) <= drawn.max_length


@pytest.mark.parametrize("trunk", ["longest", "first", "latest"])
@given(completions=sessions(clean=True))
@settings(max_examples=100, deadline=None)
def test_how_shared_turns_are_assigned_changes_masks_but_not_streams(trunk: str, completions: list[Completion]) -> None:
    rows = made(PrefixMerging(replace(EVERYTHING, trunk=trunk)), completions).traces  # type: ignore[arg-type]
    standard = made(PrefixMerging(EVERYTHING), completions).traces
    assert sorted(trace.ids.tolist() for trace in rows) == sorted(trace.ids.tolist() for trace in standard)
