"""Public bug reports of other systems' token and trajectory code, with their values (part G of the reports). One test each."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from trajectory_samples import SESSION, TOOLS, call, masks, merge, streams, trained

from polar.chat import Message, ToolCall
from polar.records import Break, Cause, Session
from polar.testing.tokenizer import WordTokenizer
from polar.trajectory import Forest, Trace, advantages, build, credit, groups, validate

THREE_TURNS = (call(0, [1, 2], [3], [-0.1]), call(1, [1, 2, 3, 4], [5], [-0.2]), call(2, [1, 2, 3, 4, 5, 6], [7], [-0.3]))


@pytest.mark.parametrize(("prompt", "sampled"), [(None, [5, 6]), ([], [5, 6]), ([1], None)])
def test_b93_half_a_record_is_never_trained(prompt: list[int] | None, sampled: list[int] | None) -> None:
    made = merge(call(0, prompt, sampled))
    assert made.traces == ()
    assert made.ledger.by_reason() == ({"missing_ids": 2} if sampled else {})


def test_b95_a_token_without_a_finite_log_probability_is_not_trained_and_said_to_be_missing() -> None:
    made = merge(call(0, [1], [2, 3, 4, 5], [-0.5, float("-inf"), float("nan"), -0.25]))
    assert masks(made) == [[0, 1, 0, 0, 1]]
    assert made.traces[0].logprobs.tolist() == [0, -0.5, 0, 0, -0.25]
    assert [(line.start, line.end, line.reason) for line in made.ledger] == [(1, 3, "missing_logprob")]
    assert b"NaN" not in made.dumps()
    assert b"Infinity" not in made.dumps()


def test_b97_sampling_parameters_stay_with_each_turn_and_greedy_ones_are_told_apart() -> None:
    turns = [replace(one, sampling={"temperature": t}) for one, t in zip(THREE_TURNS, (0.6, 1.0, 0.0), strict=True)]
    turns[2] = replace(turns[2], tags=frozenset({"greedy"}))
    made = merge(*turns)
    assert [(span.sampling, span.trained) for span in made.traces[0].spans] == [({"temperature": 0.6}, True), ({"temperature": 1.0}, True)]
    assert made.ledger.by_reason() == {"greedy": 1}


def test_b98_three_turns_are_one_sequence() -> None:
    made = merge(*THREE_TURNS)
    assert streams(made) == [[1, 2, 3, 4, 5, 6, 7]]
    assert trained(made) == [[3, 5, 7]]


def test_b99_observations_have_mask_and_log_probability_zero() -> None:
    row = json.loads(merge(*THREE_TURNS).dumps())["traces"][0]
    assert row["prompt_ids"] == [1, 2]
    assert row["response_ids"] == [3, 4, 5, 6, 7]
    assert row["loss_mask"] == [1, 0, 1, 0, 1]
    assert row["response_logprobs"] == [-0.1, 0, -0.2, 0, -0.3]
    assert row["finish_reason"] == "stop"


def test_b100_interleaved_conversations_each_keep_their_row() -> None:
    made = merge(call(0, [1, 2], [3]), call(1, [9, 8], [7]), call(2, [1, 2, 3, 4], [5], parent=0), call(3, [9, 8, 7, 6], [5], parent=1))
    assert streams(made) == [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]
    assert masks(made) == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 1]]


def test_b102_one_mismatch_loses_nothing_and_is_reported_with_its_position() -> None:
    second = call(1, [1, 2, 93, 30, 4], [5], parent=0, broken=Break(Cause.BPE_SPLIT, 0, 2, 2))
    made = merge(call(0, [1, 2], [53, 16]), second)
    assert streams(made) == [[1, 2, 53, 16], [1, 2, 93, 30, 4, 5]]
    assert trained(made) == [[53, 16], [5]]
    (line,) = made.drift
    assert (line.cause, line.position, line.before_id, line.after_id, line.dropped) == ("bpe_split", 2, 53, 93, 2)


def test_b103_stripped_thinking_starts_a_new_segment_and_duplicates_no_token() -> None:
    second = call(1, [1, 3, 2, 4], [5], parent=0, broken=Break(Cause.THINKING_STRIPPED, 0, 1, 5))
    made = merge(call(0, [1], [60, 7, 61, 3, 2]), second)
    assert streams(made) == [[1, 60, 7, 61, 3, 2], [1, 3, 2, 4, 5]]
    assert trained(made) == [[60, 7, 61, 3, 2], [5]]
    assert made.in_rows == made.sampled == 6


def test_b104_a_tool_loop_whose_prompts_extend_each_other_is_one_sample() -> None:
    """Eight rollouts became 64 samples there. Here eight rollouts of three turns are eight rows."""
    assert sum(len(merge(*THREE_TURNS).traces) for _ in range(8)) == 8


def test_b105_arguments_in_other_tokens_are_a_named_branch() -> None:
    second = call(1, [1, 20, 21, 22, 4], [5], parent=0, broken=Break(Cause.ARGUMENTS_RESERIALISED, 0, 2, 1))
    made = merge(call(0, [1], [20, 23]), second)
    assert (len(made.traces), made.drift[0].cause) == (2, "arguments_reserialised")
    assert "mode `tokens`" in made.drift[0].fix


def test_b108_text_that_imitates_a_turn_of_the_model_is_not_trained() -> None:
    """Masks come from what was sampled, never from a search for the template's markers."""
    open_turn, assistant, close = 90, 91, 92
    made = merge(call(0, [1, open_turn, assistant, 5, close, open_turn, assistant], [6, close]))
    assert trained(made) == [[6, close]]


def test_b109_prompts_are_the_engines_ids_and_are_never_tokenised_again() -> None:
    made = merge(call(0, [2, 105], [7]), call(1, [2, 2, 105, 7, 8], [9], parent=0))
    assert streams(made) == [[2, 105, 7], [2, 2, 105, 7, 8, 9]]
    assert made.drift[0].position == 1


def test_b111_a_truncated_turn_does_not_end_the_row_and_marks_it() -> None:
    made = merge(replace(THREE_TURNS[0], finish="length"), *THREE_TURNS[1:])
    (row,) = made.traces
    assert streams(made) == [[1, 2, 3, 4, 5, 6, 7]]
    assert [span.finish for span in row.spans] == ["length", "stop", "stop"]
    assert (row.truncated, row.finish, "truncated" in row.tags) == (True, "stop", True)
    assert not merge(*THREE_TURNS).traces[0].truncated


def test_b114_a_session_without_completions_has_no_rows_and_has_failed() -> None:
    made = merge()
    assert (made.traces, made.status, made.error) == ((), "ERROR", "the session sampled no token")


def test_b114_an_answer_that_the_harness_wrote_itself_is_prompt() -> None:
    """The harness put 40, 41 into the history as an assistant's message; nobody sampled it."""
    made = merge(call(0, [1, 2], [3]), call(1, [1, 2, 3, 4, 40, 41, 5], [6], parent=0))
    assert trained(made) == [[3, 6]]
    assert masks(made) == [[0, 0, 1, 0, 0, 0, 0, 1]]


def test_b115_a_rollout_with_three_rows_counts_once() -> None:
    def rollout(name: str, rows: int, reward: float) -> list[Trace]:
        session = Session(name, b"", b"", metadata={"group_id": "g"})
        calls = [call(n, [n + 1, 9], [3], session=name) for n in range(rows)]
        return list(credit(build(session, calls), reward).traces)

    rows = rollout("A", 3, 1.0) + rollout("B", 1, 0.0)
    assert len(rows) == 4
    assert groups(rows)["g"].mean == 0.5
    assert advantages(rows) == [0.5, 0.5, 0.5, -0.5]
    assert [(row.group_id, row.rollout_id) for row in rows] == [("g", "A")] * 3 + [("g", "B")]


def test_b118_sessions_with_identical_prompts_never_cross() -> None:
    with pytest.raises(ValueError, match="belongs to session"):
        Forest("a", [call(0, [1, 2], [3], session="a"), call(1, [1, 2, 3], [4], session="b")])


def test_b119_rows_decode_to_what_was_said_and_have_one_length() -> None:
    words = WordTokenizer()
    question, answer, result, final = (words.encode(text) for text in ("list files", "running ls", "a b c", "done now"))
    turns = [
        call(0, question, answer, answer=Message("assistant", "running ls", tool_calls=(ToolCall("c", "run", "{}"),))),
        call(
            1,
            question + answer + result,
            final,
            parent=0,
            messages=(
                Message("user", "list files"),
                Message("assistant", "running ls", tool_calls=(ToolCall("c", "run", "{}"),)),
                Message("tool", "a b c", tool_call_id="c"),
            ),
            answer=Message("assistant", "done now"),
        ),
    ]
    made = merge(*turns)
    (row,) = made.to_json()["traces"]
    assert len(row["response_ids"]) == len(row["loss_mask"]) == len(row["response_logprobs"])
    assert validate(row, tokenizer=words) == []
    row["metadata"]["spans"][0]["message"] = 3  # claims that the first run says what the last one said
    assert [problem.code for problem in validate(row, tokenizer=words)] == ["decode"]


def test_b119_all_rows_of_a_session_share_its_rollout_and_group() -> None:
    made = merge(call(0, [1], [2]), call(1, [5], [6]), session=replace(SESSION, metadata={"group_id": "g7"}))
    assert [(row.rollout_id, row.group_id) for row in made.traces] == [("s", "g7")] * 2
    assert all(row.tools == TOOLS for row in made.traces)
    assert all(row.logprobs.dtype == np.float32 for row in made.traces)
