"""Values that are rare but legal, and rows that no check foresaw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polar.chat import Message
from polar.records import Completion, Session
from polar.trajectory import build, validate


def row(**metadata: Any) -> Any:
    completion = Completion(
        session="s",
        number=0,
        status="complete",
        dialect="openai_chat",
        mode="tokens",
        messages=(Message("user", "q"),),
        answer=Message("assistant", "a"),
        finish="stop",
        prompt_ids=np.array([1, 2], np.int32),
        sampled_ids=np.array([3, 4], np.int32),
        logprobs=np.array([-1, -1], np.float32),
    )
    return build(Session("s", b"", b"", metadata=metadata), [completion]).traces[0]


def test_a_group_may_be_called_0() -> None:
    assert row(group_id=0, task_id="t").group_id == "0"
    assert row(task_id="t").group_id == "t"


@pytest.mark.parametrize("change", [{"reward": 10**400}, {"response_logprobs": [10**400, -1.0]}])
def test_a_number_beyond_all_bounds_is_a_problem_not_an_error(change: dict[str, Any]) -> None:
    assert validate({**row().to_json(), **change})
