"""A word tokenizer that round-trips, for exact tests without a model's files.

It knows the marks of the Qwen3 chat format as single tokens, so the real `qwen3` renderer runs on top of it: rendering, bridging and
parsing are the production code. Ids are given out as words come up, so they mean something within one instance only.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import Any

MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_WORDS = re.compile("|".join(map(re.escape, MARKS)) + r"|\w+|\n|[^\S\n]+|[^\w\s]")


class WordTokenizer:
    """One token a word, a run of blanks, a newline or a sign. `decode(encode(text)) == text` for every text; the reverse does not hold
    for `split`.

    Satisfies the `Tokenizer` protocol of `renderers`. Safe to use from several threads.
    """

    name_or_path = "words"
    unk_token_id: int | None = None
    bos_token_id: int | None = None
    bos_token: str | None = None
    eos_token: str | None = "<|im_end|>"
    chat_template: str | None = None
    template_hash: str | None = None
    hash = "words"

    def __init__(self) -> None:
        self._words: list[str] = list(MARKS)
        self._ids: dict[str, int] = {word: number for number, word in enumerate(self._words)}
        self._lock = threading.Lock()
        self.eos_token_id: int | None = self._ids["<|im_end|>"]

    def __len__(self) -> int:
        return len(self._words)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [self._id(word) for word in _WORDS.findall(text)]

    def split(self, text: str) -> list[int]:
        """The same text in other tokens, one a character (marks stay whole): ids that do not survive decoding and encoding again."""
        pieces: list[str] = []
        for word in _WORDS.findall(text):
            pieces.extend([word] if word in MARKS else word)
        return [self._id(piece) for piece in pieces]

    def decode(self, token_ids: Any, **_: Any) -> str:
        ids: Iterable[int] = [token_ids] if isinstance(token_ids, int) else token_ids
        return "".join(self._words[int(one)] for one in ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """`None` for a token that has not come up yet."""
        if isinstance(tokens, str):
            return self._ids.get(tokens)
        return [self._ids.get(token) for token in tokens]

    def _id(self, word: str) -> int:
        known = self._ids.get(word)
        if known is not None:
            return known
        with self._lock:
            known = self._ids.get(word)
            if known is None:
                known = len(self._words)
                self._words.append(word)
                self._ids[word] = known
            return known
