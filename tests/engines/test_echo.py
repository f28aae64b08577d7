"""Prompt ids that a server sends back: read as any JSON would be, whatever was read before."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.engines import echo
from polar.engines.echo import EchoedPrompts
from polar.engines.http import loads

IDS = st.lists(st.integers(0, 151_000), max_size=40)
SEPARATORS = st.sampled_from([(",", ":"), (", ", ": "), (" , ", " :  ")])


@pytest.fixture(autouse=True)
def short_lists_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(echo, "_SHORT", 0)


def plain(answer: Any) -> Any:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in answer.items()}


@settings(deadline=None)
@given(st.lists(st.tuples(IDS, st.booleans(), SEPARATORS), min_size=1, max_size=5), st.sampled_from(["first", "last"]))
def test_the_answer_is_what_a_parser_makes_of_it(turns: list[tuple[list[int], bool, tuple[str, str]]], place: str) -> None:
    prompts = EchoedPrompts()
    prompt: list[int] = []
    for more, extends, separators in turns:
        prompt = prompt + more if extends else more
        rest = {"choices": [{"text": 'a "prompt_token_ids": [1] \\"', "token_ids": [1, 2]}]}
        field = {"prompt_token_ids": prompt}
        raw = json.dumps({**field, **rest} if place == "first" else {**rest, **field}, separators=separators).encode()
        answer = prompts.read(raw, "one", loads)
        assert plain(answer) == loads(raw)
        if prompt:
            assert answer["prompt_token_ids"].dtype == np.int32


def test_only_what_is_new_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(echo.orjson, "loads", lambda raw, real=echo.orjson.loads: parsed.append(raw) or real(raw))
    prompts = EchoedPrompts()
    prompts.read(b'{"prompt_token_ids":[1,2,3]}', "one", json.loads)
    assert prompts.read(b'{"prompt_token_ids":[1,2,3,44,5]}', "one", json.loads)["prompt_token_ids"].tolist() == [1, 2, 3, 44, 5]
    assert prompts.read(b'{"prompt_token_ids":[1,2,3,44,57]}', "one", json.loads)["prompt_token_ids"].tolist() == [1, 2, 3, 44, 57]
    assert parsed == [b"[1,2,3]", b"[44,5]", b"[1,2,3,44,57]"]


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt_token_ids": [1, null, 3]}',
        b'{"prompt_token_ids": [1, 2.5]}',
        b'{"prompt_token_ids": [[1], 2]}',
        b'{"prompt_token_ids": ["]", 2]}',
        b'{"prompt_token_ids": null}',
        b'{"prompt_token_ids": []}',
        b'{"choices": [{"prompt_token_ids": [1, 2]}]}',
        b'{"choices": [{"prompt_token_ids": [1, 2]}], "prompt_token_ids": [3]}',
        b'{"a\\"prompt_token_ids": [1, 2]}',
        b'["prompt_token_ids", [1]]',
        b'{"error": {"message": "no"}}',
    ],
)
def test_other_forms_are_parsed_as_ever(raw: bytes) -> None:
    prompts = EchoedPrompts()
    for _ in range(2):
        assert plain_any(prompts.read(raw, "one", loads)) == loads(raw)


def plain_any(answer: Any) -> Any:
    return plain(answer) if isinstance(answer, dict) else answer


def test_a_broken_text_raises_what_the_parser_raises() -> None:
    with pytest.raises(json.JSONDecodeError):
        EchoedPrompts().read(b'{"prompt_token_ids": [1, 2}', "one", json.loads)


def test_memory_is_bounded() -> None:
    prompts = EchoedPrompts(capacity=1000)
    for number in range(50):
        prompts.read(json.dumps({"prompt_token_ids": list(range(20))}).encode(), number, loads)
    assert prompts._latest.size <= 1000
    assert len(prompts._latest) > 1
