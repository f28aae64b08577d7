"""Encoding by words, for the part of a text that is plain ASCII: three times as fast as the tokenizers library, to the same ids.

Byte-level BPE cuts a text into words by one regular expression, then encodes each word by itself. For ASCII text the expression means the
same to Python's `re` as to the library's engine and the NFC normaliser changes nothing, so the cut is made here; the ids of a word come
from the library's own model, once, and are remembered. Whatever is not covered goes to the library: lines with another character or an
added token, and tokenizers whose pipeline is not, to the last letter, one of those below (`word_encoder` gives `None`).

Knows no messages and no templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import chain, groupby
from typing import Any

import orjson
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

_LETTERS, _NUMBERS = r"\p{L}", r"\p{N}"
_QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = (_QWEN, _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|"))
"""Qwen 2 to 3; Llama 3 and its like, which take digits by threes."""
_LINE = re.compile(r"(?<=\n)(?=[!-~])")
"""Between a line break and a visible ASCII character every one of these expressions ends a word, whatever stands before and after."""
_BYTES = {code: chr(256 + place) for place, code in enumerate([*range(33), 127])}
"""Byte-level BPE's letters for the ASCII characters that are not visible."""
_CHUNK = 8192
"""Characters that are cut at once: the interpreter's lock is held meanwhile."""
_LONG_WORD = 32
_REMEMBERED = 1 << 16
"""Texts; some 12 MB at most."""


class WordEncoder:
    """Safe to use from several threads: a word that two of them meet at once is looked up twice."""

    def __init__(self, backend: Backend, pattern: str, added: list[str]) -> None:
        self._model = backend.model
        inside = pattern.replace(r"\s\p{L}\p{N}]", r"\sA-Za-z0-9]").replace(r"\n\p{L}\p{N}]", r"\nA-Za-z0-9]")
        self._words: Callable[[str], list[str]] = re.compile(
            inside.replace(_LETTERS, "[A-Za-z]").replace(_NUMBERS, "[0-9]"), re.ASCII
        ).findall
        self._added = re.compile("|".join(map(re.escape, added))).search if added else None
        self._known: dict[str, tuple[int, ...]] = {}
        self._short: dict[str, tuple[int, ...]] = {}
        """Short texts that the library encoded: templates write the same few marks again and again."""

    def encode(self, text: str, whole: Callable[[str], list[int]]) -> list[int]:
        """The ids of `text`; `whole` encodes the lines that are not plain, several of them together."""
        if len(text) <= _CHUNK and self._plain(text):
            return self._encode(text)
        if len(text) <= _LONG_WORD:
            known = self._short.get(text)
            return list(_remember(self._short, text, tuple(whole(text))) if known is None else known)
        ids: list[int] = []
        for plain, lines in groupby(_LINE.split(text), self._plain):
            if plain:
                for part in _gathered(lines):
                    ids += self._encode(part)
            else:
                ids += whole("".join(lines))
        return ids

    def _plain(self, text: str) -> bool:
        return text.isascii() and (self._added is None or self._added(text) is None)

    def _encode(self, text: str) -> list[int]:
        words = self._words(text)
        found: list[tuple[int, ...] | None] = list(map(self._known.get, words))
        if None in found:
            found = [self._look_up(word) if ids is None else ids for word, ids in zip(words, found, strict=True)]
        return list(chain.from_iterable(found))  # type: ignore[arg-type]

    def _look_up(self, word: str) -> tuple[int, ...]:
        ids = tuple(token.id for token in self._model.tokenize(word.translate(_BYTES)))
        return _remember(self._known, word, ids) if len(word) <= _LONG_WORD else ids


def _remember(known: dict[str, tuple[int, ...]], text: str, ids: tuple[int, ...]) -> tuple[int, ...]:
    if len(known) >= _REMEMBERED:
        known.clear()
    known[text] = ids
    return ids


def _gathered(lines: Iterator[str]) -> Iterator[str]:
    """The lines in parts of about `_CHUNK` characters."""
    part: list[str] = []
    size = 0
    for line in lines:
        part.append(line)
        size += len(line)
        if size >= _CHUNK:
            yield "".join(part)
            part, size = [], 0
    if part:
        yield "".join(part)


def word_encoder(backend: Backend) -> WordEncoder | None:
    """An encoder for this tokenizer; `None` where its pipeline is another."""
    pattern = _pattern(_state(backend.pre_tokenizer))
    model = backend.model
    normalizer, finish = _state(backend.normalizer), _state(backend.post_processor)
    added = list(backend.get_added_tokens_decoder().values())
    covered = (
        pattern in _PATTERNS
        and normalizer in (None, {"type": "NFC"})
        and (finish is None or finish.get("type") == "ByteLevel")
        and isinstance(model, BPE)
        and not any((model.dropout, model.unk_token, model.continuing_subword_prefix, model.end_of_word_suffix, model.byte_fallback))
        and all(token.content and "\n" not in token.content for token in added)
        and not any(token.lstrip or token.rstrip or token.single_word for token in added)
    )
    return WordEncoder(backend, pattern, [token.content for token in added]) if covered and pattern is not None else None


def _state(part: Any) -> Any:
    """One part of a pipeline as tokenizer.json has it; `None` where there is none."""
    return None if part is None else orjson.loads(part.__getstate__())


def _pattern(pre_tokenizer: Any) -> str | None:
    """The expression of a `Split` that is followed by a plain `ByteLevel`, the pair that these tokenizers have."""
    try:
        split, level = pre_tokenizer["pretokenizers"]
        plain = split["type"] == "Split" and split["behavior"] == "Isolated" and not split["invert"]
        plain = plain and level["type"] == "ByteLevel" and not level["add_prefix_space"] and not level["use_regex"]
        pattern = split["pattern"]["Regex"]
    except (KeyError, TypeError, ValueError):
        return None
    return pattern if plain and isinstance(pattern, str) else None
