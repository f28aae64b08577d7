"""Turns what the scripted model says into token ids that no re-encoding gives back.

A language model samples ids, not text: it splits words where the tokenizer never would, spaces its JSON as it likes, and writes
`\\u00fc` for `ü`. The ids made here decode to exactly the intended text, and encoding that text again gives other ids: so a gateway that
re-renders a history from text cannot pass by luck.
"""

from __future__ import annotations

import json
import random
from typing import Protocol

from polar.harness.check.scenario import Call, Say

_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_SEPARATORS = ((", ", ": "), (",", ":"), (" , ", " : "), (",\n  ", ":  "))
END = "<|im_end|>"


class Encoder(Protocol):
    def encode(self, text: str) -> list[int]: ...


def answer_text(say: Say, *, thinking: bool = True) -> str:
    """The raw text of an answer in Qwen3's format, without its end token."""
    text = f"<think>\n{say.thinking}\n</think>\n\n" if thinking and say.thinking else ""
    text += say.text
    for index, call in enumerate(say.calls):
        text += ("\n" if index or say.text else "") + f"<tool_call>\n{_json(call, index)}\n</tool_call>"
    return text


def sample_ids(text: str, tokenizer: Encoder) -> list[int]:
    """Ids of `text` in unusual pieces, with the end token. The same text gives the same ids."""
    chance = random.Random(text)
    ids: list[int] = []
    for piece, special in _pieces(text):
        if special:
            ids += tokenizer.encode(piece)
            continue
        start = 0
        while start < len(piece):
            size = chance.choice((1, 2, 3, 5, 8, 13))
            ids += tokenizer.encode(piece[start : start + size])
            start += size
    return ids + tokenizer.encode(END)


def _json(call: Call, index: int) -> str:
    chance = random.Random(call.name + json.dumps(call.arguments) + str(index))
    separators = chance.choice(_SEPARATORS)
    arguments = json.dumps(call.arguments, ensure_ascii=chance.random() < 0.7, separators=separators)
    item, colon = separators
    return f'{{ "name"{colon}{json.dumps(call.name)}{item}"arguments"{colon}{arguments} }}'


def _pieces(text: str) -> list[tuple[str, bool]]:
    """The text cut at the format's markers: (piece, is a marker)."""
    pieces: list[tuple[str, bool]] = []
    rest = text
    while rest:
        at, marker = min(((at, name) for name in _SPECIAL if (at := rest.find(name)) >= 0), default=(len(rest), ""))
        if at:
            pieces.append((rest[:at], False))
        if not marker:
            break
        pieces.append((marker, True))
        rest = rest[at + len(marker) :]
    return pieces
