"""The demo's prefix walk: laws 2 and 3 on arbitrary sessions."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from polar.chat import Message
from polar.demo.rows import walk
from polar.harness import Tag
from polar.records import Completion

MAIN = Tag("main", "test")


def completion(number: int, prompt: list[int], sampled: list[int], **more: object) -> Completion:
    fields: dict[str, object] = {
        "session": "s",
        "number": number,
        "status": "complete",
        "dialect": "openai_chat",
        "mode": "tokens",
        "messages": (Message("user", "x"),),
        "answer": Message("assistant", "y"),
        "finish": "stop",
        "prompt_ids": np.array(prompt, np.int32),
        "sampled_ids": np.array(sampled, np.int32),
        "logprobs": np.full(len(sampled), -0.5, np.float32),
    }
    return Completion(**{**fields, **more})  # type: ignore[arg-type]


def main(_: Completion) -> Tag:
    return MAIN


def test_a_prompt_that_extends_the_row_joins_it() -> None:
    found = walk([completion(0, [1, 2], [3]), completion(1, [1, 2, 3, 4], [5, 6])], main)
    (row,) = found.rows
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.mask.tolist() == [False, False, True, False, True, True]
    assert np.isnan(row.logprobs[~row.mask]).all()
    assert row.completions == [0, 1]


def test_a_prompt_that_differs_by_one_id_starts_a_row() -> None:
    found = walk([completion(0, [1, 2], [3]), completion(1, [1, 2, 9, 4], [5])], main)
    assert [row.ids.tolist() for row in found.rows] == [[1, 2, 3], [1, 2, 9, 4, 5]]


def test_two_answers_to_one_prompt_are_two_rows() -> None:
    found = walk([completion(0, [1], [2]), completion(1, [1], [2])], main)
    assert len(found.rows) == 2
    assert found.in_rows == 2


def test_what_is_not_trained_stands_in_the_ledger_under_its_reason() -> None:
    calls = [
        completion(0, [1], [2, 3], status="aborted"),
        completion(1, [1], [2], untrainable="engine was not checked"),
        completion(2, [1], [2, 3, 4], tags=frozenset({"constrained"})),
        completion(3, [1], [2], logprobs=np.array([np.nan], np.float32)),
        completion(4, [1], [2], logprobs=None),
    ]
    found = walk(calls, main)
    assert not found.rows
    assert found.ledger == {
        "aborted": 2,
        "engine was not checked": 1,
        "constrained sampling": 3,
        "missing log-probability": 1,
        "ids or log-probabilities are missing": 1,
    }


def test_a_call_that_the_recipe_sets_aside_names_its_rule() -> None:
    found = walk([completion(0, [1], [2])], lambda _: Tag("title", "pi: title prompt"))
    assert found.ledger == {"title (pi: title prompt)": 1}


ids = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(
    st.lists(
        st.tuples(
            ids, ids, st.booleans(), st.sampled_from([frozenset(), frozenset({"constrained"})]), st.sampled_from(["complete", "aborted"])
        ),
        max_size=12,
    )
)
def test_every_sampled_token_is_counted_once_and_only_after_what_the_engine_saw(
    calls: list[tuple[list[int], list[int], bool, frozenset[str], str]],
) -> None:
    made: list[Completion] = []
    for number, (prompt, sampled, extend, tags, status) in enumerate(calls):
        before = made[-1].ids.tolist() if extend and made else []  # type: ignore[union-attr]
        made.append(completion(number, before + prompt, sampled, tags=tags, status=status))
    found = walk(made, main)
    assert found.in_rows + found.ledgered == found.sampled == sum(len(sampled) for _, sampled, *_ in calls)
    seen: list[int] = []
    for row in found.rows:
        for number in row.completions:
            one = made[number]
            assert one.prompt_ids is not None
            assert one.sampled_ids is not None
            start = len(one.prompt_ids)
            assert row.ids[:start].tolist() == one.prompt_ids.tolist()
            assert row.ids[start : start + len(one.sampled_ids)].tolist() == one.sampled_ids.tolist()
            assert row.mask[start : start + len(one.sampled_ids)].all()
            seen.append(number)
    assert len(seen) == len(set(seen))
