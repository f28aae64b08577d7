"""The token path as a whole: what it takes without complaint, what it refuses, what it says of itself."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.chat import ChatRequest, Image, Message, Role, Text, Thinking, ToolCall
from polar.errors import ConfigError, ContextOverflow, InvalidRequest
from polar.testing.tokenizer import WordTokenizer
from polar.tokens.path import TokenPath
from polar.tokens.plan import Known
from polar.tokens.tokenizer import Tokenizer
from tokens.samples import odd_json, texts
from tokens.session import TOOLS, Session, call_text, echo, result, system, user

lawful = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@st.composite
def any_message(draw: st.DrawFn) -> Message:
    role: Role = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    text = draw(texts | st.sampled_from(["<think>x</think>y", "</think>", "\ud800", "<|im_end|>"]))
    content = draw(st.just(text) | st.just((Text(text), Image("data:,x"))) | st.just((Image("https://x/y.png"),)) | st.just(()))
    calls = draw(st.lists(st.builds(ToolCall, texts, texts, odd_json() | texts), max_size=2)) if role == "assistant" else []
    thinking = draw(st.lists(st.builds(Thinking, texts, st.none() | texts, st.booleans()), max_size=2)) if role == "assistant" else []
    return Message(role, content, tuple(thinking), tuple(calls), draw(st.none() | texts), refs=tuple(draw(st.lists(texts, max_size=1))))


@lawful
@given(st.lists(any_message(), max_size=6), st.sampled_from([None, True, False]), st.booleans(), st.sampled_from(["stop", "length"]))
def test_any_conversation_is_planned_or_refused_as_invalid(
    qwen3_path: TokenPath, messages: list[Message], thinking: bool | None, tools: bool, finish: str
) -> None:
    session = Session(qwen3_path)
    try:
        plan = session.ask(*messages, tools=TOOLS if tools else (), thinking=thinking, effort="high")
    except InvalidRequest:
        return
    answer = session.answer(plan, "a<tool_call>b", finish="length" if finish == "length" else "stop")
    assert answer.message.text == "a<tool_call>b"
    assert session.ask(*messages, answer.message, user("v"), tools=TOOLS if tools else (), thinking=thinking).bridged


def test_the_same_path_serves_many_threads(qwen3_path: TokenPath) -> None:
    def play(number: int) -> list[int]:
        session = Session(qwen3_path, str(number).encode() * 16)
        messages = [system(), user("u")]
        for _ in range(3):
            answer = session.say(session.ask(*messages, tools=TOOLS, thinking=number % 2 == 0), call_text("bash", "{}") + "<|im_end|>")
            messages += [echo(answer), result(answer.tool_calls[0])]
        ids = session.turns[2].ids
        assert ids is not None
        return list(ids)

    with ThreadPoolExecutor(8) as pool:
        played = list(pool.map(play, range(16)))
    assert all(ids == played[number % 2] for number, ids in enumerate(played))


def test_a_prompt_without_room_for_a_token_is_an_overflow(qwen3: Tokenizer) -> None:
    path = TokenPath(qwen3, model="m", renderer="qwen3", mode="tokens", context=12)
    assert Session(path).ask(user("u")).prompt_ids is not None
    with pytest.raises(ContextOverflow) as caught:
        Session(path).ask(user("far too many words for this model to take"))
    assert caught.value.limit == 12
    assert caught.value.prompt_tokens is not None


def test_mode_tokens_wants_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        TokenPath(None, model="m", renderer="qwen3", mode="tokens")


def test_a_tokenizer_without_the_renderers_marks_is_refused(tmp_path: Path) -> None:
    bare = WordTokenizer()
    bare.convert_tokens_to_ids = lambda tokens: None  # type: ignore[method-assign,assignment]
    with pytest.raises(ConfigError, match="does not fit"):
        TokenPath(bare, model="m", renderer="qwen3", mode="tokens")


def test_provenance_names_everything_that_ids_depend_on(qwen3_path: TokenPath, qwen3: Tokenizer) -> None:
    known = qwen3_path.provenance
    assert known["tokenizer_hash"] == qwen3.hash
    assert known["template_hash"] == qwen3.template_hash
    assert known["renderer"] == "qwen3"
    assert known["renderers_version"]
    assert known["renderer_settings"]["thinking_retention"] == "all"


def test_stop_tokens_are_the_renderers(qwen3_path: TokenPath, qwen3: Tokenizer) -> None:
    assert set(qwen3_path.stop_token_ids) == {qwen3.convert_tokens_to_ids("<|im_end|>"), qwen3.convert_tokens_to_ids("<|endoftext|>")}


def test_a_call_in_mode_messages_goes_back_to_tokens_afterwards(session: Session) -> None:
    answer = session.say(session.ask(user("u")), "one<|im_end|>")
    request = session.path.normalise(session.ask(user("u"), answer, user("v")).request, session.secret)
    keys = session.path.keys(request)
    match = session.history.match(keys, request, secret=session.secret)
    plan = session.path.assemble(request, keys, match, session.turns[0], mode="messages")
    assert (plan.mode, plan.prompt_ids, plan.parent) == ("messages", None, 0)
    assert plan.cause is not None


@lawful
@given(st.lists(any_message(), max_size=6), st.lists(any_message(), max_size=4), st.data())
def test_fingerprints_do_not_depend_on_what_was_known_before(
    qwen3_path: TokenPath, first: list[Message], more: list[Message], data: st.DataObject
) -> None:
    kept = data.draw(st.integers(0, len(first)))
    one = ChatRequest("any", tuple(first), tools=data.draw(st.sampled_from([TOOLS, ()])))
    other = replace(one, messages=(*first[:kept], *more), thinking=data.draw(st.sampled_from([None, False])))
    known = Known(one.messages, qwen3_path.keys(one))
    assert qwen3_path.keys(other, known) == qwen3_path.keys(other)
