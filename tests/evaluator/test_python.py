"""`python`: functions of the task's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from evaluator_lab import Lab, work

from polar.errors import ConfigError, EvaluatorError
from polar.evaluator import Evidence, Verdict, make

CODE = """
import time
from polar.evaluator import Verdict

def length(evidence, factor=1.0):
    return len(evidence.answer) * factor

async def rich(evidence):
    return {"reward": 0.5, "metrics": {"m": 1}, "report": {"task": evidence.task, "patch": evidence.patch.decode()}}

def verdict(evidence):
    return Verdict(0.25, metrics={"n": 2})

def broken(evidence):
    raise RuntimeError("it broke")

def slow(evidence):
    time.sleep(30)

def leaves_a_process(evidence):
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print("x" * 1000, flush=True)
    return 1

def nothing(evidence):
    return None

def odd(evidence):
    return {"reward": 1, "reword": 2}

def infinite(evidence):
    return float("inf")

def exits(evidence):
    raise SystemExit("usage: grade")

async def leaves(evidence):
    raise SystemExit(2)

def stops(evidence):
    return next(iter([]))

def dies(evidence):
    import os
    print("last words")
    os._exit(3)
"""


@pytest.fixture
def code(task_folder: Path) -> None:
    (task_folder / "grade.py").write_text(CODE)


async def call(lab: Lab, name: str, *, subprocess: bool, **config: Any) -> Verdict:
    evaluator = make("python", {"function": f"grade.py:{name}", "subprocess": subprocess, **config})
    return await evaluator.evaluate(lab.evidence(None, answer="four", patch=b"diff"))


@pytest.mark.parametrize("subprocess", [False, True])
async def test_what_a_function_may_give(lab: Lab, code: None, subprocess: bool) -> None:
    assert (await call(lab, "length", subprocess=subprocess, kwargs={"factor": 0.5})).reward == 2
    rich = await call(lab, "rich", subprocess=subprocess)
    assert (rich.reward, rich.metrics, rich.report) == (0.5, {"m": 1}, {"task": "t", "patch": "diff"})
    plain = await call(lab, "verdict", subprocess=subprocess)
    assert (plain.reward, plain.metrics) == (0.25, {"n": 2})


@pytest.mark.parametrize("subprocess", [False, True])
@pytest.mark.parametrize(
    ("name", "said"),
    [("broken", "it broke"), ("nothing", "NoneType"), ("odd", "reword"), ("infinite", "finite"), ("missing", "cannot be loaded")],
)
async def test_what_it_must_not_give_is_an_error_and_no_zero(lab: Lab, code: None, subprocess: bool, name: str, said: str) -> None:
    with pytest.raises(EvaluatorError, match=said):
        await call(lab, name, subprocess=subprocess)


async def test_a_slow_function_is_ended_with_its_process(lab: Lab, code: None) -> None:
    with pytest.raises(EvaluatorError, match="did not return"):
        await call(lab, "slow", subprocess=True, timeout_seconds=0.5)


async def test_a_function_that_dies_is_told_with_its_last_words(lab: Lab, code: None) -> None:
    with pytest.raises(EvaluatorError, match=r"exit code 3.*last words"):
        await call(lab, "dies", subprocess=True)


@pytest.mark.parametrize("subprocess", [False, True])
@pytest.mark.parametrize(("name", "said"), [("exits", "usage: grade"), ("leaves", "2"), ("stops", "StopIteration")])
async def test_a_function_that_exits_or_runs_out_of_values_ends_nothing_else(
    lab: Lab, code: None, subprocess: bool, name: str, said: str
) -> None:
    """`SystemExit` ends an event loop, and thus all of the node's sessions; no future takes a `StopIteration`, nor ends."""
    with pytest.raises(EvaluatorError, match=said):
        await asyncio.create_task(call(lab, name, subprocess=subprocess, timeout_seconds=20))


async def test_a_file_that_exits_when_it_is_loaded_ends_nothing_else(lab: Lab, task_folder: Path) -> None:
    (task_folder / "grade.py").write_text("import sys\nsys.exit('not for import')\n")
    with pytest.raises(EvaluatorError, match="not for import"):
        await asyncio.create_task(call(lab, "any", subprocess=False))


async def test_two_tasks_may_use_one_file_name(lab: Lab, code: None, task_folder: Path) -> None:
    await call(lab, "length", subprocess=False)
    (task_folder / "grade.py").write_text("def length(evidence): return 7\n")
    assert (await call(lab, "length", subprocess=False)).reward == 7


async def in_sandboxes(evidence: Evidence) -> float:
    """Compares what the agent left with a fresh sandbox."""
    assert evidence.agent is not None
    async with evidence.fresh() as fresh:
        mine, its = await fresh.exec("ls"), await evidence.agent.exec("ls")
    return float(mine.text == "" and its.text == "made\n")


async def test_a_function_of_a_module_may_use_sandboxes(lab: Lab) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "touch made")
        evaluator = make("python", {"function": f"{__name__}:in_sandboxes", "needs_fresh": True})
        assert evaluator.needs_fresh
        assert (await evaluator.evaluate(lab.evidence(agent))).reward == 1


def test_wrong_settings_are_told_at_submission() -> None:
    for function in ("no_colon", ":f", "m:", "m:not a name"):
        with pytest.raises(ConfigError):
            make("python", {"function": function})


async def test_what_a_function_leaves_running_holds_its_answer_up_no_longer(lab: Lab, code: None) -> None:
    assert (await call(lab, "leaves_a_process", subprocess=True, timeout_seconds=20)).reward == 1
    assert any(path.read_text().startswith("x" * 1000) for path in lab.root.glob("evidence-*/python.log"))
