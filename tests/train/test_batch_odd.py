"""Results that are not of our making: trained where they can be, refused with their session where not, and never an error of ours."""

from __future__ import annotations

from typing import Any

import pytest
from trainer_parts import session

from polar.errors import NotTrainable
from polar.rollout.models import SessionResult
from polar.train.batch import Recipe, make_batch
from polar.train.groups import group_of

RECIPE = Recipe(max_staleness=5)


def trained(result: SessionResult) -> int:
    return make_batch([group_of(0, (result, session("b", 0.0)))], RECIPE, policy_version=0).counts.stepped


@pytest.mark.parametrize("run", ["exp-7", 7, None, [], {"engine": "vllm"}])
def test_what_a_caller_calls_run_is_no_fact_about_the_engine(run: Any) -> None:
    """Nodes of the reference system give a task's metadata back as they are."""
    result = session("a", 1.0)
    result.metadata["run"] = run
    assert trained(result) == trained(session("a", 1.0)) > 0


@pytest.mark.parametrize("version", [0, "0", "default", "²", [1]])
def test_a_version_may_be_anything(version: Any) -> None:
    result = session("a", 1.0)
    for row in (result.trajectory or {})["traces"]:
        for span in row["metadata"]["spans"]:
            span["policy_version"] = version
    assert (trained(result) == trained(session("a", 1.0))) == (version in (0, "0"))


@pytest.mark.parametrize(
    ("place", "junk"),
    [
        (("metadata", "sampled_tokens"), None),
        (("metadata", "sampled_tokens"), [6]),
        (("traces", 0), "row"),
        (("traces", 0, "prompt_messages"), ["hello"]),
        (("traces", 0, "response_logprobs"), None),
        (("traces", 0, "metadata", "spans"), [3]),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_with_its_session(place: tuple[str | int, ...], junk: Any) -> None:
    result = session("a", 1.0)
    inner: Any = result.trajectory
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = junk
    with pytest.raises(NotTrainable, match="session a: its trajectory cannot be read"):
        trained(result)


def test_a_row_without_a_prompt_is_refused_with_its_session() -> None:
    """Nothing stands before its first id, which therefore has no log-probability."""
    result = session("a", 1.0)
    row = (result.trajectory or {})["traces"][0]
    row["prompt_ids"] = []
    del row["metadata"]["spans"]
    with pytest.raises(NotTrainable, match="session a, row 0: its first id is to be trained"):
        trained(result)
