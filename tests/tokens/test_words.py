"""The encoder by words gives the library's own ids, for any text; what it does not cover it leaves alone."""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

from polar.tokens import words
from polar.tokens.tokenizer import Tokenizer
from polar.tokens.words import WordEncoder, word_encoder

SOURCES = sorted((Path(__file__).parents[2] / "src" / "polar" / "tokens").glob("*.py"))
MARKS = ["<|im_end|>", "<think>", "</tool_call>", "'s", "'S", "don't", "0123", "===", "e\u0301", "漢"]
SPACES = ["\n", "\r\n", "  ", "\t", "\x1c", "\x85", "\u2028", "\xa0"]
PIECES = st.sampled_from(MARKS + SPACES)
LINES = st.lists(st.one_of(PIECES, st.text(st.characters(max_codepoint=127)), st.text()), max_size=12).map("".join)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


@pytest.fixture(scope="module")
def encoder(qwen3: Tokenizer) -> WordEncoder:
    made = word_encoder(qwen3.backend)
    assert made is not None
    return made


@settings(max_examples=500, deadline=None)
@given(LINES)
@example("a\n\u0301b\n \n\nc")
@example("x <|im_end|>\n\n  <think>\ny")
def test_ids_are_the_librarys(qwen3: Tokenizer, encoder: WordEncoder, text: str) -> None:
    text = text.encode("utf-8", "replace").decode()
    assert encoder.encode(text, lambda part: whole(qwen3, part)) == whole(qwen3, text)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(max_codepoint=127, exclude_characters="<"), max_size=80))  # every mark begins with one
def test_ascii_needs_no_library(qwen3: Tokenizer, encoder: WordEncoder, text: str) -> None:
    def never(part: str) -> list[int]:
        raise AssertionError(part)

    assert encoder.encode(text, never) == whole(qwen3, text)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_source_code_longer_than_a_chunk(qwen3: Tokenizer, source: Path) -> None:
    text = source.read_text() * 3
    assert qwen3.encode(text) == whole(qwen3, text)


def test_only_lines_that_are_not_plain_go_to_the_library(qwen3: Tokenizer, encoder: WordEncoder) -> None:
    given_away: list[str] = []

    def note(part: str) -> list[int]:
        given_away.append(part)
        return whole(qwen3, part)

    text = "plain\nnaïve\nmore: 漢字\nplain again\n<think> is a mark\nend"
    assert encoder.encode(text, note) == whole(qwen3, text)
    assert given_away == ["naïve\nmore: 漢字\n", "<think> is a mark\n"]


def test_memory_is_bounded(qwen3: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_REMEMBERED", 50)
    small = word_encoder(qwen3.backend)
    assert small is not None
    text = " ".join(f"word{chr(97 + n % 26)}{chr(97 + n // 26)}" for n in range(400)) + " " + "x" * 500
    assert small.encode(text, lambda part: whole(qwen3, part)) == whole(qwen3, text)
    assert len(small._known) <= 50
    assert max(map(len, small._known)) <= words._LONG_WORD


def test_digits_by_threes(qwen3: Tokenizer) -> None:
    backend = Backend.from_str(qwen3.backend.to_str())
    pattern = words._PATTERNS[1]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made = word_encoder(backend)
    assert made is not None
    for text in ("1234567 12 1", "a1234b 00000000 'S 12's"):
        assert made.encode(text, lambda part: []) == backend.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("change", ["normalizer", "pattern", "prefix_space", "model", "stripping_token", "dropout", "none"])
def test_other_pipelines_are_left_to_the_library(qwen3: Tokenizer, change: str) -> None:
    backend = Backend.from_str(qwen3.backend.to_str())
    split = pre_tokenizers.Split(Regex(words._PATTERNS[0]), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    match change:
        case "normalizer":
            backend.normalizer = normalizers.Lowercase()
        case "pattern":
            backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "isolated"), level])
        case "prefix_space":
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)])
        case "model":
            backend.model = WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")
        case "stripping_token":
            backend.add_tokens([AddedToken("<mark>", lstrip=True)])
        case "dropout":
            backend.model = BPE({"a": 0}, [], dropout=0.1)
        case "none":
            backend = Backend(BPE({"a": 0}, []))
    assert word_encoder(backend) is None
