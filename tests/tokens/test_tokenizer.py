import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from renderers.base import OffsetTokenizer
from renderers.base import Tokenizer as Protocol

from polar.errors import ConfigError
from polar.testing.tokenizer import MARKS, WordTokenizer
from polar.tokens.tokenizer import Tokenizer, load_tokenizer

TEXTS = ["", "plain", " lead and trail ", "naïve 漢字 🙂", "<|im_end|>\n<think>", "a\r\n\tb", "x" * 500]


def test_it_satisfies_the_renderers_protocols(qwen3: Tokenizer) -> None:
    assert isinstance(qwen3, Protocol)
    assert isinstance(qwen3, OffsetTokenizer)
    assert qwen3("ab cd", return_offsets_mapping=True)["offset_mapping"]


@pytest.mark.parametrize("text", TEXTS)
def test_qwen3_text_round_trips(qwen3: Tokenizer, text: str) -> None:
    assert qwen3.decode(qwen3.encode(text)) == text


def test_it_equals_transformers(qwen3: Tokenizer, qwen3_tokenizer_dir: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="compared with transformers where that is installed")
    other = transformers.PreTrainedTokenizerFast.from_pretrained(qwen3_tokenizer_dir)
    for text in TEXTS:
        ids = other.encode(text, add_special_tokens=False)
        assert qwen3.encode(text) == ids
        assert qwen3.decode(ids) == other.decode(ids)
    assert qwen3.eos_token_id == other.eos_token_id
    assert qwen3.chat_template == other.chat_template
    assert len(qwen3) == len(other)


def test_long_texts_are_encoded_the_same_and_without_the_interpreters_lock(qwen3: Tokenizer) -> None:
    text = "naïve 漢字 🙂 <|im_end|>\n def f(x): return x\n" * 2000
    assert qwen3.encode(text) == qwen3.backend.encode(text, add_special_tokens=False).ids
    ticks = 0
    done = threading.Event()

    def encode() -> None:
        qwen3.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.wait(0.001):
        ticks += 1
    thread.join()
    assert ticks > 3


def test_marks_are_single_tokens(qwen3: Tokenizer) -> None:
    assert all(len(qwen3.encode(mark)) == 1 for mark in MARKS)
    assert qwen3.convert_tokens_to_ids("no such token at all") is None


def test_lone_surrogates_become_replacement_characters(qwen3: Tokenizer) -> None:
    assert qwen3.decode(qwen3.encode("a\ud800b")) == "a\ufffdb"
    assert qwen3.decode(qwen3.encode("\ud83d\ude42")) == "🙂"


def test_hashes_tell_tokenizers_and_templates_apart(qwen3: Tokenizer, qwen3_tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((qwen3_tokenizer_dir / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    other = load_tokenizer(tmp_path)
    assert other.chat_template == "{{ messages }}"
    assert other.template_hash != qwen3.template_hash
    assert other.hash == qwen3.hash


def test_tokens_named_only_in_the_config_are_added(qwen3_tokenizer_dir: Path, tmp_path: Path) -> None:
    value = json.loads((qwen3_tokenizer_dir / "tokenizer.json").read_text())
    last = value["added_tokens"].pop()
    (tmp_path / "tokenizer.json").write_text(json.dumps(value))
    entry = {key: last[key] for key in ("content", "single_word", "lstrip", "rstrip", "normalized", "special")}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {str(last["id"]): entry}}))
    assert load_tokenizer(tmp_path).encode(last["content"]) == [last["id"]]


def test_a_missing_or_broken_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError):
        load_tokenizer(tmp_path)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_word_tokenizer_round_trips(text: str) -> None:
    words = WordTokenizer()
    assert words.decode(words.encode(text)) == text
    assert words.decode(words.split(text)) == text
