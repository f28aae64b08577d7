"""`on_break="splice"`: the reference system's merging, case by case, so that the two can be compared."""

from __future__ import annotations

from dataclasses import replace

from trajectory_samples import call, masks, merge, streams, trained

END = 9


def spliced(*completions, **options):  # type: ignore[no-untyped-def]
    calls = [replace(one, ended=float(one.number)) for one in completions]
    return merge(*calls, on_break="splice", **options)


def test_its_rows_are_never_marked_faithful() -> None:
    made = spliced(call(0, [1], [2, END]), call(1, [1, 2, END, 3], [4, END]))
    assert [row.faithful for row in made.traces] == [False]


def test_turns_that_extend_each_other_give_the_same_row() -> None:
    turns = (call(0, [1], [2, END]), call(1, [1, 2, END, 3], [4, END]), call(2, [1, 2, END, 3, 4, END, 5], [6, END]))
    assert streams(spliced(*turns)) == streams(merge(*turns)) == [[1, 2, END, 3, 4, END, 5, 6, END]]
    assert masks(spliced(*turns)) == masks(merge(*turns))


def test_a_later_turn_is_put_after_an_answer_that_its_prompt_does_not_hold() -> None:
    """The engine saw [1, 7, 9, 3] before sampling 4; the spliced row has [1, 2, 9, 3] there."""
    turns = (call(0, [1], [2, END]), call(1, [1, 7, END, 3], [4, END]))
    assert streams(spliced(*turns)) == [[1, 2, END, 3, 4, END]]
    assert sorted(streams(merge(*turns))) == [[1, 2, END], [1, 7, END, 3, 4, END]]


def test_a_truncated_answer_is_closed_with_the_end_of_turn_of_the_next_prompt() -> None:
    made = spliced(
        call(0, [1], [2, END]), call(1, [1, 2, END, 3], [4, 5], finish="length"), call(2, [1, 2, END, 3, 4, 5, END, 6], [7, END])
    )
    assert streams(made) == [[1, 2, END, 3, 4, 5, END, 6, 7, END]]
    assert trained(made) == [[2, END, 4, 5, 7, END]]


def test_an_identical_retry_breaks_the_chain_and_the_rest_is_dropped() -> None:
    turns = (call(0, [1], [2, END]), call(1, [1], [3, END]), call(2, [1, 3, END, 4], [5, END]))
    made = spliced(*turns)
    assert streams(made) == [[1, 2, END]]
    assert made.ledger.by_reason() == {"chain_broken": 4}
    assert (made.builder["chains_total"], made.builder["chains_reconstructed_truncated"]) == (1, 1)
    assert sum(line.lost for line in made.drift) == 4
    assert merge(*turns).in_rows == 6


def test_a_rewritten_prompt_starts_another_chain() -> None:
    made = spliced(call(0, [1, 2], [3, END]), call(1, [1, 5, 6], [7, END], parent=0))
    assert streams(made) == [[1, 2, 3, END], [1, 5, 6, 7, END]]


def test_a_prompt_joins_the_chain_with_the_longest_prompt() -> None:
    made = spliced(
        call(0, [1], [2, END]),
        call(1, [1, 2, END, 3], [4, END]),
        call(2, [1, 2, END, 3, 4, END, 5], [6, END]),
        call(3, [1, 8, END, 5], [7, END]),
    )
    assert streams(made) == [[1, 2, END, 3, 4, END, 5, 6, END], [1, 8, END, 5, 7, END]]


def test_the_end_of_turn_is_the_first_finished_answers_last_id_or_an_option() -> None:
    turns = (call(0, [1], [2, 3], finish="length"), call(1, [1, 2, 3, 8, 4], [5, 8], finish="length"))
    assert spliced(*turns).ledger.by_reason() == {"chain_broken": 2}
    assert streams(spliced(*turns, end_of_turn=8)) == [[1, 2, 3, 8, 4, 5, 8]]


def test_what_it_drops_still_adds_up() -> None:
    made = spliced(call(0, [1], [2, END]), call(1, [1], [3], [float("nan")]), call(2, [1], [4, END]))
    assert made.in_rows + made.ledger.tokens == made.sampled == 5
