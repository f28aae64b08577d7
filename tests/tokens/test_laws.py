"""Laws 2, 6 and 7 of the token path, on the real Qwen3 tokenizer, with sampled ids that do not survive re-encoding."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.chat import Message
from polar.records import Cause
from polar.tokens.path import TokenPath
from polar.tokens.tokenizer import Tokenizer
from tokens.samples import answers, echoes, news, split_ids, texts
from tokens.session import BASH, TOOLS, Session, system, user

lawful = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
seeds = st.integers(0, 2**32)


@pytest.fixture(scope="session")
def unbridged_path(qwen3: Tokenizer) -> TokenPath:
    return TokenPath(qwen3, model="tiny", renderer="qwen3", mode="tokens", bridging=False)


@pytest.fixture(scope="session", params=["qwen3", "qwen3.5"])
def any_path(request: pytest.FixtureRequest, qwen3: Tokenizer) -> TokenPath:
    """Qwen3.5 writes calls in another form: what Qwen3 samples is text to it, and must be extended all the same."""
    return TokenPath(qwen3, model="tiny", renderer=request.param, mode="tokens")


@lawful
@given(st.data(), st.sampled_from([None, True, False]))
def test_law_2_every_prompt_starts_with_the_turn_before_it_whatever_the_echo(
    any_path: TokenPath, data: st.DataObject, thinking: bool | None
) -> None:
    session = Session(any_path)
    messages = [system(), user(data.draw(texts))]
    previous: list[int] | None = None
    for _ in range(data.draw(st.integers(1, 4))):
        plan = session.ask(*messages, tools=TOOLS, thinking=thinking)
        assert plan.broken is None
        assert plan.prompt_ids is not None
        if previous is not None:
            assert plan.bridged
            assert plan.parent == session.next - 1
            assert plan.prompt_ids[: len(previous)].tolist() == previous
        text = data.draw(answers())
        if any_path.renderer == "qwen3.5" and thinking is not False:
            text = text.removeprefix("<think>") if "</think>" in text else "</think>" + text
        sampled = split_ids(any_path.tokenizer, text, data.draw(seeds))
        answer = session.say(plan, sampled)
        previous = [*plan.prompt_ids.tolist(), *sampled]
        messages += [data.draw(echoes(answer)), *data.draw(news(answer))]


@lawful
@given(st.data())
def test_law_2_an_answer_cut_at_its_length_is_extended_too(qwen3_path: TokenPath, data: st.DataObject) -> None:
    session = Session(qwen3_path)
    plan = session.ask(user("u"), tools=TOOLS)
    whole = split_ids(qwen3_path.tokenizer, data.draw(answers()), data.draw(seeds))
    sampled = whole[: data.draw(st.integers(1, len(whole)))]
    if sampled == whole:
        return
    answer = session.answer(plan, sampled, finish="length")
    assert answer.answer.finish == "length"
    following = session.ask(user("u"), answer.message, user("go on"), tools=TOOLS)
    assert following.prompt_ids is not None
    assert plan.prompt_ids is not None
    known = [*plan.prompt_ids.tolist(), *sampled]
    assert following.bridged
    assert following.prompt_ids[: len(known)].tolist() == known


@lawful
@given(st.data())
def test_an_edited_history_never_bridges_and_has_a_cause(qwen3_path: TokenPath, data: st.DataObject) -> None:
    session = Session(qwen3_path)
    messages = [system(), user("u")]
    for _ in range(3):
        answer = session.say(session.ask(*messages, tools=TOOLS), split_ids(qwen3_path.tokenizer, data.draw(answers()), data.draw(seeds)))
        messages += [data.draw(echoes(answer)), Message("tool" if answer.tool_calls else "user", "result " + str(len(messages)))]
    place = data.draw(st.integers(1, len(messages) - 2))
    edited = list(messages)
    edited[place] = replace(edited[place], content=edited[place].text.strip() + " edited")
    plan = session.ask(*edited, tools=TOOLS)
    assert not plan.bridged
    if plan.broken is not None:
        assert plan.broken.cause in (Cause.HISTORY_EDITED, Cause.RENDERER_REFUSED)
        assert plan.broken.lost > 0


@lawful
@given(st.data())
def test_without_bridging_every_break_is_named_and_right(unbridged_path: TokenPath, data: st.DataObject) -> None:
    session = Session(unbridged_path)
    messages = [system(), user("u")]
    for _ in range(3):
        plan = session.ask(*messages, tools=TOOLS)
        parent = session.parent(plan)
        assert not plan.bridged
        if parent is not None and parent.ids is not None and plan.prompt_ids is not None:
            extends = plan.prompt_ids[: len(parent.ids)].tolist() == parent.ids.tolist()
            assert extends == (plan.broken is None)
            if plan.broken is not None:
                at = plan.broken.position
                assert plan.prompt_ids[:at].tolist() == parent.ids[:at].tolist()
                assert plan.broken.lost == len(parent.ids) - at
        answer = session.say(plan, split_ids(unbridged_path.tokenizer, data.draw(answers()), data.draw(seeds)))
        messages += [data.draw(echoes(answer)), *data.draw(news(answer))]


@lawful
@given(st.data())
def test_law_6_a_session_never_continues_another(qwen3_path: TokenPath, data: st.DataObject) -> None:
    one, other = Session(qwen3_path, b"one" * 8), Session(qwen3_path, b"other" * 6)
    text = data.draw(answers())
    answer = one.say(one.ask(user("u"), tools=TOOLS), split_ids(qwen3_path.tokenizer, text, data.draw(seeds)))
    plan = other.ask(user("u"), answer, user("v"), tools=TOOLS)
    assert plan.parent is None
    assert plan.broken is None


BAD_BLOCKS = [
    "<tool_call>\nnot json\n</tool_call>",
    '<tool_call>\n{"name": "bash", "arguments": {"command": }}\n</tool_call>',
    '<tool_call>\n{"name": "", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": "ls"}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": [1]}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"a": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "bash", "arguments": {"a": "\\ud800"}}\n</tool_call>',
    '<tool_call>\n{"name": "ba\\udfff", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
    "<tool_call>\n[1, 2]\n</tool_call>",
    "<tool_call></tool_call>",
    '<tool_call>\n{"name": "bash", "arguments": {}}',
    "<tool_call><tool_call>",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "a\nb"}}\n</tool_call>',
]


@lawful
@given(answers(), st.sampled_from(BAD_BLOCKS), seeds)
def test_law_7_a_call_that_cannot_be_read_reaches_the_harness_as_text_exactly(
    qwen3_path: TokenPath, good: str, bad: str, seed: int
) -> None:
    tokenizer = qwen3_path.tokenizer
    body = good.removesuffix("<|im_end|>") + bad
    session = Session(qwen3_path)
    reading = session.answer(session.ask(user("u"), tools=TOOLS), split_ids(tokenizer, body + "<|im_end|>", seed))
    assert "tool_call_malformed" in reading.tags
    assert reading.answer.message.tool_calls == ()
    assert reading.answer.finish == "stop"
    visible = body.split("</think>", 1)[1].lstrip("\n") if "</think>" in body and body.startswith("<think>") else body
    assert reading.answer.message.text == visible


@lawful
@given(answers(), seeds)
def test_law_7_nothing_but_whitespace_and_marks_is_left_out(qwen3_path: TokenPath, text: str, seed: int) -> None:
    session = Session(qwen3_path)
    message = session.say(session.ask(user("u"), tools=TOOLS), split_ids(qwen3_path.tokenizer, text, seed))
    left = text.removesuffix("<|im_end|>")
    for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>", *(f'{{"name": "{call.name}",' for call in message.tool_calls)):
        left = left.replace(mark, "")
    for piece in (*(block.text for block in message.thinking), *(call.arguments for call in message.tool_calls), message.text.strip()):
        assert piece in left
        left = left.replace(piece, "", 1)
    for call in message.tool_calls:
        json.loads(call.arguments)
    assert "".join(left.replace('"arguments":', "").replace("}", "").split()) == ""


def test_another_root_never_bridges(qwen3_path: TokenPath) -> None:
    session = Session(qwen3_path)
    answer = session.say(session.ask(system(), user("u"), tools=TOOLS), "hi<|im_end|>")
    history = [system(), user("u"), answer, user("v")]
    for cause, plan in (
        (Cause.TOOLS_CHANGED, session.ask(*history, tools=(BASH,))),
        (Cause.COMPACTION, session.ask(*history)),
        (Cause.SYSTEM_CHANGED, session.ask(system("other"), *history[1:], tools=TOOLS)),
        (Cause.SETTINGS_CHANGED, session.ask(*history, tools=TOOLS, thinking=False)),
    ):
        assert not plan.bridged
        assert plan.parent == 0
        assert plan.cause is cause
        if plan.broken is not None:
            assert plan.broken.cause is cause
