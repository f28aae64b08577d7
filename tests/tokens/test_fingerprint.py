import json
from dataclasses import replace

import pytest
from hypothesis import given

from polar.chat import Image, Message, Text, Thinking, Tool, ToolCall
from polar.tokens.fingerprint import canonical_json, message_digest, thinking_hash, thought, tools_part
from tokens.samples import arguments, full_texts, odd_json, texts


@given(arguments.flatmap(lambda value: odd_json(value).map(lambda text: (value, text))))
def test_arguments_count_as_values(pair: tuple[dict[str, object], str]) -> None:
    value, text = pair
    assert canonical_json(text) == canonical_json(json.dumps(value))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"a":1}', '{"a":2}'),
        ('{"a":1}', '{"a":"1"}'),
        ('{"a":1}', '{"a":true}'),
        ("{", "{}"),
        ("NaN", '"NaN"'),
        ("9007199254740991", "9007199254740990"),
    ],
)
def test_other_values_count_as_other(one: str, other: str) -> None:
    assert canonical_json(one) != canonical_json(other)


@pytest.mark.parametrize(("one", "other"), [("", "{}"), ('{"a":1.0}', '{"a":1}'), ('{"a":1e2}', '{"a":100}'), ('{"a":-0.0}', '{"a":0}')])
def test_equal_values_in_other_words(one: str, other: str) -> None:
    assert canonical_json(one) == canonical_json(other)


@pytest.mark.parametrize("number", [2**53 + 1, 1234567890123456789, -(10**18) - 1, 10**30 + 7])
def test_integers_past_doubles_count_as_javascript_echoes_them(number: int) -> None:
    echoed = int(float(number))
    assert number != echoed
    assert canonical_json(f'{{"id": {number}}}') == canonical_json(f'{{"id":{echoed}}}')


def test_no_json_breaks_it() -> None:
    for text in ("[" * 100_000, "1" * 10_000, '{"a":1e999}', '"\\ud800"', "\ud800"):
        assert canonical_json(text)


@given(full_texts)
def test_assistant_text_counts_without_outer_whitespace(text: str) -> None:
    assert message_digest(Message("assistant", text)) == message_digest(Message("assistant", f"\n {text}\n"))
    for role in ("user", "tool"):
        assert message_digest(Message(role, text)) != message_digest(Message(role, text + "\n"))


@given(texts)
def test_thinking_and_ids_do_not_count(text: str) -> None:
    message = Message("assistant", "hi", tool_calls=(ToolCall("a", "bash", "{}"),))
    other = replace(message, thinking=(Thinking(text),), refs=("x",), tool_calls=(ToolCall("b", "bash", "{ }"),))
    assert message_digest(message) == message_digest(other)


def test_thinking_that_a_harness_wrote_into_the_text_does_not_count() -> None:
    said = message_digest(Message("assistant", "I look."))
    assert message_digest(Message("assistant", "<think>\nWell.\n</think>\n\nI look.")) == said
    assert message_digest(Message("assistant", "<think>\nWell.\n</think>")) == message_digest(Message("assistant", ""))
    assert message_digest(Message("assistant", "<think>\nI look.")) != said
    assert message_digest(Message("assistant", "I <think></think>look.")) != said
    assert thought(Message("assistant", "<think>\nWell.\n</think>\n\nI look.")) == "Well."
    assert thought(Message("assistant", "I look.", (Thinking("Well."),))) == "Well."
    asked = "<think>a</think>b"
    assert message_digest(Message("user", asked)) != message_digest(Message("user", "b"))


def test_images_count_by_content() -> None:
    one, other = (Message("user", (Text("see"), Image(url))) for url in ("data:image/png;base64,AA", "data:image/png;base64,BB"))
    assert message_digest(one) != message_digest(other)
    assert message_digest(one) != message_digest(Message("user", "see"))


def test_fields_do_not_run_into_each_other() -> None:
    one = Message("assistant", "", tool_calls=(ToolCall("", "ab", "{}"),))
    assert message_digest(one) != message_digest(Message("assistant", "ab", tool_calls=(ToolCall("", "", "{}"),)))


def test_tools_count_in_order_and_by_value() -> None:
    one, other = Tool("a", "x", {"type": "object", "properties": {}}), Tool("b")
    assert tools_part([one, other]) != tools_part([other, one])
    assert tools_part([one]) == tools_part([Tool("a", "x", {"properties": {}, "type": "object"})])
    assert tools_part([]) != tools_part([one])


def test_thinking_hash_ignores_outer_whitespace() -> None:
    assert thinking_hash(" a\n") == thinking_hash("a") != thinking_hash("b")
    assert thinking_hash(" ") == b""
