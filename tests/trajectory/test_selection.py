"""What is trained and what stands in the ledger, under which reason and rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from trajectory_samples import MAIN, call, masks, merge, streams, trained

from polar.errors import ConfigError
from polar.harness import Tag
from polar.records import Completion
from polar.trajectory import Line, Options, Recipe

TALK = (call(0, [1, 2], [3, 4]), call(1, [1, 2, 3, 4, 5], [6, 7], parent=0), call(2, [1, 2, 3, 4, 5, 6, 7, 8], [9], parent=1))


def tagged(**roles: str) -> Recipe:
    """`c1="title"` makes completion 1 a title."""
    return Recipe("test", lambda one: Tag(roles.get(f"c{one.number}", "main"), f"test: rule {one.number}"))  # type: ignore[arg-type]


# --- reasons -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["title", "router", "probe", "compaction"])
def test_side_calls_stand_in_the_ledger_under_their_role_and_rule(role: str) -> None:
    made = merge(call(0, [1], [2]), call(1, [5], [6, 7]), recipe=tagged(c1=role))
    assert streams(made) == [[1, 2]]
    assert list(made.ledger) == [Line(1, 0, 2, role, "test: rule 1")]


def test_sub_agents_are_trained_and_say_so() -> None:
    made = merge(call(0, [1], [2]), call(1, [5], [6]), recipe=tagged(c1="sub_agent"))
    assert [row.role for row in made.traces] == ["main", "sub_agent"]


def test_which_roles_are_trained_is_an_option() -> None:
    made = merge(call(0, [1], [2]), call(1, [5], [6]), recipe=tagged(c1="title"), trained=("title",))
    assert streams(made) == [[5, 6]]
    assert made.ledger.by_reason() == {"main": 1}


@pytest.mark.parametrize(
    ("change", "reason", "rule"),
    [
        ({"status": "aborted", "untrainable": "aborted: the client left"}, "aborted", "aborted: the client left"),
        ({"untrainable": "engine was not checked"}, "untrainable", "engine was not checked"),
        ({"logprobs": None}, "missing_logprob", "no log-probabilities that line up with the sampled ids"),
        ({"tags": frozenset({"constrained"})}, "constrained", "tagged constrained at capture"),
        ({"tags": frozenset({"greedy"})}, "greedy", "tagged greedy at capture"),
    ],
)
def test_each_refusal_has_its_reason_and_its_rule(change: dict[str, Any], reason: str, rule: str) -> None:
    made = merge(replace(call(0, [1], [2, 3]), **change))
    assert made.traces == ()
    assert list(made.ledger) == [Line(0, 0, 2, reason, rule)]


def test_what_the_capture_called_untrainable_can_be_had_for_sft() -> None:
    assert trained(merge(call(0, [1], [2], untrainable="raw log-probabilities"), untrainable=True)) == [[2]]


@pytest.mark.parametrize("name", ["constrained", "greedy"])
def test_constrained_and_greedy_tokens_are_trained_if_the_options_say_so(name: str) -> None:
    assert trained(merge(call(0, [1], [2], tags=frozenset({name})), **{name: True})) == [[2]]


def test_a_malformed_tool_call_is_trained_unless_the_options_say_otherwise() -> None:
    one = call(0, [1], [2], tags=frozenset({"tool_call_malformed"}))
    assert trained(merge(one)) == [[2]]
    assert merge(one, malformed=False).ledger.by_reason() == {"malformed": 1}


def test_what_the_ledger_holds_stays_in_the_row_as_context() -> None:
    made = merge(TALK[0], replace(TALK[1], tags=frozenset({"constrained"})), TALK[2])
    assert streams(made) == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert masks(made) == [[0, 0, 1, 1, 0, 0, 0, 0, 1]]
    assert [span.trained for span in made.traces[0].spans] == [True, False, True]


def test_a_row_ends_with_the_last_answer_that_it_trains() -> None:
    made = merge(TALK[0], TALK[1], replace(TALK[2], status="aborted"))
    assert streams(made) == [[1, 2, 3, 4, 5, 6, 7]]


def test_each_run_of_tokens_without_log_probability_is_a_line() -> None:
    nan = float("nan")
    made = merge(call(0, [1], [2, 3, 4, 5, 6], [nan, -1, nan, nan, -1]))
    assert [(line.start, line.end) for line in made.ledger] == [(0, 1), (2, 4)]
    assert masks(made) == [[0, 0, 1, 0, 0, 1]]


# --- retries -------------------------------------------------------------------------------------------------------------


def test_an_answer_that_its_client_did_not_take_and_asked_again_for_is_an_abandoned_retry() -> None:
    made = merge(call(0, [1], [2], delivered=False), call(1, [1], [3]), call(2, [1, 3, 4], [5], parent=1))
    assert streams(made) == [[1, 3, 4, 5]]
    assert list(made.ledger) == [Line(0, 0, 1, "abandoned_retry", "completion 1 has the same prompt, and nothing goes on from this one")]


def test_the_try_that_the_conversation_goes_on_from_is_kept_whether_or_not_it_was_noted_as_delivered() -> None:
    made = merge(call(0, [1], [2], delivered=False), call(1, [1], [3], delivered=False), call(2, [1, 2, 4], [5], parent=0))
    assert streams(made) == [[1, 2, 4, 5]]
    assert made.ledger.by_reason() == {"abandoned_retry": 1}


def test_two_calls_with_one_prompt_whose_answers_were_both_taken_are_both_trained() -> None:
    made = merge(call(0, [1], [2]), call(1, [1], [3]))
    assert sorted(trained(made)) == [[2], [3]]


def test_the_choices_of_one_call_are_no_retries_of_each_other() -> None:
    made = merge(call(0, [1], [2], delivered=False), call(1, [1], [3], choice=1, delivered=False))
    assert sorted(trained(made)) == [[2], [3]]


def test_abandoned_retries_are_trained_if_the_options_say_so() -> None:
    made = merge(call(0, [1], [2], delivered=False), call(1, [1], [3]), abandoned_retries=True)
    assert sorted(trained(made)) == [[2], [3]]


def test_of_several_tries_that_nobody_took_the_last_complete_one_is_kept() -> None:
    tries = [call(n, [1], [2 + n], delivered=False) for n in range(3)]
    made = merge(*tries[:2], replace(tries[2], status="aborted"))
    assert trained(made) == [[3]]
    assert made.ledger.by_reason() == {"abandoned_retry": 1, "aborted": 1}


# --- shared turns ----------------------------------------------------------------------------------------------------------

FORK = (call(0, [1], [2]), call(1, [1, 2, 3], [4], parent=0), call(2, [1, 2, 7], [8, 8], parent=0))


def test_a_shared_turn_is_trained_in_the_longest_row() -> None:
    made = merge(*FORK)
    assert dict(zip(map(tuple, streams(made)), trained(made), strict=True)) == {(1, 2, 7, 8, 8): [2, 8, 8], (1, 2, 3, 4): [4]}


def test_or_in_the_row_that_ends_first() -> None:
    made = merge(*FORK, trunk="first")
    assert dict(zip(map(tuple, streams(made)), trained(made), strict=True)) == {(1, 2, 3, 4): [2, 4], (1, 2, 7, 8, 8): [8, 8]}


def test_or_in_the_one_that_ends_latest() -> None:
    longer_first = (FORK[0], call(1, [1, 2, 3, 5], [4, 4, 4], parent=0), FORK[2])
    made = merge(*longer_first, trunk="latest")
    assert dict(zip(map(tuple, streams(made)), trained(made), strict=True))[(1, 2, 7, 8, 8)] == [2, 8, 8]


def test_the_other_rows_say_that_they_share_it() -> None:
    other = next(row for row in merge(*FORK).traces if row.completions == (0, 1))
    assert [span.trained for span in other.spans] == [False, True]
    assert "shared_trunk" in other.tags


# --- row length --------------------------------------------------------------------------------------------------------------


def test_a_row_over_length_ends_after_the_last_answer_that_fits() -> None:
    made = merge(*TALK, max_length=8)
    assert streams(made) == [[1, 2, 3, 4, 5, 6, 7]]
    assert made.traces[0].cut == "over_length"
    assert list(made.ledger) == [Line(2, 0, 1, "over_length", "max_length=8, cut=turn; the answer ends at 9")]


def test_or_exactly_there() -> None:
    made = merge(*TALK, max_length=6, cut="token")
    assert streams(made) == [[1, 2, 3, 4, 5, 6]]
    assert made.traces[0].cut == "over_length"
    assert made.traces[0].finish == "length"
    assert [(line.completion, line.start, line.end, line.reason) for line in made.ledger] == [
        (1, 1, 2, "over_length"),
        (2, 0, 1, "over_length"),
    ]


def test_a_row_that_fits_is_not_cut() -> None:
    (row,) = merge(*TALK, max_length=9).traces
    assert (row.cut, len(row)) == (None, 9)


def test_a_branch_over_length_does_not_cut_the_row_beside_it() -> None:
    made = merge(call(0, [1], [2]), call(1, [1, 2, 3], [4], parent=0), call(2, [1, 2, *range(20)], [5], parent=0), max_length=6)
    assert [row.cut for row in made.traces] == [None]


def test_a_conversation_whose_first_answer_does_not_fit_gives_no_row() -> None:
    made = merge(call(0, [1] * 20, [2, 3]), max_length=10)
    assert made.traces == ()
    assert made.ledger.by_reason() == {"over_length": 2}


# --- the session ------------------------------------------------------------------------------------------------------------------


def test_empty_answers_leave_no_trace() -> None:
    made = merge(call(0, [1], []), call(1, [1, 2], [3]))
    assert (streams(made), made.sampled, len(made.ledger)) == ([[1, 2, 3]], 1, 0)


def test_policy_versions_stay_with_their_turns() -> None:
    (row,) = merge(replace(TALK[0], policy_version="4"), replace(TALK[1], policy_version="5")).traces
    assert [span.policy_version for span in row.spans] == ["4", "5"]
    assert row.policy_versions == ("4", "5")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"trained": ["mian"]}, "no role is called mian"),
        ({"max_length": 1}, "max_length: 1 is too short"),
        ({"cut": "half"}, "cut: 'half' is not one of turn, token"),
        ({"trunk": "x"}, "trunk: 'x'"),
        ({"on_break": "x"}, "on_break: 'x'"),
        ({"on_break": "splice", "max_length": 9}, "knows no row length"),
        ({"max_len": 9}, "a builder has no option max_len"),
    ],
)
def test_wrong_options_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.of(config)


def test_options_survive_their_json_form() -> None:
    options = Options(trained=("main",), max_length=100, cut="token", greedy=True)
    assert Options.of(options.to_json()) == options


def test_the_recipe_is_asked_once_for_each_completion() -> None:
    asked: list[int] = []

    def tag(one: Completion) -> Tag:
        asked.append(one.number)
        return Tag("main", "x")

    merge(*TALK, recipe=replace(MAIN, tag=tag))
    assert asked == [0, 1, 2]
