"""Hypothesis strategies: what models sample and what harnesses do to it on the way back."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from polar.chat import Message, Thinking, ToolCall
from polar.testing.tokenizer import MARKS

SPECIAL = re.compile("(" + "|".join(map(re.escape, MARKS)) + ")")
alphabet = st.sampled_from([*"abcXYZ 019\n\t\"'\\{}[]:,.<>/éß", "漢", "🙂", "  ", "\n\n", "</", "\\u00e9", "the ", " of"])
texts = st.lists(alphabet, max_size=12).map("".join)
full_texts = st.lists(alphabet, min_size=1, max_size=12).map("".join).filter(lambda text: text.strip() != "")
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False, width=32) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, values, max_size=3)
names = st.sampled_from(["bash", "read", "no_such_tool"])
whitespace = st.sampled_from(["", " ", "\n", "\n\n", "  \n"])


@st.composite
def odd_json(draw: st.DrawFn, value: Any = None) -> str:
    """JSON text with spacing, escapes and key order that no serialiser writes."""
    value = draw(arguments) if value is None else value
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " :  "), (",\n", ":\n")]))
    return json.dumps(value, ensure_ascii=draw(st.booleans()), separators=separators)


@st.composite
def answers(draw: st.DrawFn, *, calls: bool = True, thinking: bool = True) -> str:
    """The text of a readable sampled answer, its end token included."""
    text = ""
    if thinking and draw(st.booleans()):
        text += f"<think>{draw(whitespace)}{draw(full_texts)}{draw(whitespace)}</think>{draw(whitespace)}"
    text += draw(texts) + draw(whitespace)
    blocks = draw(st.lists(st.tuples(names, odd_json()), max_size=3)) if calls else []
    for name, argument in blocks:
        body = f'{{"name": "{name}",{draw(whitespace)}"arguments":{draw(whitespace)}{argument}}}'
        text += f"<tool_call>{draw(whitespace)}{body}\n</tool_call>"
        text += draw(st.sampled_from(["", "\n"]))
    return text + "<|im_end|>"


def split_ids(tokenizer: Any, text: str, seed: int) -> list[int]:
    """Ids that decode to `text` but are not what encoding it gives: cut at random places between marks."""
    dice = random.Random(seed)
    ids: list[int] = []
    for piece in SPECIAL.split(text):
        if piece in MARKS:
            ids.extend(tokenizer.encode(piece))
            continue
        start = 0
        while start < len(piece):
            end = min(len(piece), start + dice.choice([1, 1, 2, 3, 8, 30]))
            ids.extend(tokenizer.encode(piece[start:end]))
            start = end
    return ids


@st.composite
def echoes(draw: st.DrawFn, message: Message) -> Message:
    """What some harness makes of an answer: other JSON, other whitespace, other id prefixes, thinking kept, signed or gone."""
    prefix = draw(st.sampled_from(["call_", "toolu_", ""]))
    calls = []
    for call in message.tool_calls:
        value = json.loads(call.arguments)
        if draw(st.booleans()):
            value = {key: value[key] for key in sorted(value, reverse=draw(st.booleans()))}
        text = json.dumps(value, ensure_ascii=draw(st.booleans()), separators=draw(st.sampled_from([(",", ":"), (", ", ": ")])))
        calls.append(ToolCall(prefix + call.id, call.name, text))
    thinking = draw(st.sampled_from([(), message.thinking, tuple(Thinking(block.text.strip()) for block in message.thinking)]))
    content = draw(st.sampled_from([message.text, message.text.strip(), message.text + "\n", " " + message.text]))
    return replace(message, content=content, thinking=thinking, tool_calls=tuple(calls))


@st.composite
def news(draw: st.DrawFn, answer: Message) -> list[Message]:
    """What a harness adds after an answer: a result per call, then perhaps a user message."""
    added = [Message("tool", draw(texts), tool_call_id="call_" + call.id) for call in answer.tool_calls]
    if not added or draw(st.booleans()):
        added.append(Message("user", draw(texts)))
    return added
