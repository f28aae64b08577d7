"""From a task to a request."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.harness.spec import AgentSpec
from polar.rollout.models import ID_PATTERN
from polar.runtime.spec import RuntimeSpec
from polar.tasks import find, to_request
from polar.tasks.request import new_id

AGENT = AgentSpec(harness="pi")


@given(st.text())
def test_ids_fit_the_api_and_never_repeat(name: str) -> None:
    first, second = new_id(name), new_id(name)
    assert re.fullmatch(ID_PATTERN, first)
    assert first != second


def test_a_bundled_task_as_a_request() -> None:
    request = to_request(find("log-report")[0], agent=AGENT, num_samples=4, kind="eval", priority=3)
    assert request.task_id.startswith("log-report-")
    assert (request.num_samples, request.kind, request.priority) == (4, "eval", 3)
    assert request.metadata["task"] == "log-report"
    assert request.evaluator is not None
    assert request.evaluator.strategy == "harbor"
    assert request.task_folder is not None


def test_what_is_given_wins_and_metadata_adds_up() -> None:
    request = to_request(find("log-report")[0], agent=AGENT, timeout_seconds=5.0, metadata={"run": 1}, task_id="mine")
    assert (request.task_id, request.timeout_seconds) == ("mine", 5.0)
    assert request.metadata["run"] == 1
    assert request.metadata["split"] == "train"


def test_a_wrong_field_is_refused_with_the_task() -> None:
    with pytest.raises(ConfigError, match="task log-report: bogus: Extra inputs"):
        to_request(find("log-report")[0], agent=AGENT, bogus=1)


def test_every_bundled_task_goes_to_every_backend() -> None:
    for task in find("all"):
        for backend in ("local", "bubblewrap", "docker"):
            assert to_request(task, agent=AGENT, runtime=RuntimeSpec(backend=backend)).runtime is not None


def test_requests_survive_json() -> None:
    for task in find("swe"):
        request = to_request(task, agent=AGENT)
        assert type(request).model_validate_json(request.model_dump_json()) == request
