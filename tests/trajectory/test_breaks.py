"""The drift report: each break once, with cause, place, cost and fix (law 8)."""

from __future__ import annotations

import pytest
from trajectory_samples import SESSION, call, merge

from polar.chat import Message, Thinking
from polar.harness import Tag
from polar.records import Break, Cause
from polar.testing.tokenizer import WordTokenizer
from polar.trajectory import DriftLine, Forest, PrefixMerging, Recipe, aggregate
from polar.trajectory.drift import FIXES, SIDE_CALL


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_is_reported_as_it_was_recorded_and_has_a_fix(cause: Cause) -> None:
    broken = Break(cause, 0, 1, 2, "as the gateway saw it")
    (line,) = merge(call(0, [1, 2], [3]), call(1, [1, 7, 8], [9], parent=0, broken=broken)).drift
    assert (line.cause, line.detail, line.completion, line.parent) == (cause.value, "as the gateway saw it", 1, 0)
    assert FIXES[cause]
    assert line.fix == FIXES[cause]


def test_place_and_cost_of_a_break() -> None:
    (line,) = merge(call(0, [1, 2, 3], [4, 5]), call(1, [1, 2, 9, 4, 5, 6], [7], parent=0)).drift
    assert (line.position, line.before_id, line.after_id) == (2, 3, 9)
    assert (line.dropped, line.repeated, line.lost) == (3, 6, 0)


def test_a_prompt_that_stops_short_differs_at_its_end() -> None:
    (line,) = merge(call(0, [1, 2, 3], [4]), call(1, [1, 2], [9], parent=0)).drift
    assert (line.position, line.before_id, line.after_id, line.dropped) == (2, 3, None, 2)


def test_both_texts_are_shown_where_there_is_a_tokenizer() -> None:
    words = WordTokenizer()
    before, after = words.encode("You are helpful. Today is Monday."), words.encode("You are helpful. Today is Tuesday.")
    forest = Forest("s", [call(0, before, words.encode("Hi")), call(1, after, words.encode("Ho"), parent=0)])
    (line,) = PrefixMerging().build(forest, SESSION, Recipe("x", _main), words).drift
    assert line.before.endswith("is Monday.Hi")
    assert line.after.endswith("is Tuesday.")


def test_without_a_recorded_cause_the_ids_are_looked_at() -> None:
    words = WordTokenizer()
    question = words.encode("q")
    answer = Message("assistant", "yes", thinking=(Thinking("hm"),))
    first = call(0, question, words.encode("<think>hm</think>yes"), answer=answer)
    second = call(1, question + words.encode("yes more"), words.encode("ok"), parent=0)
    (line,) = PrefixMerging().build(Forest("s", [first, second]), SESSION, Recipe("x", _main), words).drift
    assert line.cause == "thinking_stripped"
    (line,) = merge(first, second).drift
    assert line.cause == "thinking_stripped"


def test_a_retry_is_a_break_that_names_the_try_before_it_and_what_it_cost() -> None:
    made = merge(call(0, [1], [2, 3], delivered=False), call(1, [1], [4]), call(2, [1, 4, 5], [6], parent=1))
    (line,) = made.drift
    assert (line.completion, line.parent, line.cause, line.lost) == (1, 0, "retry", 2)
    assert (made.builder["roots"], made.builder["breaks"], len(made.traces)) == (1, 0, 1)


def test_an_aborted_answer_counts_as_lost_to_the_retry() -> None:
    first = call(0, [1], [2])
    made = merge(first, call(1, [1, 2, 3], [4, 5, 6], parent=0, status="aborted"), call(2, [1, 2, 3], [7], parent=0))
    (line,) = made.drift
    assert (line.completion, line.cause, line.lost) == (2, "retry", 3)


def test_a_branch_from_an_earlier_turn_is_an_edit_of_the_history() -> None:
    made = merge(call(0, [1], [2]), call(1, [1, 2, 3], [4], parent=0), call(2, [1, 2, 5], [6], parent=0))
    (line,) = made.drift
    assert (line.completion, line.parent, line.cause, line.position) == (2, 1, "history_edited", 2)


@pytest.mark.parametrize(
    ("role", "cause"), [("sub_agent", "sub_agent"), ("compaction", "compaction"), ("title", SIDE_CALL), ("probe", SIDE_CALL)]
)
def test_a_branch_is_named_after_what_its_call_was_for(role: str, cause: str) -> None:
    recipe = Recipe("x", lambda one: Tag(role if one.number == 2 else "main", "x"))  # type: ignore[arg-type]
    made = merge(call(0, [1], [2]), call(1, [1, 2, 3], [4], parent=0), call(2, [1, 2, 5], [6], parent=0), recipe=recipe)
    assert [line.cause for line in made.drift] == [cause]


def test_a_conversation_that_goes_on_from_a_summary_was_compacted_whatever_changed_with_it() -> None:
    """The summary was asked for without tools; capture saw the tools come back."""
    recipe = Recipe("x", lambda one: Tag("compaction" if one.number == 1 else "main", "x"))
    broken = Break(Cause.TOOLS_CHANGED, 1, 0, 2, "+run")
    made = merge(call(0, [1], [2]), call(1, [5], [6]), call(2, [7, 6, 8], [9], parent=1, broken=broken), recipe=recipe)
    (line,) = made.drift
    assert (line.completion, line.cause) == (2, "compaction")
    assert line.detail == "goes on from the summary; recorded as tools_changed: +run"


def test_a_side_call_is_a_break_even_if_it_came_first() -> None:
    """Completion 1 is recorded as going on from 0, and 2 as well: the earlier one goes on with the row, whoever it is."""
    made = merge(call(0, [1], [2]), call(1, [1, 2, 5], [6], parent=0), call(2, [1, 2, 3], [4], parent=0))
    assert [line.completion for line in made.drift] == [2]


def test_new_conversations_are_roots_and_no_breaks() -> None:
    made = merge(call(0, [1], [2]), call(1, [5], [6]))
    assert (made.drift, made.builder["roots"], made.builder["breaks"]) == ((), 2, 0)


def test_a_recorded_break_that_the_forest_heals_is_none() -> None:
    """Capture compared with completion 0, but the prompt extends completion 1."""
    broken = Break(Cause.HISTORY_EDITED, 0, 1, 1)
    made = merge(call(0, [1], [2]), call(1, [1], [3], delivered=True), call(2, [1, 3, 4], [5], parent=0, broken=broken))
    assert [line.completion for line in made.drift] == [1]


def test_a_recorded_parent_that_is_not_there_makes_a_root() -> None:
    made = merge(call(1, [1], [2], parent=0))
    assert (made.builder["roots"], made.drift) == (1, ())


def test_totals_are_by_harness_dialect_and_cause_the_costliest_first() -> None:
    lines = [
        DriftLine(1, 0, "retry", 5, 2, 5, lost=2, harness="codex", dialect="openai_responses"),
        DriftLine(2, 0, "compaction", 5, 9, 100, harness="codex", dialect="openai_responses"),
        DriftLine(1, 0, "retry", 5, 2, 7, lost=1, harness="codex", dialect="openai_responses"),
        DriftLine(1, 0, "retry", 5, 1, 9, harness="pi", dialect="openai_chat"),
    ]
    totals = aggregate(lines)
    assert [(t.harness, t.cause, t.breaks, t.dropped, t.repeated, t.lost) for t in totals] == [
        ("codex", "compaction", 1, 9, 100, 0),
        ("codex", "retry", 2, 4, 12, 3),
        ("pi", "retry", 1, 1, 9, 0),
    ]
    assert totals[0].fix == FIXES["compaction"]


def test_further_choices_of_one_call_are_named_so() -> None:
    made = merge(
        call(0, [1], [2]), call(1, [1], [3], choice=1), call(2, [1, 2, 4], [5], parent=0), call(3, [1, 2, 4], [6], parent=0, choice=1)
    )
    assert [(line.completion, line.cause) for line in made.drift] == [(1, "choice"), (3, "choice")]
    assert len(made.traces) == made.builder["roots"] + made.builder["breaks"] == 3


def _main(_: object) -> Tag:
    return Tag("main", "x")
