"""`polar.chat`: what is done to every conversation, whatever dialect it came in."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar.chat import Message, ToolCall, fold_system, order_results


def caller(*ids: str) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall(one, "read", "{}") for one in ids))


def result(call: str, text: str = "o") -> Message:
    return Message("tool", text, tool_call_id=call)


def test_a_system_message_between_a_call_and_its_result_parts_them_not() -> None:
    """unslothai/unsloth#10091: templates look for results right after the call, and stop at the first message that is none."""
    history = [Message("user", "go"), caller("a"), Message("system", "S"), result("a")]
    assert fold_system(history) == (Message("user", "go"), caller("a"), result("a", "S\n\no"))


def test_results_of_parallel_calls_stand_in_the_order_of_their_calls() -> None:
    """modelscope/ms-swift#10174, can1357/oh-my-pi#11179: results come as tools finish, and a template without ids pairs them by place."""
    history = [Message("user", "go"), caller("a", "b", "c"), result("c"), result("a"), result("b"), Message("user", "on")]
    assert order_results(history) == (history[0], history[1], history[3], history[4], history[2], history[5])


def test_results_that_cannot_all_be_paired_stay_as_they_are() -> None:
    history = [caller("a", "b"), result("b"), result("foreign"), result("a")]
    assert order_results(history) == tuple(history)


def test_calls_that_share_an_id_have_their_results_in_the_order_they_came() -> None:
    history = [caller("", ""), result("", "1"), result("", "2")]
    assert order_results(history) == tuple(history)


turns = st.lists(st.tuples(st.integers(0, 4), st.randoms(use_true_random=False)), max_size=5)


@given(turns)
def test_the_order_of_arrival_changes_nothing_and_each_turn_is_ordered_by_itself(plan: list[tuple[int, object]]) -> None:
    straight: list[Message] = []
    shuffled: list[Message] = []
    for count, random in plan:
        ids = [str(one) for one in range(count)]
        results = [result(one, f"of {one}") for one in ids]
        straight += [caller(*ids), *results]
        random.shuffle(results)  # type: ignore[attr-defined]
        shuffled += [caller(*ids), *results]
    assert order_results(shuffled) == tuple(straight) == order_results(straight)
