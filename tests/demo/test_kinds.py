"""How a failed session is named: by what the harness told its model."""

from __future__ import annotations

import pytest

from polar.chat import JsonObject
from polar.demo.kinds import KINDS, by_family, count, kind
from polar.rollout.models import SessionResult

ANSWERS = {
    "wrong tool": "unsupported call: write",
    "wrong arguments": "failed to parse function arguments: missing field `cmd` at line 1 column 27",
    "wrong result": "Chunk ID: 1\nWall time: 0.0 seconds\nProcess exited with code 0\nOutput:\n",
}


def result(*answers: str, reward: float | None = 0.0, outcome: str = "graded", family: str = "copy") -> SessionResult:
    messages: list[JsonObject] = []
    for said in answers:
        messages += [{"role": "assistant", "content": "", "tool_calls": [{}]}, {"role": "tool", "content": said}]
    messages.append({"role": "assistant", "content": "Done."})
    return SessionResult.model_validate(
        {
            "session_id": "s",
            "task_id": "t",
            "status": "COMPLETED",
            "outcome": outcome,
            "reward": reward,
            "metadata": {"family": family},
            "trajectory": {"traces": [{"prompt_messages": [{"role": "user", "content": "x"}], "response_messages": messages}]},
        }
    )


@pytest.mark.parametrize("name", ANSWERS)
def test_a_failure_is_named_by_what_the_tool_answered(name: str) -> None:
    assert kind(result(ANSWERS[name])) == name


def test_pis_refusal_of_an_unknown_tool_is_known_too() -> None:
    assert kind(result("Tool exec_command not found")) == "wrong tool"


def test_one_accepted_call_makes_it_a_wrong_result() -> None:
    assert kind(result(ANSWERS["wrong tool"], ANSWERS["wrong result"])) == "wrong result"


def test_text_alone_is_no_tool_call() -> None:
    assert kind(result()) == "no tool call"


def test_a_passed_session_is_passed_whatever_was_refused_on_the_way() -> None:
    assert kind(result(ANSWERS["wrong tool"], reward=1.0)) == "passed"


def test_what_the_infrastructure_failed_is_in_no_number() -> None:
    lost = result(reward=None, outcome="infrastructure")
    assert kind(lost) == "no outcome"
    assert by_family([lost]) == {}


def test_every_session_is_of_one_kind() -> None:
    results = [result(said) for said in ANSWERS.values()] + [result(reward=1.0), result(reward=None, outcome="infrastructure"), result()]
    counted = count(results)
    assert sum(counted.values()) == len(results)
    assert tuple(counted) == KINDS


def test_families_are_counted_by_what_passed() -> None:
    assert by_family([result(reward=1.0), result(), result(family="edit")]) == {"copy": (1, 2), "edit": (0, 1)}
