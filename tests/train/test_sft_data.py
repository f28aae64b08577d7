"""Rows of any form become ids and a mask, and what another tokenizer made is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sft_samples import BUNDLED, VOCABULARY, exported, tokens

from polar.errors import ConfigError
from polar.tokens.tokenizer import load_tokenizer
from polar.train.sft_data import NOTHING, PICTURED, TOO_LONG, Rows, batches, read_rows, splits_of

TOKENIZER = load_tokenizer(BUNDLED)


def read(data: Path, split: str = "train", **options: Any) -> Rows:
    return read_rows(data, split, TOKENIZER, **{"vocabulary": VOCABULARY, "max_tokens": 1000, **options})


def decoded(rows: Rows) -> list[list[str]]:
    """The trained runs of each row, as text."""
    found = []
    for sample in rows.samples:
        edges = np.flatnonzero(np.diff(sample.mask.astype(np.int8), prepend=0, append=0)).tolist()
        found.append([TOKENIZER.decode(sample.ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)])
    return found


def test_pre_tokenised_rows_are_taken_as_they_are(tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7, 8, 9], "labels": [-100, -100, 7, 8, -100]}
    rows = read(exported(tmp_path, {"train": [row]}))
    assert rows.samples[0].ids.tolist() == [5, 6, 7, 8]
    assert rows.samples[0].mask.tolist() == [False, False, True, True]
    assert (rows.tokens, rows.trained) == (4, 2)


def test_training_rows_are_taken_by_their_mask(tmp_path: Path) -> None:
    row = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5], "loss_mask": [1, 0, 1], "response_logprobs": [-1, 0, -1], "metadata": {}}
    rows = read(exported(tmp_path, {"train": [row]}))
    assert rows.samples[0].ids.tolist() == [1, 2, 3, 4, 5]
    assert rows.samples[0].mask.tolist() == [False, False, True, False, True]


def test_the_first_id_has_nothing_before_it_and_is_not_trained(tmp_path: Path) -> None:
    rows = read(exported(tmp_path, {"train": [{"input_ids": [5, 6], "labels": [5, 6]}, {"input_ids": [5], "labels": [5]}]}))
    assert [sample.mask.tolist() for sample in rows.samples] == [[False, True]]
    assert rows.left_out == {NOTHING: 1}


def test_longer_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    rows = read(exported(tmp_path, {"train": [tokens(0, 20), tokens(1, 30)]}), max_tokens=20)
    assert len(rows.samples) == 1
    assert rows.left_out == {TOO_LONG: 1}


def test_a_split_is_read_alone(tmp_path: Path) -> None:
    data = exported(tmp_path, {"train": [tokens(0)], "test": [tokens(1), tokens(2)]})
    assert splits_of(data) == ["test", "train"]
    assert len(read(data, "test").samples) == 2
    with pytest.raises(ConfigError, match="no split validation; it has test, train"):
        read(data, "validation")


def test_a_file_of_rows_is_data(tmp_path: Path) -> None:
    data = exported(tmp_path, {"train": [tokens(0)]})
    assert read(data / "data" / "train-00000.jsonl").samples[0].ids.tolist() == tokens(0)["input_ids"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, "unshifted"),
        ({"input_ids": [1, 2], "labels": [1]}, "unshifted"),
        ({"prompt_ids": [1], "response_ids": [2], "loss_mask": [1, 1]}, "one length"),
        ({"prompt_ids": [1], "response_ids": [2]}, "loss_mask"),
        ({"text": "hello"}, "a row has input_ids"),
        ({"input_ids": [1.5, 2.5], "labels": [-100, 2]}, "input_ids is no list of integers"),
        ({"input_ids": [[1, 2]], "labels": [[-100, 2]]}, "input_ids is no list of integers"),
        ({"input_ids": [1, 1 << 40], "labels": [-100, -100]}, "int32"),
        ({"prompt_ids": [1], "response_ids": [2], "loss_mask": ["0"]}, "loss_mask is no list of integers"),
        ({"prompt_ids": [1], "response_ids": [2], "loss_mask": [-100]}, "other than 0 and 1"),
        ({"input_ids": [1, VOCABULARY], "labels": [-100, VOCABULARY]}, "another tokenizer"),
        ({"input_ids": [1, -2], "labels": [-100, -2]}, "another tokenizer"),
        ([1, 2], "object"),
        ({"messages": [{"content": "hi"}]}, "'role' is missing"),
    ],
)
def test_what_is_no_row_is_refused_with_its_place(tmp_path: Path, row: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"train-00000.jsonl, line 2: .*{why}"):
        read(exported(tmp_path, {"train": [tokens(0), row]}))


# --- whose ids ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        ({"tokenizer_hash": "ffff"}, "tokenizer"),
        ({"tokenizer_hash": TOKENIZER.hash, "template_hash": "ffff"}, "chat template"),
    ],
)
def test_ids_of_another_tokenizer_or_template_are_refused(tmp_path: Path, facts: dict[str, Any], what: str) -> None:
    ours = {"model": "tiny", "tokenizer_hash": TOKENIZER.hash, "template_hash": TOKENIZER.template_hash}
    data = exported(tmp_path, {"train": [tokens(0)]}, [ours, {"model": "other-7b", **facts}])
    with pytest.raises(ConfigError, match=f"ids of other-7b, whose {what} is not"):
        read(data)
    with pytest.raises(ConfigError, match=f"ids of other-7b, whose {what} is not"):
        read(data / "data" / "train-00000.jsonl")
    assert len(read(data, any_tokenizer=True).samples) == 1


def test_ids_that_nobody_vouches_for_are_taken(tmp_path: Path) -> None:
    data = exported(tmp_path, {"train": [tokens(0)]}, [{"model": "x", "tokenizer_hash": None, "template_hash": None}])
    assert len(read(data).samples) == 1
    (data / "manifest.json").unlink()
    assert len(read(data).samples) == 1


# --- conversations --------------------------------------------------------------------------------------------------------

CALL = {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"command": "ls"}'}}
TOOLS = [{"type": "function", "function": {"name": "shell", "description": "Runs.", "parameters": {"type": "object", "properties": {}}}}]


def talk(**weights: int) -> dict[str, Any]:
    """Two turns with a tool call. `first` and `second` are the weights of the answers."""
    return {
        "messages": [
            {"role": "system", "content": "You are an agent."},
            {"role": "user", "content": "List the files."},
            {"role": "assistant", "content": None, "reasoning_content": "I look.", "tool_calls": [CALL]}
            | ({"weight": weights["first"]} if weights else {}),
            {"role": "tool", "content": "a.py", "tool_call_id": "c1"},
            {"role": "assistant", "content": "There is a.py."} | ({"weight": weights["second"]} if weights else {}),
        ],
        "tools": json.dumps(TOOLS),
    }


def test_conversations_are_rendered_and_the_models_own_ids_trained(tmp_path: Path) -> None:
    rows = read(exported(tmp_path, {"train": [talk()]}))
    call = '<think>\nI look.\n</think>\n\n<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>'
    first, second = decoded(rows)[0]
    assert first == call
    assert second.endswith("There is a.py.<|im_end|>")
    assert "a.py\n</tool_response>" in TOKENIZER.decode(rows.samples[0].ids)


def test_weights_say_which_answers_are_trained(tmp_path: Path) -> None:
    rows = read(exported(tmp_path, {"train": [talk(first=0, second=1), talk(first=1, second=0), talk(first=0, second=0)]}))
    only_second, only_first = decoded(rows)
    assert [text.count("<tool_call>") for text in only_first] == [1]
    assert [text.count("There is") for text in only_second] == [1]
    assert rows.left_out == {NOTHING: 1}


def test_conversations_need_no_manifest(tmp_path: Path) -> None:
    """They are rendered here, so it does not matter what tokenizer they were recorded with."""
    assert read(exported(tmp_path, {"train": [talk()]}, [{"model": "other", "tokenizer_hash": "ffff"}])).samples


def test_a_model_without_a_renderer_is_told_what_to_do(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(BUNDLED)
    tokenizer.template_hash = "unknown"
    with pytest.raises(ConfigError, match="polar export --as tokens"):
        read_rows(exported(tmp_path, {"train": [talk()]}), "train", tokenizer, vocabulary=VOCABULARY, max_tokens=1000)


def test_images_are_refused(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]}
    with pytest.raises(ConfigError, match="images"):
        read(exported(tmp_path, {"train": [row]}))


def test_ids_that_stand_for_images_are_left_out_and_counted(tmp_path: Path) -> None:
    row = {"prompt_ids": [1, 2], "response_ids": [3], "loss_mask": [1], "response_logprobs": [-1.0], "metadata": {}}
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    rows = read(exported(tmp_path, {"train": [row | {"prompt_messages": [picture]}, row]}))
    assert [sample.ids.tolist() for sample in rows.samples] == [[1, 2, 3]]
    assert rows.left_out == {PICTURED: 1}


# --- batches --------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120), st.integers(0, 3), st.integers(0, 3))
def test_an_epoch_has_every_row_once_within_the_budget(lengths: list[int], budget: int, epoch: int, seed: int) -> None:
    found = batches(lengths, budget, epoch=epoch, seed=seed)
    assert sorted(row for batch in found for row in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[row] for row in batch) <= budget for batch in found)
    assert found == batches(lengths, budget, epoch=epoch, seed=seed)


def test_epochs_and_seeds_order_rows_anew() -> None:
    orders = {str(batches([1] * 20, 5, epoch=epoch, seed=seed)) for epoch in (0, 1) for seed in (0, 1)}
    assert len(orders) == 4


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=9), max_size=5), st.data())
def test_a_fingerprint_tells_rows_apart(masks: list[list[bool]], data: st.DataObject) -> None:
    from polar.train.sft_data import Sample

    def rows(masks: list[list[bool]], first: int = 0) -> Rows:
        return Rows(tuple(Sample(np.arange(first, first + len(m), dtype=np.int32), np.array(m, np.bool_), "") for m in masks))

    whole = rows(masks).fingerprint()
    assert whole == rows(masks).fingerprint()
    if masks:
        changed = [list(mask) for mask in masks]
        row = data.draw(st.integers(0, len(masks) - 1))
        changed[row][0] = not changed[row][0]
        assert rows(changed).fingerprint() != whole
        assert rows(masks, first=1).fingerprint() != whole
        assert rows(masks[:-1]).fingerprint() != whole
