"""The real Qwen3 tokenizer, a token path over it, and a session that plays both sides of a conversation."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.testing.tokenizer import WordTokenizer
from polar.tokens.path import TokenPath
from polar.tokens.tokenizer import Tokenizer, load_tokenizer
from tokens.session import SECRET, Session


@pytest.fixture(scope="session")
def qwen3(qwen3_tokenizer_dir: Path) -> Tokenizer:
    return load_tokenizer(qwen3_tokenizer_dir)


@pytest.fixture(scope="session")
def qwen3_path(qwen3: Tokenizer) -> TokenPath:
    return TokenPath(qwen3, model="tiny", renderer="qwen3", mode="tokens")


@pytest.fixture
def words() -> WordTokenizer:
    return WordTokenizer()


@pytest.fixture
def session(qwen3_path: TokenPath) -> Session:
    return Session(qwen3_path, SECRET)


@pytest.fixture
def words_path(words: WordTokenizer) -> TokenPath:
    return TokenPath(words, model="words", renderer="qwen3", mode="tokens")
