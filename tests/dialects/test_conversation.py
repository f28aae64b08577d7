"""`polar.conversation`: what is done to every conversation, whatever dialect it came in."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from polar.chat import Message, ToolCall
from polar.conversation import fold_system, pair_results


def caller(*ids: str) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(one, "read", "{}") for one in ids))


def result(call: str, text: str = "o") -> Message:
    return Message("tool", text, tool_call_id=call)


def test_results_of_parallel_calls_stand_in_the_order_of_their_calls() -> None:
    """modelscope/ms-swift#10174, can1357/oh-my-pi#11179: results come as tools finish, and a template without ids pairs them by place."""
    history = [Message("user", "go"), caller("a", "b", "c"), result("c"), result("a"), result("b"), Message("user", "on")]
    assert pair_results(history) == (history[0], history[1], history[3], history[4], history[2], history[5])


def test_what_was_said_while_a_tool_ran_comes_after_its_result() -> None:
    """deepseek-ai/awesome-deepseek-integration#740: Codex puts messages between a call and its output, which the provider pairs by id.
    unslothai/unsloth#10091: a template that meets another message after a call looks no further for the result."""
    history = [caller("a"), Message("system", "S"), Message("user", "U"), result("a")]
    assert pair_results(history) == (history[0], history[3], history[1], history[2])
    assert fold_system(pair_results(history)) == (history[0], result("a", "o\n\nS"), Message("user", "U"))


def test_a_result_never_passes_another_answer() -> None:
    history = [caller("a"), Message("user", "well?"), Message("assistant", "wait"), result("a"), Message("user", "and?")]
    assert pair_results(history) == tuple(history)


def test_answers_side_by_side_are_one_turn() -> None:
    """Histories that were put together elsewhere have a message a call."""
    history = [Message("user", "go"), caller("a"), caller("b"), result("a"), result("b"), caller("c"), result("c")]
    assert pair_results(history) == tuple(history)
    assert pair_results([*history[:3], history[4], history[3], *history[5:]]) == tuple(history)


def test_calls_that_share_an_id_have_their_results_in_the_order_they_came() -> None:
    history = [caller("", ""), result("", "1"), result("", "2")]
    assert pair_results(history) == tuple(history)


def test_results_of_calls_that_nobody_made_stay_behind_the_others() -> None:
    history = [result("foreign"), caller("a", "b"), result("b"), result("foreign"), result("a")]
    assert pair_results(history) == (history[0], history[1], history[4], history[2], history[3])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), max_size=5), st.randoms(use_true_random=False))
def test_whatever_order_a_turn_arrives_in_it_reads_the_same(plan: list[tuple[int, int]], random: Random) -> None:
    straight: list[Message] = []
    shuffled: list[Message] = []
    for number, (calls, more) in enumerate(plan):
        ids = [f"{number}.{one}" for one in range(calls)]
        results, said = [result(one, f"of {one}") for one in ids], [Message("user", str(one)) for one in range(more)]
        straight += [caller(*ids), *results, *said]
        random.shuffle(results)
        for message in said:  # in their order, somewhere among the results
            place = max([results.index(earlier) + 1 for earlier in results if earlier.role == "user"], default=0)
            results.insert(random.randint(place, len(results)), message)
        shuffled += [caller(*ids), *results]
    assert pair_results(shuffled) == tuple(straight) == pair_results(straight)
