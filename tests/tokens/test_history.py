"""Which turn a request continues, scenario by scenario, as harnesses produce them."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest

from polar.chat import Message, Thinking, ToolCall
from polar.records import Cause, Head
from polar.testing.tokenizer import WordTokenizer
from polar.tokens import pointers
from polar.tokens.history import History, root_cause
from polar.tokens.path import TokenPath
from tokens.session import BASH, SECRET, TOOLS, Session, call_text, echo, result, system, user

CALL = "doing it " + call_text("bash", '{"command": "ls"}') + "<|im_end|>"


def test_1_1_the_first_request_has_no_parent_and_no_cause(session: Session) -> None:
    plan = session.ask(system(), user("u"))
    assert (plan.parent, plan.broken, session.match.cause) == (None, None, None)


def test_1_2_a_main_loop_continues_its_last_turn(session: Session) -> None:
    messages = [system(), user("u")]
    for number in range(4):
        answer = session.say(session.ask(*messages, tools=TOOLS), CALL)
        messages += [echo(answer), result(answer.tool_calls[0])]
        plan = session.ask(*messages, tools=TOOLS)
        assert (plan.parent, plan.shared, plan.bridged) == (number, len(messages) - 1, True)


def test_1_3_the_same_request_again_is_a_sibling_with_the_same_prompt(session: Session) -> None:
    first = session.ask(user("u"))
    answer = session.say(first, "one<|im_end|>")
    again = session.ask(user("u"))
    assert again.parent is None
    assert again.broken is None
    assert first.prompt_ids is not None
    assert again.prompt_ids is not None
    assert again.prompt_ids.tolist() == first.prompt_ids.tolist()
    session.say(again, "two<|im_end|>")
    assert session.ask(user("u"), answer, user("v")).parent == 0


def test_1_4_a_rewind_branches_from_the_turn_it_goes_back_to(session: Session) -> None:
    first = session.say(session.ask(user("u")), "one<|im_end|>")
    session.say(session.ask(user("u"), first, user("v")), "two<|im_end|>")
    plan = session.ask(user("u"), first, user("another"))
    assert (plan.parent, plan.bridged, plan.broken) == (0, True, None)


def test_2_1_equal_answers_are_told_apart_by_their_pointers(session: Session) -> None:
    answers = [session.say(session.ask(user("u"), tools=TOOLS), CALL) for _ in range(3)]
    for number, answer in enumerate(answers):
        plan = session.ask(user("u"), echo(answer), result(answer.tool_calls[0]), tools=TOOLS)
        assert plan.parent == number
        assert "ambiguous_parent" not in plan.tags


def test_2_2_equal_answers_are_told_apart_by_a_signature(session: Session) -> None:
    for _ in range(2):
        session.say(session.ask(user("u")), "same<|im_end|>")
    signature = base64.b64encode(b"v1 " + pointers.mint(SECRET, 0).encode()).decode()
    plan = session.ask(user("u"), Message("assistant", "same", thinking=(Thinking("", signature),)), user("v"))
    assert plan.parent == 0


@pytest.mark.parametrize(
    "echoed",
    [Message("assistant", "same", thinking=(Thinking(" a\n"),)), Message("assistant", "<think>\na\n</think>\n\nsame")],
    ids=["beside the text", "in the text"],
)
def test_2_3_then_by_the_thinking_that_is_echoed(session: Session, echoed: Message) -> None:
    session.say(session.ask(user("u")), "<think>a</think>same<|im_end|>")
    session.say(session.ask(user("u")), "<think>b</think>same<|im_end|>")
    plan = session.ask(user("u"), echoed, user("v"))
    assert plan.parent == 0
    assert "ambiguous_parent" not in plan.tags


def test_2_4_else_the_latest_delivered_and_it_is_tagged(session: Session) -> None:
    session.say(session.ask(user("u")), "same<|im_end|>")
    session.say(session.ask(user("u")), "same<|im_end|>", delivered=False)
    plan = session.ask(user("u"), Message("assistant", "same"), user("v"))
    assert plan.parent == 0
    assert plan.tags == {"ambiguous_parent"}
    session.history.delivered(1)
    assert session.ask(user("u"), Message("assistant", "same"), user("v")).parent == 1


def test_3_1_an_aborted_answer_is_no_parent_and_taking_it_up_is_a_retry(session: Session) -> None:
    first = session.say(session.ask(user("u")), "one<|im_end|>")
    partial = session.say(session.ask(user("u"), first, user("v")), "half an ans", status="aborted", finish="abort")
    plan = session.ask(user("u"), first, user("v"), partial, user("go on"))
    assert plan.parent == 0
    assert not plan.bridged
    assert plan.cause is Cause.RETRY


def test_3_2_sending_an_aborted_request_again_breaks_nothing(session: Session) -> None:
    first = session.say(session.ask(user("u")), "one<|im_end|>")
    session.say(session.ask(user("u"), first, user("v")), "half", status="aborted", finish="abort")
    plan = session.ask(user("u"), first, user("v"))
    assert (plan.parent, plan.bridged, plan.broken) == (0, True, None)


def test_4_1_a_sub_agent_with_another_system_and_tools_is_a_root_of_its_own(session: Session) -> None:
    session.say(session.ask(system(), user("u"), tools=TOOLS), CALL)
    plan = session.ask(system("You search."), user("find x"), tools=(BASH,))
    assert (plan.parent, plan.broken, plan.cause) == (None, None, None)


def test_4_2_a_sub_agent_with_the_same_first_messages_and_other_tools_is_named(session: Session) -> None:
    session.say(session.ask(system(), user("context"), user("u"), tools=TOOLS), CALL)
    plan = session.ask(system(), user("context"), user("do a part"), tools=(BASH,))
    assert plan.parent == 0
    assert plan.cause is Cause.SUB_AGENT
    assert plan.broken is not None


def test_4_3_interleaved_conversations_keep_apart(session: Session) -> None:
    one, other = [system(), user("u")], [system("sub"), user("w")]
    for turn in range(3):
        for conversation, tools in ((one, TOOLS), (other, (BASH,))):
            plan = session.ask(*conversation, tools=tools)
            assert plan.bridged == (turn > 0)
            answer = session.say(plan, CALL)
            conversation += [echo(answer), result(answer.tool_calls[0])]
    assert [session.turns[number].parent for number in range(6)] == [None, None, 0, 1, 2, 3]


def test_5_1_the_request_for_a_summary_has_the_history_and_no_tools(session: Session) -> None:
    answer = session.say(session.ask(system(), user("u"), tools=TOOLS), CALL)
    plan = session.ask(system(), user("u"), echo(answer), result(answer.tool_calls[0]), user("summarise"))
    assert plan.parent == 0
    assert plan.broken is not None
    assert plan.broken.cause is Cause.COMPACTION


def test_5_2_a_history_replaced_by_a_summary_is_a_compaction(session: Session) -> None:
    messages = [system(), user("u")]
    for _ in range(3):
        answer = session.say(session.ask(*messages, tools=TOOLS), CALL)
        messages += [echo(answer), result(answer.tool_calls[0])]
    plan = session.ask(system(), user("u"), user("summary of what was done"), tools=TOOLS)
    assert plan.parent == 2
    assert plan.broken is not None
    assert plan.broken.cause is Cause.COMPACTION


def test_5_3_an_answer_that_is_left_out_is_an_edit(session: Session) -> None:
    session.say(session.ask(system(), user("u"), tools=TOOLS), "<think>nothing to say</think><|im_end|>")
    plan = session.ask(system(), user("u"), user("well?"), tools=TOOLS)
    assert plan.cause is Cause.HISTORY_EDITED
    assert "left out" in plan.detail


def test_6_1_tools_that_change_are_named_with_their_names(session: Session) -> None:
    answer = session.say(session.ask(system(), user("u"), tools=TOOLS), CALL)
    plan = session.ask(system(), user("u"), echo(answer), result(answer.tool_calls[0]), tools=(BASH,))
    assert plan.broken is not None
    assert plan.broken.cause is Cause.TOOLS_CHANGED
    assert "-read" in plan.broken.detail


def test_6_2_after_a_change_the_new_root_bridges_again(session: Session) -> None:
    answer = session.say(session.ask(system(), user("u"), tools=TOOLS), CALL)
    messages = [system(), user("u"), echo(answer), result(answer.tool_calls[0])]
    second = session.say(session.ask(*messages, tools=(BASH,)), CALL)
    plan = session.ask(*messages, echo(second), result(second.tool_calls[0]), tools=(BASH,))
    assert (plan.parent, plan.bridged) == (1, True)


def test_6_3_a_header_that_changes_with_every_call_is_volatile(session: Session) -> None:
    answer = session.say(session.ask(system("x-some-billing-header: cch=1;\nYou code."), user("u"), tools=TOOLS), CALL)
    history = [user("u"), echo(answer), result(answer.tool_calls[0])]
    plan = session.ask(system("x-some-billing-header: cch=2;\nYou code."), *history, tools=TOOLS)
    assert plan.broken is not None
    assert plan.broken.cause is Cause.VOLATILE_HEADER
    plan = session.ask(system("x-some-billing-header: cch=1;\nYou write."), *history, tools=TOOLS)
    assert plan.broken is not None
    assert plan.broken.cause is Cause.SYSTEM_CHANGED


def test_6_4_another_model_is_another_root(session: Session) -> None:
    answer = session.say(session.ask(user("u")), "hi<|im_end|>")
    session.path = TokenPath(session.path.tokenizer, model="another", renderer="qwen3", mode="tokens")
    assert session.ask(user("u"), answer, user("v")).cause is Cause.MODEL_CHANGED


def test_7_1_edited_arguments_win_and_untouched_ones_are_restored(session: Session) -> None:
    text = call_text("bash", '{"command":  "one"}') + "\n" + call_text("bash", '{"command":  "two"}')
    answer = session.say(session.ask(user("u"), tools=TOOLS), f"<think>\nplan\n</think>\n\n{text}<|im_end|>")
    edited = echo(answer)
    edited = replace(edited, tool_calls=(edited.tool_calls[0], replace(edited.tool_calls[1], arguments='{"command":"2"}')))
    plan = session.ask(user("u"), edited, *(result(call) for call in answer.tool_calls), tools=TOOLS)
    assert plan.cause is Cause.HISTORY_EDITED
    assert not plan.bridged
    sent = plan.request.messages[1]
    assert [call.arguments for call in sent.tool_calls] == ['{"command":  "one"}', '{"command":"2"}']
    assert sent.reasoning == "plan"


def test_7_1c_a_call_that_merely_has_the_same_number_gets_no_thinking(session: Session) -> None:
    first = Message("assistant", thinking=(Thinking("about a"),), tool_calls=(ToolCall("call_0", "bash", '{"command":"a"}'),))
    session.say(session.ask(user("u"), first, result(first.tool_calls[0]), tools=TOOLS), "done<|im_end|>")
    other = Message("assistant", tool_calls=(ToolCall("call_0", "bash", '{"command":"b"}'),))
    plan = session.ask(user("u"), other, result(other.tool_calls[0]), tools=TOOLS)
    assert plan.parent == 0
    assert plan.request.messages[1] == other


def test_7_1b_after_an_edit_in_the_middle_later_answers_are_restored_too(session: Session) -> None:
    messages = [system(), user("u")]
    for _ in range(3):
        answer = session.say(session.ask(*messages, tools=TOOLS), "<think>\nplan\n</think>\n\n" + CALL)
        messages += [echo(answer), result(answer.tool_calls[0])]
    edited = [*messages[:5], replace(messages[5], content="another result"), *messages[6:]]
    plan = session.ask(*edited, tools=TOOLS)
    assert (plan.parent, plan.shared, plan.cause) == (2, 5, Cause.HISTORY_EDITED)
    assert plan.broken is not None
    assert plan.broken.parent == 2
    assert plan.request.messages[:5] == session.turns[2].messages[:5]
    assert plan.request.messages[6].reasoning == "plan"
    following = session.ask(*edited[:-1], session.say(plan, "done<|im_end|>"), user("v"), tools=TOOLS)
    assert not following.bridged


def test_7_2_an_edited_first_message_is_found_by_pointer(session: Session) -> None:
    answer = session.say(session.ask(user("u"), tools=TOOLS), CALL)
    plan = session.ask(user("U"), echo(answer), result(answer.tool_calls[0]), tools=TOOLS)
    assert plan.parent == 0
    assert plan.cause is Cause.HISTORY_EDITED


def test_7_3_an_edited_text_answer_is_found_by_its_opening(session: Session) -> None:
    session.say(session.ask(user("u")), "hello there<|im_end|>")
    plan = session.ask(user("u"), Message("assistant", "something else"), user("v"))
    assert plan.parent == 0
    assert plan.cause is Cause.HISTORY_EDITED


def test_7_4_an_assistant_message_that_the_harness_wrote_is_refused_by_the_renderer(session: Session) -> None:
    answer = session.say(session.ask(user("u")), "hi<|im_end|>")
    plan = session.ask(user("u"), answer, user("v"), Message("assistant", "Sorry, max turns"), user("w"))
    assert plan.parent == 0
    assert plan.broken is None or plan.broken.cause is Cause.RENDERER_REFUSED


def test_8_1_history_survives_a_restart(session: Session) -> None:
    answer = session.say(session.ask(user("u"), tools=TOOLS), CALL)
    session.history = History([session.history.head(0)])  # type: ignore[list-item]
    assert session.ask(user("u"), echo(answer), result(answer.tool_calls[0]), tools=TOOLS).bridged


def test_8_2_ids_that_a_harness_invents_do_not_matter(session: Session) -> None:
    answer = session.say(session.ask(user("u"), tools=TOOLS), CALL)
    renamed = replace(answer, tool_calls=(ToolCall("invented", "bash", answer.tool_calls[0].arguments),))
    plan = session.ask(user("u"), renamed, Message("tool", "r", tool_call_id="invented"), tools=TOOLS)
    assert plan.bridged
    assert plan.request.messages[2].tool_call_id == answer.tool_calls[0].id


def test_8_3_what_is_shared_is_shared_to_the_last_byte(session: Session) -> None:
    answer = session.say(session.ask(system(), user("u"), tools=TOOLS), CALL)
    plan = session.ask(system(), user("u"), echo(answer), result(answer.tool_calls[0]), tools=TOOLS)
    parent = session.turns[0]
    assert plan.request.messages[: plan.shared] == (*parent.messages, parent.answer)


def test_matching_does_not_slow_down_with_turns() -> None:
    path = TokenPath(WordTokenizer(), model="m", renderer="qwen3", mode="tokens")
    session = Session(path)
    plan = session.ask(user("u"))
    lookups = 0

    class Counting(dict[bytes, list[int]]):
        def get(self, key: bytes, default: object = None) -> object:  # type: ignore[override]
            nonlocal lookups
            lookups += 1
            return super().get(key, default)  # type: ignore[arg-type]

    for number in range(5000):
        session.history.add(
            Head(number, plan.keys.root, number.to_bytes(16, "big"), number.to_bytes(16, "big"), b"", None, "complete", True)
        )
    session.history._strict = Counting(session.history._strict)
    session.ask(user("u"), Message("assistant", "a"), user("v"))
    assert lookups == 1


def test_root_causes_name_the_most_telling_part() -> None:
    root = bytes(range(32))
    assert root_cause(root, root) is None
    for start, cause in ((0, Cause.MODEL_CHANGED), (8, Cause.TOOLS_CHANGED), (16, Cause.SETTINGS_CHANGED), (24, Cause.SYSTEM_CHANGED)):
        assert root_cause(root, root[:start] + bytes([255] * 8) + root[start + 8 :]) is cause
