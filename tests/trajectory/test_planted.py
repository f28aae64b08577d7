"""A planted violation of each law is caught by the builders' own check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from trajectory_samples import MAIN, SESSION, call, ids

from polar.records import Completion
from polar.trajectory import (
    Builder,
    ConservationError,
    FaithfulnessError,
    Forest,
    LawBroken,
    Line,
    PrefixMerging,
    Rows,
    Trace,
)
from polar.trajectory.assemble import Job, Piece

TALK = (call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6, 7], parent=0), call(2, [1, 2, 3, 4, 5, 6, 7, 8], [9], parent=1))


class Planted(Builder):
    """`prefix_merging`, then something that a wrong builder would do."""

    name = "planted"

    def __init__(self, damage: Callable[[Rows], None]) -> None:
        super().__init__()
        self.damage = damage

    def rows(self, job: Job) -> Rows:
        rows = PrefixMerging().rows(job)
        self.damage(rows)
        return rows


def run(damage: Callable[[Rows], None], completions: tuple[Completion, ...] = TALK) -> None:
    Planted(damage).build(Forest("s", completions), SESSION, MAIN)


def changed(rows: Rows, **fields: object) -> None:
    rows.traces[0] = replace(rows.traces[0], **fields)  # type: ignore[arg-type]


def test_nothing_planted_nothing_found() -> None:
    run(lambda rows: None)


# --- law 1 ---------------------------------------------------------------------------------------------------------------


def test_law_1_a_sampled_id_that_is_not_the_engines() -> None:
    def retokenised(rows: Rows) -> None:
        other = rows.traces[0].ids.copy()
        other[6] = 99
        changed(rows, ids=other)

    with pytest.raises(FaithfulnessError, match="not what completion 1 sampled"):
        run(retokenised)


def test_law_1_a_log_probability_that_is_not_the_engines() -> None:
    def rounded(rows: Rows) -> None:
        other = rows.traces[0].logprobs.copy()
        other[5] = np.nextafter(other[5], np.float32(0), dtype=np.float32)
        changed(rows, logprobs=other)

    with pytest.raises(FaithfulnessError, match="log-probabilities of completion 1"):
        run(rounded)


def test_law_1_a_guessed_log_probability_where_the_engine_gave_none() -> None:
    def guessed(rows: Rows) -> None:
        trace = rows.traces[0]
        mask, logprobs = trace.mask.copy(), trace.logprobs.copy()
        mask[2], logprobs[2] = True, -1.0
        changed(rows, mask=mask, logprobs=logprobs)

    with pytest.raises(LawBroken):
        run(guessed, (call(0, [1, 2], [3, 4], [float("nan"), -0.5]),))


# --- law 2 ---------------------------------------------------------------------------------------------------------------


def test_law_2_a_context_id_that_the_engine_did_not_see() -> None:
    def edited(rows: Rows) -> None:
        other = rows.traces[0].ids.copy()
        other[0] = 99
        changed(rows, ids=other)

    with pytest.raises(FaithfulnessError, match="does not follow its own prompt"):
        run(edited)


class Joining(Builder):
    """Joins calls whose prompts extend each other's prompts, whatever was sampled between them: the classical fault."""

    name = "joining"

    def rows(self, job: Job) -> Rows:
        first, second = job.forest.nodes[0], job.forest.nodes[1]
        row = np.concatenate([job.forest.stream(0), job.forest.prompt(1)[first.end :], second.sampled])
        pieces = [Piece(first.record, first.start, job.chosen.wanted[0]), Piece(second.record, second.start, job.chosen.wanted[1])]
        return Rows([job.row(row, pieces)])


def test_law_2_a_turn_joined_after_an_answer_that_its_prompt_does_not_hold() -> None:
    forest = Forest("s", [call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 5, 6], [7])])
    with pytest.raises(FaithfulnessError):
        Joining().build(forest, SESSION, MAIN)


def test_law_2_a_turn_joined_after_an_answer_of_another_branch() -> None:
    forest = Forest("s", [call(0, [1, 2], [3, 4]), call(1, [1, 2], [3, 5]), call(2, [1, 2, 3, 5], [6])])

    class Crossing(Builder):
        name = "crossing"

        def rows(self, job: Job) -> Rows:
            nodes, wanted = job.forest.nodes, job.chosen.wanted
            pieces = [Piece(nodes[0].record, 2, wanted[0]), Piece(nodes[2].record, 4, wanted[2])]
            crossed = job.row(ids(1, 2, 3, 4, 6), pieces)
            return Rows([crossed, job.row(job.forest.stream(1), [Piece(nodes[1].record, 2, wanted[1])])])

    with pytest.raises(FaithfulnessError):
        Crossing().build(forest, SESSION, MAIN)


# --- law 3 ---------------------------------------------------------------------------------------------------------------


def test_law_3_a_dropped_row() -> None:
    with pytest.raises(ConservationError, match="2 of the 2 tokens that completion 0 sampled are in no row"):
        run(lambda rows: rows.traces.clear())


def test_law_3_a_token_without_mask_and_without_a_line() -> None:
    def masked(rows: Rows) -> None:
        mask, logprobs = rows.traces[0].mask.copy(), rows.traces[0].logprobs.copy()
        mask[6], logprobs[6] = False, 0
        changed(rows, mask=mask, logprobs=logprobs)

    with pytest.raises(ConservationError, match="1 of the 2 tokens that completion 1 sampled"):
        run(masked)


def test_law_3_a_shared_turn_trained_twice() -> None:
    def doubled(rows: Rows) -> None:
        rows.traces.append(rows.traces[0])

    with pytest.raises(ConservationError, match="token 0 of completion 0 is accounted for twice"):
        run(doubled)


def test_law_3_a_token_in_a_row_and_in_the_ledger() -> None:
    with pytest.raises(ConservationError, match="token 0 of completion 2 is accounted for twice"):
        run(lambda rows: rows.lines.append(Line(2, 0, 1, "title", "planted")))


def test_law_3_a_line_for_tokens_that_nobody_sampled() -> None:
    with pytest.raises(ConservationError, match="completion 2 sampled 1 tokens"):
        run(lambda rows: rows.lines.append(Line(2, 1, 5, "title", "planted")))
    with pytest.raises(ConservationError, match="completion 8 sampled 0 tokens"):
        run(lambda rows: rows.lines.append(Line(8, 0, 1, "title", "planted")))


def test_law_3_a_fabricated_completion() -> None:
    def fabricated(rows: Rows) -> None:
        trace = rows.traces[0]
        spans = (*trace.spans[:-1], replace(trace.spans[-1], completion=77))
        rows.traces[0] = Trace("s", trace.ids, trace.mask, trace.logprobs, spans)

    with pytest.raises(ConservationError, match="completion 77"):
        run(fabricated)
