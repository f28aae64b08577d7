from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from renderers import ParsedToolCall, ToolCallParseStatus

from polar.chat import Answer, Message, Thinking, Tool, ToolCall
from polar.engines.base import EngineFinish
from polar.tokens import pointers
from polar.tokens.calls import read_call, sampled_arguments
from polar.tokens.path import TokenPath
from polar.tokens.reading import LOGPROB_FLOOR
from tokens.session import TOOLS, Session, call_text, made, user


def read(session: Session, text: str, finish: EngineFinish = "stop", stop: str | int | None = None) -> Answer:
    return session.answer(session.ask(user("u"), tools=TOOLS), text, finish=finish, stop=stop).answer


def test_arguments_are_the_text_that_was_sampled(session: Session) -> None:
    message = read(session, call_text("bash", '{"command":   "\\u00e9",\n "n": 1.0}') + "<|im_end|>").message
    assert message.tool_calls[0].arguments == '{"command":   "\\u00e9",\n "n": 1.0}'


def test_call_ids_are_the_reference_and_an_index(session: Session) -> None:
    message = read(session, call_text("bash", "{}") + "\n" + call_text("read", "{}") + "<|im_end|>").message
    ref = pointers.mint(session.secret, 0)
    assert [call.id for call in message.tool_calls] == [ref + "00", ref + "01"]


def test_calls_without_arguments_have_an_empty_object(session: Session) -> None:
    assert read(session, '<tool_call>\n{"name": "bash"}\n</tool_call><|im_end|>').message.tool_calls[0].arguments == "{}"


def test_unknown_tool_names_pass(session: Session) -> None:
    answer = read(session, call_text("nowhere", "{}") + "<|im_end|>")
    assert answer.message.tool_calls[0].name == "nowhere"
    assert answer.finish == "tool_calls"


def test_text_between_and_after_calls_is_kept(session: Session) -> None:
    message = read(session, f"before\n{call_text('bash', '{}')}\nbetween\n{call_text('read', '{}')} after<|im_end|>").message
    assert message.text == "before\nbetween\nafter"
    assert len(message.tool_calls) == 2


def test_a_call_cut_at_the_length_is_text(session: Session) -> None:
    reading = session.answer(session.ask(user("u"), tools=TOOLS), 'hi\n<tool_call>\n{"name": "ba', finish="length")
    assert reading.answer.message.text == 'hi\n<tool_call>\n{"name": "ba'
    assert reading.answer.finish == "length"
    assert reading.tags == {"tool_call_malformed"}


def test_good_calls_beside_a_bad_one_become_text_too(session: Session) -> None:
    text = call_text("bash", "{}") + "\n<tool_call>\noops\n</tool_call>"
    answer = read(session, text + "<|im_end|>")
    assert answer.message == Message("assistant", text)
    assert answer.finish == "stop"


def test_open_thinking_at_the_length_is_thinking_only(session: Session) -> None:
    reading = session.answer(session.ask(user("u")), "<think>\nstill at", finish="length")
    assert reading.answer.message.reasoning == "still at"
    assert reading.answer.message.text == ""
    assert reading.tags == {"thinking_open"}
    assert reading.answer.usage.thinking == reading.answer.usage.completion


def test_a_tool_call_ends_open_thinking(session: Session) -> None:
    message = read(session, "<think>\nso: " + call_text("bash", "{}") + "<|im_end|>").message
    assert message.reasoning == "so:"
    assert message.tool_calls[0].name == "bash"


def test_calls_inside_closed_thinking_are_thinking(session: Session) -> None:
    message = read(session, f"<think>\n{call_text('bash', '{}')}\n</think>\n\ndone<|im_end|>").message
    assert message.tool_calls == ()
    assert "<tool_call>" in message.reasoning
    assert message.text == "done"


def test_outer_whitespace_of_text_stays(session: Session) -> None:
    assert read(session, "  hi \n<|im_end|>").message.text == "  hi \n"


def test_a_matched_stop_string_is_left_out(session: Session) -> None:
    answer = read(session, "one\nSTOP", stop="STOP")
    assert (answer.message.text, answer.finish, answer.stop_sequence) == ("one\n", "stop_sequence", "STOP")


def test_a_stop_token_is_a_plain_stop(session: Session) -> None:
    assert read(session, "one<|im_end|>", stop=151645).finish == "stop"


def test_usage_counts_ids(session: Session) -> None:
    plan = session.ask(user("u"))
    generation = made(session.path.tokenizer.encode("<think>a</think>b<|im_end|>"))
    generation.cached_tokens = 3
    usage = session.path.read(plan, generation, "0" * 26).answer.usage
    assert plan.prompt_ids is not None
    assert (usage.prompt, usage.completion, usage.cached, usage.thinking) == (len(plan.prompt_ids), 5, 3, 3)


def test_logprobs_only_for_who_asked_and_never_nan(session: Session) -> None:
    plan = session.ask(user("u"), top_logprobs=1)
    generation = made(session.path.tokenizer.encode("a b<|im_end|>"))
    generation.logprobs = np.array([-0.5, np.nan, -0.1], dtype=np.float32)
    generation.top = [[(64, -0.5)], [("x", -np.inf)], []]
    answer = session.path.read(plan, generation, "0" * 26).answer
    assert answer.logprobs is not None
    assert [(one.token, one.logprob) for one in answer.logprobs] == [("a", -0.5), (" b", LOGPROB_FLOOR)]
    assert answer.logprobs[1].top == (("x", LOGPROB_FLOOR),)
    assert session.path.read(session.ask(user("u")), generation, "0" * 26).answer.logprobs is None


def test_alternatives_are_the_likeliest_in_their_order_and_no_more_than_asked_for(session: Session) -> None:
    """vLLM lists the sampled token first, beside the ones that were asked for."""
    generation = made(session.path.tokenizer.encode("a"))
    generation.top = [[("a", -5.0), ("x", -0.5), ("y", -1.0)]]
    for most, names in ((2, ["x", "y"]), (3, ["x", "y", "a"]), (0, [])):
        answer = session.path.read(session.ask(user("u"), top_logprobs=most), generation, "0" * 26).answer
        assert answer.logprobs is not None
        assert [name for name, _ in answer.logprobs[0].top] == names


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ('{"name": "x", "arguments": {"a": [1, {"b": "}"}]}}', '{"a": [1, {"b": "}"}]}'),
        (' {"arguments":{},"name":"x","arguments": {"last": 1}} ', '{"last": 1}'),
        ('{"name": "x"}', None),
        ("nonsense", None),
        ('{"name" "x"}', None),
    ],
)
def test_the_text_of_the_arguments(raw: str, text: str | None) -> None:
    assert sampled_arguments(raw) == text


def test_the_engines_reading_is_checked_in_mode_messages(qwen3_path: TokenPath) -> None:
    path = TokenPath(qwen3_path.tokenizer, model="m", renderer=None, mode="messages")
    session = Session(path)
    plan = session.ask(user("u"), tools=TOOLS)
    text = '<tool_call>\n{"name": "bash", "arguments": {"a": }}\n</tool_call>'
    generation = made(path.tokenizer.encode(text + "<|im_end|>"), "tool_calls")
    generation.message = Message("assistant", "", tool_calls=(ToolCall("x", "bash", '{"a": }'),))
    reading = path.read(plan, generation, "a" * 26)
    assert reading.answer.message == Message("assistant", text)
    assert reading.answer.finish == "stop"
    assert reading.tags == {"tool_call_malformed"}
    good = replace(generation.message, tool_calls=(ToolCall("x", "bash", ""),))
    generation.message = good
    reading = path.read(plan, generation, "a" * 26)
    assert reading.answer.message.tool_calls == (ToolCall("a" * 26 + "00", "bash", "{}"),)
    assert reading.answer.finish == "tool_calls"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message("assistant", "\n\n", tool_calls=(ToolCall("x", "bash", "{}"),)), ""),
        (Message("assistant", "\n\n", thinking=(Thinking("hm"),)), ""),
        (Message("assistant", "\n\nso", thinking=(Thinking("hm"),)), "\n\nso"),
        (Message("assistant", "\n\n"), "\n\n"),
    ],
    ids=["before a call", "after thinking", "text", "all there is"],
)
def test_b20_mode_messages_shows_no_blank_text_beside_others(message: Message, text: str) -> None:
    """vLLM's parsers leave the template's newlines between thinking and call as a content of their own; an empty text block is what
    Anthropic refuses in a history."""
    session = Session(TokenPath(None, model="m", renderer=None, mode="messages"))
    plan = session.ask(user("u"), tools=TOOLS)
    assert session.answer(plan, [], generation=made([1, 2], "stop", message=message)).answer.message.text == text


@pytest.mark.parametrize(("text", "known", "tokens"), [("<think>\nhm\n</think>\n\nok", True, 5), ("no mark", True, 2), ("x", False, 1)])
def test_b77_mode_messages_counts_reasoning(qwen3_path: TokenPath, text: str, known: bool, tokens: int) -> None:
    """By the mark among the ids; without one, or without a tokenizer, as the engine says, but never more than was sampled."""
    path = TokenPath(qwen3_path.tokenizer if known else None, model="m", renderer=None, mode="messages")
    session = Session(path)
    plan = session.ask(user("u"))
    generation = made(qwen3_path.tokenizer.encode(text), "stop", message=Message("assistant", "ok", thinking=(Thinking("hm"),)))
    generation.completion_tokens, generation.reasoning_tokens = len(generation.token_ids), 9
    reading = session.answer(plan, [], generation=generation)
    assert reading.answer.usage.thinking == reading.thinking_tokens == tokens


def test_mode_messages_needs_no_tokenizer() -> None:
    path = TokenPath(None, model="m", renderer=None, mode="messages")
    session = Session(path)
    plan = session.ask(user("u"), tools=TOOLS)
    generation = made([1, 2], "tool_calls", message=Message("assistant", "", tool_calls=(ToolCall("x", "bash", "{"),)))
    answer = session.answer(plan, [], generation=generation).answer
    assert answer.message.text == '{"name": "bash", "arguments": {}'
    assert path.count(plan.request) > 0
    assert plan.prompt_ids is None


def test_qwen35_reads_and_bridges(qwen3_path: TokenPath) -> None:
    session = Session(TokenPath(qwen3_path.tokenizer, model="m", renderer="qwen3.5", mode="tokens"))
    block = "<tool_call>\n<function=bash>\n<parameter=command>\nls -l\n</parameter>\n</function>\n</tool_call>"
    reading = session.answer(session.ask(user("u"), tools=TOOLS), f"hm\n</think>\n\nok\n{block}<|im_end|>")
    message = reading.message
    assert (message.reasoning, message.text) == ("hm", "ok")
    assert message.tool_calls[0].arguments == '{"command": "ls -l"}'
    plan = session.ask(user("u"), message, Message("tool", "r", tool_call_id=message.tool_calls[0].id), tools=TOOLS)
    assert plan.bridged
    bad = session.answer(plan, "x</think>\n\n<tool_call>\nno function\n</tool_call><|im_end|>")
    assert bad.answer.message.text == "<tool_call>\nno function\n</tool_call>"


EDIT = Tool(
    "edit",
    None,
    {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "list": {"type": ["string", "null"]},
            "any": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "one": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
            "free": {},
        },
    },
)


@pytest.mark.parametrize(
    ("name", "written", "arguments"),
    [
        ("text", "    return x\n", '{"text": "    return x\\n"}'),
        ("text", "\n\n  a\n\n", '{"text": "\\n\\n  a\\n\\n"}'),
        ("text", "  ", '{"text": "  "}'),
        ("text", "12", '{"text": "12"}'),
        ("count", " 12 ", '{"count": 12}'),
        ("count", "many", '{"count": "many"}'),
        ("list", " word ", '{"list": " word "}'),
        ("list", "12", '{"list": "12"}'),
        ("list", "null", '{"list": null}'),
        ("any", "true", '{"any": "true"}'),
        ("any", "null", '{"any": null}'),
        ("one", "12", '{"one": 12}'),
        ("free", "a word", '{"free": "a word"}'),
        ("free", "[1]", '{"free": [1]}'),
        ("other", "a word ", '{"other": "a word "}'),
    ],
)
def test_values_that_are_no_json_are_read_as_written(qwen3_path: TokenPath, name: str, written: str, arguments: str) -> None:
    """An editor's text begins with its indentation, and a word is a word though the tool takes null, too: such calls used to lose the
    one, and to be no calls for the other. vLLM reads all of these so."""
    session = Session(TokenPath(qwen3_path.tokenizer, model="m", renderer="qwen3.5", mode="tokens"))
    block = f"<tool_call>\n<function=edit>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    reading = session.answer(session.ask(user("u"), tools=(EDIT,)), f"hm\n</think>\n\n{block}<|im_end|>")
    assert [(call.name, call.arguments) for call in reading.message.tool_calls] == [("edit", arguments)]
    assert reading.tags == frozenset()


@pytest.mark.parametrize(
    "inside",
    [
        "<function=edit>\n<parameter=text>\nno end\n</function>",
        "<function=edit>\n<parameter=text>\na\n</parameter>\nb\n</parameter>\n</function>",
        "<function=edit>\n<parameter=text>\na\n</parameter>\n</function>\n<function=bash>\n</function>",
        "words <function=edit>\n</function>",
        "{words} <function=edit>\n</function>",
        "<function=edit>\nwords\n</function>",
        '<function=edit>\n{"text": {}}\n</function>',
        "<parameter=text><function=edit></parameter>",
    ],
    ids=["no end", "two ends", "two functions", "words before", "an object before", "words", "an object", "no function"],
)
def test_a_call_with_parts_that_nobody_would_see_is_text(qwen3_path: TokenPath, inside: str) -> None:
    session = Session(TokenPath(qwen3_path.tokenizer, model="m", renderer="qwen3.5", mode="tokens"))
    block = f"<tool_call>\n{inside}\n</tool_call>"
    reading = session.answer(session.ask(user("u"), tools=(EDIT,)), f"hm\n</think>\n\n{block}<|im_end|>")
    assert reading.message == Message("assistant", block, thinking=(Thinking("hm"),))
    assert reading.tags == {"tool_call_malformed"}


def test_a_value_may_hold_the_marks_of_others(qwen3_path: TokenPath) -> None:
    session = Session(TokenPath(qwen3_path.tokenizer, model="m", renderer="qwen3.5", mode="tokens"))
    text = "<function=x> </function> <parameter=y>"
    block = f"<tool_call>\n<function=edit>\n<parameter=text>\n{text}\n</parameter>\n</tool_call>"
    reading = session.answer(session.ask(user("u"), tools=(EDIT,)), f"hm\n</think>\n\n{block}<|im_end|>")
    assert [call.arguments for call in reading.message.tool_calls] == [f'{{"text": "{text}"}}']


def attempt(raw: str, arguments: dict[str, object], *, name: str = "edit", unknown: bool = False) -> ParsedToolCall:
    """A call's block as the library gives it for formats that have no renderer among the tests' models."""
    status = ToolCallParseStatus.UNKNOWN_TOOL if unknown else ToolCallParseStatus.OK
    return ParsedToolCall(raw=raw, name=name, arguments=arguments, token_span=None, status=status)


@pytest.mark.parametrize(
    "raw",
    [
        "edit<arg_key>text</arg_key>\n<arg_value>  a\n</arg_value>",
        "edit<tool_sep:x>\n<arg_key:x>text</arg_key:x>\n<arg_value:x>  a\n</arg_value:x>\n",
        '<invoke name="edit"><parameter name="text">\n  a\n\n</parameter></invoke>',
    ],
    ids=["glm", "hy3", "minimax"],
)
def test_whitespace_is_kept_in_every_such_format(raw: str) -> None:
    assert read_call(attempt(raw, {"text": "a", "count": 1}), (EDIT,)) == ("edit", '{"text": "  a\\n", "count": 1}')


MARKED = {"text": "see <function=x> and <parameter=y>"}


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps(MARKED),
        f"functions.edit:0<|tool_call_argument_begin|>{json.dumps(MARKED)}",
        f"function<｜tool▁sep｜>edit\n```json\n{json.dumps(MARKED)}\n```",
        f'{{"name": "edit", "parameters": {json.dumps(MARKED)}}}',
        f'call:edit{{text:<|"|>{MARKED["text"]}<|"|>}}',
        f'<｜DSML｜invoke name="edit">\n<｜DSML｜parameter name="text" string="true">{MARKED["text"]}</｜DSML｜parameter>\n',
    ],
    ids=["harmony", "kimi", "deepseek v3", "llama", "gemma", "deepseek v4"],
)
def test_a_value_may_hold_the_marks_of_another_format(raw: str) -> None:
    assert read_call(attempt(raw, MARKED), (EDIT,)) == ("edit", json.dumps(MARKED))


@pytest.mark.parametrize("own", [{"name": "x", "arguments": {"a": 1}}, {"arguments": ["a"]}], ids=["object", "list"])
def test_a_tool_may_have_an_argument_called_arguments(own: dict[str, object]) -> None:
    """A format whose block is the arguments and nothing around them (harmony): the tool was given the inner ones, or nothing."""
    assert read_call(attempt(json.dumps(own), own, name="call_tool")) == ("call_tool", json.dumps(own))


def test_two_calls_of_one_block_have_their_own_values() -> None:
    raw = "".join(f'<invoke name="edit"><parameter name="any">{value}</parameter></invoke>' for value in (1, 2))
    assert [read_call(attempt(raw, {"any": value}), (EDIT,)) for value in (1, 2)] == [("edit", '{"any": "1"}'), ("edit", '{"any": "2"}')]


@pytest.mark.parametrize(
    "raw",
    [
        "edit<arg_key>text</arg_key><arg_value>no end",
        "edit<arg_key>text</arg_key>words<arg_value>a</arg_value>",
        "edit<arg_key>text</arg_key>{}",
        "edit<arg_key>text</arg_key><arg_value>a</arg_value>words",
        '<invoke name="edit"><parameter name="text">no end</invoke>',
        '<invoke name="edit"><parameter name="text">one</invoke> of two</parameter></invoke>',
        '<invoke name="edit">words</invoke>',
        'words<invoke name="edit"></invoke>',
    ],
    ids=[
        "glm",
        "glm, words",
        "glm, an object",
        "glm, words after",
        "minimax",
        "minimax, an end within",
        "minimax, words",
        "minimax, words before",
    ],
)
def test_what_the_library_left_out_makes_it_no_call_in_every_such_format(raw: str) -> None:
    assert read_call(attempt(raw, {}, unknown=True), (EDIT,)) is None


def test_a_format_without_marks_of_its_own_keeps_what_it_cannot_read(qwen3_path: TokenPath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.tokens.rendering._TAGGED", frozenset())
    session = Session(TokenPath(qwen3_path.tokenizer, model="m", renderer="qwen3", mode="tokens"))
    text = call_text("bash", "{}") + "\n<tool_call>\noops\n</tool_call>"
    plan = session.ask(user("u"), tools=TOOLS)
    reading = session.answer(plan, f"<think>\nhm\n</think>\n\n{text}<|im_end|>")
    assert (reading.message.reasoning, reading.message.text.strip()) == ("hm", text)
    assert reading.tags == {"tool_call_malformed"}
    good = session.answer(plan, "<think>hm</think>ok" + call_text("bash", '{"a":  1}') + "<|im_end|>")
    assert (good.message.text, good.message.tool_calls[0].arguments) == ("ok", '{"a":  1}')
    assert session.answer(plan, "<think>open", finish="length").tags == {"thinking_open"}


@pytest.mark.parametrize("renderer", ["prime-qwen3", "qwen3.5"])
def test_text_beside_calls_is_kept_in_the_xml_form_too(qwen3_path: TokenPath, renderer: str) -> None:
    session = Session(TokenPath(qwen3_path.tokenizer, model="m", renderer=renderer, mode="tokens"))
    block = "<tool_call>\n<function=bash>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"
    answer = read(session, f"</think>one\n{block}\ntwo\n{block} three<|im_end|>")
    assert answer.message.text.removeprefix("</think>") == "one\ntwo\nthree"
    assert len(answer.message.tool_calls) == 2


def test_another_format_keeps_what_it_cannot_read(words_path: TokenPath) -> None:
    """The word tokenizer has the marks, so the real Qwen3 renderer runs on it."""
    session = Session(words_path)
    plan = session.ask(user("what now?"), tools=TOOLS)
    reading = session.answer(plan, words_path.tokenizer.split("I see.\n" + call_text("bash", '{"command": "ls"}') + "<|im_end|>"))
    assert reading.message.tool_calls[0].arguments == '{"command": "ls"}'
    following = session.ask(user("what now?"), reading.message, Message("tool", "r", tool_call_id="x"), tools=TOOLS)
    assert following.bridged
