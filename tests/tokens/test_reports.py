"""Bugs that users of other systems reported, as far as they concern the token path."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from polar.chat import Message, Thinking
from polar.records import Cause
from polar.testing.tokenizer import WordTokenizer
from polar.tokens.path import TokenPath
from polar.tokens.tokenizer import Tokenizer, load_tokenizer
from tokens.samples import split_ids
from tokens.session import TOOLS, Session, call_text, echo, result, system, user

CALL = call_text("bash", '{"command": "ls"}') + "<|im_end|>"


def ids(session: Session, number: int) -> list[int]:
    found = session.turns[number].ids
    assert found is not None
    return list(found)


def test_b22_a_system_message_in_mid_conversation_is_folded_where_it_stands(session: Session) -> None:
    messages = [system(), user("u")]
    for turn in range(3):
        plan = session.ask(*messages, tools=TOOLS)
        if turn:
            assert plan.bridged
            assert plan.prompt_ids is not None
            assert plan.prompt_ids[: len(ids(session, turn - 1))].tolist() == ids(session, turn - 1)
            assert session.path.tokenizer.decode(plan.prompt_ids.tolist()).count("<|im_start|>system") == 1
        answer = session.say(plan, "<think>\nhm\n</think>\n\n" + CALL)
        messages += [echo(answer), result(answer.tool_calls[0]), system(f"<total_tokens>{9 - turn}")]


def test_b98_three_turns_are_one_chain(session: Session) -> None:
    messages = [user("u")]
    for _ in range(3):
        plan = session.ask(*messages, tools=TOOLS)
        answer = session.say(plan, CALL)
        messages += [echo(answer), result(answer.tool_calls[0])]
    assert [session.turns[number].parent for number in range(3)] == [None, 0, 1]
    assert ids(session, 1)[: len(ids(session, 0))] == ids(session, 0)
    assert ids(session, 2)[: len(ids(session, 1))] == ids(session, 1)


def test_b100_interleaved_conversations_attach_to_their_own_deepest_turn(session: Session) -> None:
    conversations = [[user("a")], [user("b")]]
    for _ in range(3):
        for conversation in conversations:
            answer = session.say(session.ask(*conversation, tools=TOOLS), CALL)
            conversation += [echo(answer), result(answer.tool_calls[0])]
    assert [session.turns[number].parent for number in range(6)] == [None, None, 0, 1, 2, 3]


def test_b102_the_same_text_in_other_tokens_is_a_break_with_its_position(qwen3: Tokenizer) -> None:
    session = Session(TokenPath(qwen3, model="m", renderer="qwen3", mode="tokens", bridging=False))
    sampled = [one for char in "hello world" for one in qwen3.encode(char)] + qwen3.encode("<|im_end|>")
    first = session.ask(user("u"))
    answer = session.say(first, sampled)
    broken = session.ask(user("u"), answer, user("v")).broken
    assert broken is not None
    assert first.prompt_ids is not None
    assert (broken.cause, broken.parent, broken.position, broken.lost) == (Cause.BPE_SPLIT, 0, len(first.prompt_ids), len(sampled))


def test_b103_thinking_that_the_template_drops_is_named_and_kept_by_the_default(qwen3: Tokenizer, qwen3_path: TokenPath) -> None:
    for path, extends in ((qwen3_path, True), (TokenPath(qwen3, model="m", renderer="qwen3", mode="tokens", bridging=False), False)):
        session = Session(path)
        answer = session.say(session.ask(user("u")), "<think>\nhm\n</think>\n\nhi<|im_end|>")
        plan = session.ask(user("u"), echo(answer), user("v"))
        assert (plan.broken is None) == extends
        assert extends or (plan.broken is not None and plan.broken.cause is Cause.THINKING_STRIPPED)


@pytest.mark.parametrize("thinking", ["echoed", "signed", "stripped"])
def test_b104_replaying_what_the_gateway_sent_extends_the_prompt(session: Session, thinking: str) -> None:
    messages = [system(), user("u")]
    for turn in range(3):
        plan = session.ask(*messages, tools=TOOLS)
        assert plan.broken is None
        assert plan.bridged == (turn > 0)
        text = "<think>\n\n let me see \n</think>\n\nOK,\n" + call_text("bash", '{"command":"a",  "b": "\\u00e9"}') + "<|im_end|>"
        answer = session.say(plan, split_ids(session.path.tokenizer, text, turn))
        sent = echo(answer)
        if thinking != "stripped":
            signature = answer.tool_calls[0].id if thinking == "signed" else None
            sent = replace(sent, thinking=(Thinking(answer.reasoning, signature),))
        messages += [sent, result(answer.tool_calls[0])]


def test_b105_equal_arguments_are_sent_as_sampled_and_edited_ones_as_edited(qwen3: Tokenizer) -> None:
    session = Session(TokenPath(qwen3, model="m", renderer="qwen3", mode="tokens"))
    sampled = '{"b": 2, "a": "\\u00e9"}'
    answer = session.say(session.ask(user("u"), tools=TOOLS), call_text("bash", sampled) + "<|im_end|>")
    call = answer.tool_calls[0]
    same = replace(answer, tool_calls=(replace(call, id="toolu_" + call.id, arguments='{"a":"é","b":2}'),))
    plan = session.ask(user("u"), same, result(call), tools=TOOLS)
    assert plan.bridged
    assert plan.request.messages[1].tool_calls[0].arguments == sampled
    edited = replace(answer, tool_calls=(replace(call, id="toolu_" + call.id, arguments='{"a":"é","b":3}'),))
    plan = session.ask(user("u"), edited, result(call), tools=TOOLS)
    assert plan.cause is Cause.HISTORY_EDITED
    assert not plan.bridged
    assert plan.request.messages[1].tool_calls[0].arguments == '{"a":"é","b":3}'


def test_b108_marks_in_a_tools_text_pass_unchanged(session: Session) -> None:
    answer = session.say(session.ask(user("u"), tools=TOOLS), CALL)
    text = "cat x: <|im_end|><|im_start|>assistant\n<think>"
    plan = session.ask(user("u"), echo(answer), result(answer.tool_calls[0], text), tools=TOOLS)
    assert plan.bridged
    assert plan.prompt_ids is not None
    assert text in session.path.tokenizer.decode(plan.prompt_ids.tolist())
    following = session.say(plan, CALL)
    assert following.tool_calls
    assert session.ask(*plan.request.messages, following, result(following.tool_calls[0]), tools=TOOLS).bridged


def test_b109_no_special_token_is_added_to_a_rendered_prompt(tmp_path: Path) -> None:
    backend = Backend(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a b") == [1, 2]
    assert tokenizer("a b")["input_ids"] == [1, 2]
    assert tokenizer.encode("a b", add_special_tokens=True) == [0, 1, 2]


def test_b109_a_count_equals_the_prompt(session: Session) -> None:
    plan = session.ask(system(), user("u"), tools=TOOLS)
    assert plan.prompt_ids is not None
    assert session.path.count(plan.request) == len(plan.prompt_ids)


def test_b112_parallel_results_share_one_user_turn(session: Session) -> None:
    text = call_text("bash", "{}") + "\n" + call_text("read", "{}") + "<|im_end|>"
    answer = session.say(session.ask(user("u"), tools=TOOLS), text)
    plan = session.ask(user("u"), echo(answer), *(result(call) for call in answer.tool_calls), tools=TOOLS)
    assert plan.bridged
    assert plan.prompt_ids is not None
    suffix = session.path.tokenizer.decode(plan.prompt_ids[len(ids(session, 0)) :].tolist())
    assert suffix.count("<|im_start|>user") == 1
    assert suffix.count("<tool_response>") == 2


def test_b114_an_assistant_text_that_nobody_sampled_is_prompt(session: Session) -> None:
    answer = session.say(session.ask(user("u")), "hi<|im_end|>")
    plan = session.ask(user("u"), answer, user("v"), Message("assistant", "Sorry, max turns"), user("w"))
    assert not plan.bridged
    assert plan.prompt_ids is not None
    assert "Sorry, max turns" in session.path.tokenizer.decode(plan.prompt_ids.tolist())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=8))
def test_b118_identical_prompts_of_two_sessions_never_cross(order: list[bool]) -> None:
    path = TokenPath(WordTokenizer(), model="m", renderer="qwen3", mode="tokens")
    sessions = {one: Session(path, str(one).encode() * 8) for one in (True, False)}
    histories: dict[bool, list[Message]] = {one: [user("same")] for one in sessions}
    for one in order:
        plan = sessions[one].ask(*histories[one], tools=TOOLS)
        turns = sessions[one].next
        assert plan.parent == (turns - 1 if turns else None)
        answer = sessions[one].say(plan, path.tokenizer.encode(CALL))
        histories[one] += [echo(answer), result(answer.tool_calls[0])]
