"""SWE-bench rows, as they are published: JSON, JSON lines, Parquet."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polar.errors import ConfigError
from polar.harness.spec import AgentSpec
from polar.runtime.spec import RuntimeSpec
from polar.tasks import find, oracle_agent, to_request
from polar.tasks.sets import SETS

AGENT = AgentSpec(harness="shell", custom_shell="true")


def row(name: str = "acme__lib-1", **more: Any) -> dict[str, Any]:
    return {
        "repo": "acme/lib",
        "instance_id": name,
        "base_commit": "abc",
        "patch": "diff --git a/x b/x\n",
        "test_patch": "diff --git a/t b/t\n",
        "problem_statement": "It breaks.",
        "FAIL_TO_PASS": '["t::a"]',
        "PASS_TO_PASS": "[]",
        "version": "1.0",
        **more,
    }


def test_the_request_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row()))
    request = to_request(find(str(path))[0], agent=AGENT, runtime=RuntimeSpec(backend="docker"))
    assert request.runtime is not None
    assert (request.runtime.image, request.runtime.workdir) == ("swebench/sweb.eval.x86_64.acme_1776_lib-1:latest", "/testbed")
    assert request.instruction.startswith("It breaks.\n\nThe repository is in /testbed.")
    assert request.evaluator is not None
    assert request.evaluator.strategy == "swebench"
    assert request.evaluator.config["instance"]["FAIL_TO_PASS"] == '["t::a"]'


def test_the_gold_patch_goes_nowhere_but_to_the_oracle(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row(patch="gold-secret", hints_text="gold-secret")]))
    [task] = find(str(path))
    assert "gold-secret" not in to_request(task, agent=AGENT).model_dump_json()
    assert (task.oracle() or {})["gold.patch"] == b"gold-secret"


@pytest.mark.parametrize("key", ["image", "image_name", "docker_image"])
def test_an_image_of_the_row_is_taken(key: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(**{key: "own:1"})))
    spec = to_request(find(str(path))[0], agent=AGENT, runtime=RuntimeSpec(backend="docker")).runtime
    assert spec is not None
    assert spec.image == "own:1"


def test_without_containers_the_repository_is_the_work_folder(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row()))
    request = to_request(find(str(path))[0], agent=AGENT, runtime=RuntimeSpec(backend="local"))
    assert request.evaluator is not None
    assert request.evaluator.config["repo_dir"] is None
    assert "current folder" in request.instruction
    assert request.runtime is not None
    assert request.runtime.workdir is None


def test_some_of_many_by_their_ids(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({name: row(name) for name in ("a__a-1", "b__b-2", "c__c-3")}))
    assert [task.name for task in find(str(path), only=["c__c-3", "a__a-1"])] == ["a__a-1", "c__c-3"]
    with pytest.raises(ConfigError, match="d__d-4"):
        find(str(path), only=["d__d-4"])


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([row("a__a-1"), row("b__b-2", FAIL_TO_PASS='["x"]')]), path)
    assert [task.name for task in find(str(path))] == ["a__a-1", "b__b-2"]


def test_a_row_that_lacks_something_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row()) + "\n" + json.dumps(row("b__b-2", base_commit="")))
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2: .*base_commit"):
        find(str(path))


def test_the_bundled_instances_are_read_as_such(tmp_path: Path) -> None:
    rows = [json.loads(path.read_text()) for path in sorted(SETS["swe"].folders[0].glob("*/instance.json"))]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    tasks = find(str(path))
    assert [task.name for task in tasks] == [one["instance_id"] for one in rows]
    assert all(oracle_agent(task).custom_shell for task in tasks)
