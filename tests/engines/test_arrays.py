import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.engines.arrays import ids_array, ids_from_names, logprobs_array, name_or_id, settle
from polar.engines.base import Generation
from polar.engines.http import loads

FINITE = st.floats(min_value=-9000, max_value=0, width=32)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=50))
def test_ids_come_through_exactly(ids: list[int]) -> None:
    array = ids_array(ids)
    assert array is not None
    assert array.dtype == np.int32
    assert array.tolist() == ids
    named = ids_from_names([f"token_id:{token}" for token in ids])
    assert named is not None
    assert named.tolist() == ids


@pytest.mark.parametrize("bad", [None, "12", [1, None], [1.5], ["7"], [True], [[1]], [-1], [2**31], {}])
def test_what_is_no_list_of_ids_is_missing_not_guessed(bad: object) -> None:
    assert ids_array(bad) is None


@pytest.mark.parametrize(
    "bad", [None, ["hello"], ["token_id:"], ["token_id:x"], [3], ["token_id:1", None], ["token_id:1\ntoken_id:2", ""], ["", "token_id:1"]]
)
def test_names_that_are_no_ids_are_missing(bad: object) -> None:
    assert ids_from_names(bad) is None


@given(st.lists(FINITE, max_size=30))
def test_logprobs_are_lossless_float32(values: list[float]) -> None:
    array = logprobs_array(values)
    assert array is not None
    assert array.dtype == np.float32
    assert array.tolist() == values


@given(st.lists(FINITE | st.sampled_from([None, -9999.0, -math.inf, math.inf, math.nan]), max_size=30))
def test_b95_missing_logprobs_become_nan_in_place(values: list[float | None]) -> None:
    array = logprobs_array(values)
    assert array is not None
    for value, stored in zip(values, array.tolist(), strict=True):
        if value is None or not math.isfinite(value) or value <= -9999.0:
            assert math.isnan(stored)
        else:
            assert stored == value


def test_b95_nan_and_infinity_literals_are_read() -> None:
    body = loads(b'{"logprobs": [-1.5, -Infinity, NaN, null]}')
    array = logprobs_array(body["logprobs"])
    assert array is not None
    assert array[0] == -1.5
    assert np.isnan(array[1:]).all()
    assert "NaN" in json.dumps(body)


def test_alternatives_named_by_id_become_integers() -> None:
    assert name_or_id("token_id:42") == 42
    assert name_or_id("token_id:") == "token_id:"
    assert name_or_id("hello") == "hello"


def generation(ids: list[int] | None, logprobs: list[float] | None, prompt: list[int] | None = None) -> Generation:
    return Generation(
        prompt_ids=None if prompt is None else np.array(prompt, np.int32),
        token_ids=None if ids is None else np.array(ids, np.int32),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        finish="stop",
    )


@pytest.mark.parametrize(
    ("made", "count", "reason"),
    [
        (generation([5, 6], [-1, -2], [1]), 2, None),
        (generation(None, None, [1]), 2, "no sampled ids"),
        (generation([5, 6], [-1, -2], None), 2, "no prompt ids"),
        (generation([5, 6], [-1, -2], []), 2, "no prompt ids"),
        (generation([5, 6], None, [1]), 2, "no log-probabilities"),
        (generation([5, 6], [-1], [1]), 2, "1 log-probabilities for 2 ids"),
        (generation([5, 6], [-1, -2], [1]), 3, "2 ids and counts 3"),
        (generation([5, 6], [-1, -2], [1]), None, None),
    ],
)
def test_b93_half_records_are_named_and_never_trained(made: Generation, count: int | None, reason: str | None) -> None:
    settle([made], count, prompt_expected=True)
    if reason is None:
        assert made.untrainable is None
    else:
        assert made.untrainable is not None
        assert reason in made.untrainable


def test_b92_the_count_of_several_choices_is_their_sum() -> None:
    both = [generation([5, 6], [-1, -2]), generation([7], [-3])]
    settle(both, 3, prompt_expected=False)
    assert [item.untrainable for item in both] == [None, None]
    settle(both, 2, prompt_expected=False)
    assert all(item.untrainable for item in both)


def test_logprobs_that_do_not_line_up_are_dropped() -> None:
    made = generation([5, 6], [-1], [1])
    settle([made], 2, prompt_expected=True)
    assert made.logprobs is None


def test_a_server_that_counts_another_prompt_than_it_was_sent_is_not_trained() -> None:
    """SGLang with `--allow-auto-truncate` drops the end of a prompt and answers what is left (mmcdermott/MEDS_EIC_AR#171)."""
    for counted, trainable in ((3, True), (0, True), (2, False), (4, False)):
        made = generation([5, 6], [-1, -2])
        made.prompt_tokens = counted
        settle([made], 2, sent=[1, 2, 3])
        assert (made.untrainable is None) == trainable
