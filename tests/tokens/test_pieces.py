"""Decoding token by token gives what the tokenizers library gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from polar.tokens.path import TokenPath
from polar.tokens.pieces import pieces_of

lawful = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@lawful
@given(st.lists(st.integers(0, 160_000), max_size=30))
def test_any_ids_read_as_the_library_reads_them(qwen3_path: TokenPath, ids: list[int]) -> None:
    tokenizer = qwen3_path.tokenizer
    assert tokenizer.decode(ids) == tokenizer.backend.decode(ids, skip_special_tokens=False)


def test_every_token_reads_as_the_library_reads_it(qwen3_path: TokenPath) -> None:
    backend = qwen3_path.tokenizer.backend
    pieces = pieces_of(backend)
    assert pieces is not None
    ids = range(len(qwen3_path.tokenizer) + 10)
    assert [pieces.decode([one]) for one in ids] == [backend.decode([one], skip_special_tokens=False) for one in ids]


def test_added_tokens_in_other_letters_keep_their_text() -> None:
    backend = Backend(models.BPE({"a": 0, "\u0120": 1}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("<two words>"), AddedToken("漢")])
    pieces = pieces_of(backend)
    assert pieces is not None
    assert pieces.decode([0, 1, 2, 3]) == backend.decode([0, 1, 2, 3], skip_special_tokens=False) == "a <two words>漢"


def test_arrays_and_ids_outside_the_vocabulary(qwen3_path: TokenPath) -> None:
    tokenizer = qwen3_path.tokenizer
    assert tokenizer.decode(np.array([9707, 2_000_000], np.int32)) == "Hello"
    with pytest.raises(OverflowError):
        tokenizer.decode([-1])


def test_other_decoders_have_no_pieces() -> None:
    backend = Backend(models.WordLevel({"a": 0}, unk_token="a"))
    backend.decoder = decoders.Metaspace()
    assert pieces_of(backend) is None
