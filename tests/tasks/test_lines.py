"""Lines of JSON: little is needed, and what is wrong is told with its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.harness.spec import AgentSpec
from polar.runtime.spec import RuntimeSpec
from polar.tasks import find, to_request

AGENT = AgentSpec(harness="shell", custom_shell="true")


def written(tmp_path: Path, *rows: Any, name: str = "some.jsonl") -> str:
    path = tmp_path / name
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_an_instruction_is_enough(tmp_path: Path) -> None:
    [first, second] = find(written(tmp_path, {"instruction": "Do it."}, "", {"prompt": "And that."}))
    assert (first.name, first.instruction, second.name, second.instruction) == ("some-1", "Do it.", "some-2", "And that.")
    assert first.warnings == ("no evaluator: its sessions get no reward",)


def test_a_whole_request_is_kept(tmp_path: Path) -> None:
    row = {"task_id": "x1", "instruction": "I", "num_samples": 3, "agent": {"harness": "pi"}, "priority": 5, "metadata": {"a": 1}}
    request = to_request(find(written(tmp_path, row))[0], task_id="x1")
    assert (request.num_samples, request.agent.harness, request.priority) == (3, "pi", 5)
    assert request.metadata == {"a": 1, "task": "x1", "split": "train"}


def test_an_answer_is_an_evaluator(tmp_path: Path) -> None:
    request = to_request(find(written(tmp_path, {"instruction": "1+1?", "answer": 2}))[0], agent=AGENT)
    assert request.evaluator is not None
    assert (request.evaluator.strategy, request.evaluator.config) == ("answer", {"expected": 2})


def test_a_lines_runtime_is_laid_over_the_callers(tmp_path: Path) -> None:
    row = {"instruction": "I", "runtime": {"image": "own"}}
    request = to_request(find(written(tmp_path, row))[0], agent=AGENT, runtime=RuntimeSpec(backend="docker", image="base", cpus=2))
    assert request.runtime is not None
    assert (request.runtime.backend, request.runtime.image, request.runtime.cpus) == ("docker", "own", 2)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "Expecting"),
        ("[1]", "not list"),
        ({"task_id": "a"}, "instruction is missing"),
        ({"instruction": " "}, "instruction is missing"),
        ({"instruction": "I", "colour": 1}, "colour"),
        ({"instruction": "I", "num_samples": 0}, "num_samples"),
        ({"instruction": "I", "prompt": "J"}, "given twice"),
        ({"instruction": "I", "answer": "1", "evaluator": {"strategy": "x"}}, "not both"),
        ({"instruction": "I", "id": "no spaces"}, "task_id"),
        ({"instruction": "I", "answer": None}, "answer is null"),
        ({"instruction": "I", "split": "test"}, "train or held_out"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(row: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"some\.jsonl:3: .*{said}"):
        find(written(tmp_path, {"instruction": "fine"}, "", row))


def test_a_line_without_an_agent_needs_one_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no agent"):
        to_request(find(written(tmp_path, {"instruction": "I"}))[0])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_instructions_survive_whatever_they_are(tmp_path: Path, texts: list[str]) -> None:
    tasks = find(written(tmp_path, *[{"instruction": text} for text in texts]))
    assert [task.instruction for task in tasks] == [text.strip() for text in texts]


@pytest.mark.parametrize("name", ["my tasks (1).jsonl", "ünï.jsonl", "_x.jsonl", "題.jsonl", f"{'long' * 40}.jsonl"])
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"instruction": "I", "id": null}\n{"instruction": "J"}\n')
    tasks = find(str(tmp_path / name))
    assert len({task.name for task in tasks}) == 2
    assert [to_request(task, agent=AGENT).instruction for task in tasks] == ["I", "J"]


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_a_byte_order_mark_is_no_content(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"some.{suffix}").write_bytes(b'\xef\xbb\xbf{"instruction": "I"}\n')
    assert [task.instruction for task in find(str(tmp_path / f"some.{suffix}"))] == ["I"]


def test_half_a_surrogate_pair_can_be_sent(tmp_path: Path) -> None:
    (tmp_path / "some.jsonl").write_text('{"instruction": "a\\ud800b"}\n')
    assert b"a" in to_request(find(str(tmp_path / "some.jsonl"))[0], agent=AGENT).model_dump_json().encode()
