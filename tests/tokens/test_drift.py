"""Every break has a cause, the right one, in both modes (law 8)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.chat import Image, Message, Text, Thinking
from polar.records import Break, Cause
from polar.tokens.drift import first_difference
from polar.tokens.path import IMAGE_PLACEHOLDER, TokenPath
from polar.tokens.plan import Plan
from polar.tokens.tokenizer import Tokenizer
from tokens.samples import answers, echoes, news, split_ids
from tokens.session import TOOLS, Session, call_text, echo, made, result, system, user

lawful = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def engine(qwen3_path: TokenPath) -> TokenPath:
    """Renders as an engine does from messages."""
    return qwen3_path


class MessagesSession(Session):
    """Mode `messages`: the engine renders what the plan carries and parses with the real parser."""

    def __init__(self, path: TokenPath, engine: TokenPath) -> None:
        super().__init__(path)
        self.engine = engine

    def settle(self, plan: Plan, sampled: str | list[int]) -> tuple[Message, Break | None]:
        ids = self.engine.tokenizer.encode(sampled) if isinstance(sampled, str) else sampled
        parent = self.parent(plan)
        generation = made(ids)
        prompt = self.engine.render(plan.request)
        inner = Session(self.engine)
        generation.message = inner.say(inner.ask(user("x"), tools=plan.request.tools), ids)
        generation.prompt_ids = prompt
        broken = self.path.settle(plan, generation, parent)
        return self.say(plan, ids, generation=generation), broken


@pytest.fixture(params=[True, False], ids=["tokenizer", "none"])
def messages_session(request: pytest.FixtureRequest, qwen3: Tokenizer, engine: TokenPath) -> MessagesSession:
    path = TokenPath(qwen3 if request.param else None, model="tiny", renderer=None, mode="messages")
    return MessagesSession(path, engine)


def test_the_first_difference() -> None:
    def at(prompt: list[int], previous: list[int]) -> int | None:
        return first_difference(np.array(prompt, dtype=np.int32), np.array(previous, dtype=np.int32))

    assert at([1, 2, 3], [1, 2]) is None
    assert at([1, 2], [1, 2]) is None
    assert at([1, 9, 3], [1, 2]) == 1
    assert at([1], [1, 2]) == 1
    assert at([], []) is None


def two_turns(session: MessagesSession, sampled: str | list[int], *more: Message) -> Break | None:
    answer, first = session.settle(session.ask(system(), user("u"), tools=TOOLS), sampled)
    assert first is None
    new = more or tuple(result(call) for call in answer.tool_calls) or (user("v"),)
    plan = session.ask(system(), user("u"), echo(answer), *new, tools=TOOLS)
    assert plan.parent == 0
    return session.settle(plan, "ok<|im_end|>")[1]


def test_messages_plain_text_extends(messages_session: MessagesSession) -> None:
    assert two_turns(messages_session, "hello<|im_end|>") is None


def test_messages_thinking_stripped_by_the_template(messages_session: MessagesSession) -> None:
    broken = two_turns(messages_session, "<think>\nhm\n</think>\n\nhello<|im_end|>", user("v"))
    assert broken is not None
    assert broken.cause is Cause.THINKING_STRIPPED
    assert broken.lost > 0


def test_messages_thinking_kept_inside_a_tool_loop_extends(messages_session: MessagesSession) -> None:
    """The harness stripped it; the stored answer restored it."""
    text = "<think>\nhm\n</think>\n\nok\n" + call_text("bash", '{"command": "ls"}')
    assert two_turns(messages_session, text + "<|im_end|>") is None


def test_messages_arguments_reserialised(messages_session: MessagesSession) -> None:
    broken = two_turns(messages_session, call_text("bash", '{"command":  "\\u00e9"}') + "<|im_end|>")
    assert broken is not None
    assert broken.cause is Cause.ARGUMENTS_RESERIALISED


def test_messages_bpe_split(qwen3: Tokenizer, engine: TokenPath) -> None:
    session = MessagesSession(TokenPath(qwen3, model="tiny", renderer=None, mode="messages"), engine)
    ids = [one for char in "hello" for one in qwen3.encode(char)] + qwen3.encode("<|im_end|>")
    broken = two_turns(session, ids)
    assert broken is not None
    assert broken.cause is Cause.BPE_SPLIT


def test_messages_another_end_token_is_the_renderers_doing(qwen3: Tokenizer, engine: TokenPath) -> None:
    session = MessagesSession(TokenPath(qwen3, model="tiny", renderer=None, mode="messages"), engine)
    broken = two_turns(session, "hello<|endoftext|>")
    assert broken is not None
    assert broken.cause is Cause.RENDERER_REFUSED


def test_messages_a_changed_root_keeps_its_cause(messages_session: MessagesSession) -> None:
    answer, _ = messages_session.settle(messages_session.ask(system(), user("u"), tools=TOOLS), "hi<|im_end|>")
    plan = messages_session.ask(system(), user("u"), answer, user("v"), tools=TOOLS[:1])
    _, broken = messages_session.settle(plan, "ok<|im_end|>")
    assert broken is not None
    assert broken.cause is Cause.TOOLS_CHANGED


@lawful
@given(st.data())
def test_messages_no_break_is_without_a_cause(qwen3: Tokenizer, qwen3_path: TokenPath, data: st.DataObject) -> None:
    known = data.draw(st.booleans())
    session = MessagesSession(TokenPath(qwen3 if known else None, model="tiny", renderer=None, mode="messages"), qwen3_path)
    messages = [system(), user("u")]
    for _ in range(3):
        plan = session.ask(*messages, tools=TOOLS)
        parent = session.parent(plan)
        ids = split_ids(qwen3, data.draw(answers()), data.draw(st.integers(0, 2**32)))
        answer, broken = session.settle(plan, ids)
        if parent is not None and parent.ids is not None:
            prompt = session.turns[session.next - 1].prompt_ids
            assert prompt is not None
            assert (broken is None) == (prompt[: len(parent.ids)].tolist() == parent.ids.tolist())
        messages += [data.draw(echoes(answer)), *data.draw(news(answer))]


def test_an_engine_without_ids_is_not_compared(engine: TokenPath) -> None:
    session = Session(TokenPath(None, model="m", renderer=None, mode="messages"))
    generation = made([1], message=Message("assistant", "hi"))
    generation.token_ids = generation.logprobs = None
    answer = session.answer(session.ask(user("u")), [], generation=generation).message
    plan = session.ask(user("u"), answer, user("v"))
    assert plan.parent == 0
    assert session.path.settle(plan, generation, session.parent(plan)) is None


def test_an_image_moves_a_conversation_to_mode_messages(qwen3: Tokenizer) -> None:
    session = Session(TokenPath(qwen3, model="tiny", renderer="qwen3", mode="tokens", text_only=False))
    answer = session.say(session.ask(user("u")), "hi<|im_end|>")
    plan = session.ask(user("u"), answer, Message("user", (Text("see"), Image("data:image/png;base64,AA"))))
    assert plan.mode == "messages"
    assert plan.prompt_ids is None
    generation = made(qwen3.encode("ok<|im_end|>"), message=Message("assistant", "ok"))
    generation.prompt_ids = np.array([1, 2, 3], dtype=np.int32)
    broken = session.path.settle(plan, generation, session.parent(plan))
    assert broken is not None
    assert broken.cause is Cause.IMAGE


def test_a_text_only_model_is_told_that_an_image_was_there(session: Session) -> None:
    plan = session.ask(Message("user", (Text("see"), Image("data:image/png;base64,AA"), Text("well?"))))
    assert plan.mode == "tokens"
    assert plan.request.messages[0].content == f"see\n{IMAGE_PLACEHOLDER}\nwell?"


@pytest.fixture
def unbridged(qwen3: Tokenizer) -> Session:
    return Session(TokenPath(qwen3, model="tiny", renderer="qwen3", mode="tokens", bridging=False))


@pytest.mark.parametrize(
    ("sampled", "cause"),
    [
        ("<think>\nhm\n</think>\n\nhello<|im_end|>", Cause.THINKING_STRIPPED),
        (call_text("bash", '{"command":  "x"}') + "<|im_end|>", Cause.ARGUMENTS_RESERIALISED),
        ("hello<|endoftext|>", Cause.BRIDGING_OFF),
    ],
)
def test_without_bridging_the_better_cause_is_named(unbridged: Session, sampled: str, cause: Cause) -> None:
    answer = unbridged.say(unbridged.ask(user("u"), tools=TOOLS), sampled)
    plan = unbridged.ask(user("u"), echo(answer), *([result(answer.tool_calls[0])] if answer.tool_calls else [user("v")]), tools=TOOLS)
    assert plan.broken is not None
    assert plan.broken.cause is cause


def test_without_bridging_odd_tokens_are_a_bpe_split(unbridged: Session) -> None:
    encode = unbridged.path.tokenizer.encode
    answer = unbridged.say(unbridged.ask(user("u")), [one for char in "hello" for one in encode(char)] + encode("<|im_end|>"))
    plan = unbridged.ask(user("u"), echo(answer), user("v"))
    assert plan.broken is not None
    assert plan.broken.cause is Cause.BPE_SPLIT
    assert "same text" in plan.broken.detail


def test_an_end_token_inside_open_thinking_is_refused_and_named(session: Session) -> None:
    answer = session.say(session.ask(user("u")), "<think>\nnever closed<|im_end|>")
    plan = session.ask(user("u"), answer, user("v"))
    assert plan.broken is not None
    assert plan.broken.cause is Cause.RENDERER_REFUSED
    assert "open thinking" in plan.broken.detail


def test_template_retention_names_stripped_thinking(qwen3: Tokenizer) -> None:
    session = Session(TokenPath(qwen3, model="tiny", renderer="qwen3", mode="tokens", thinking_retention="template"))
    answer = session.say(session.ask(user("u")), "<think>\nhm\n</think>\n\nhello<|im_end|>")
    plan = session.ask(user("u"), answer, user("v"))
    assert not plan.bridged
    assert plan.broken is not None
    assert plan.broken.cause is Cause.THINKING_STRIPPED


def test_foreign_signatures_are_dropped_and_plain_reasoning_stays(session: Session) -> None:
    blocks = (Thinking("theirs", "EqQBCkYIARgCKkBforeign"), Thinking("plain"), Thinking("", "broken", redacted=True))
    request = session.ask(user("u"), Message("assistant", "a", thinking=blocks), user("v")).request
    assert request.messages[1].thinking == (Thinking("plain"),)
