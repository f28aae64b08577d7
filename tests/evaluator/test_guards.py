"""Guarded names, carried work folders, and whom a timeout is charged to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from evaluator_lab import PYTHON, Lab, work
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import EvaluatorError
from polar.evaluator import from_spec, guards, make
from polar.evaluator.budget import Budget
from polar.evaluator.guards import ALWAYS, PYTEST, Trusted, guarded, replace
from polar.evaluator.rewards import from_json, from_text
from polar.rollout.models import EvaluatorSpec
from polar.runtime import Runtime

STEER = ["conftest.py", "a/b/conftest.py", "pytest.ini", "x.pth", "a/sitecustomize.py", "pytest.py", "e.egg-info/entry_points.txt"]
HONEST = ["src/pytest.py", "src/e.egg-info/entry_points.txt", "conftest.py.txt", "calc.py", "README.md", "pytester.py"]


@pytest.mark.parametrize("path", STEER)
def test_names_that_steer_tests_are_guarded(path: str) -> None:
    assert guarded(path, PYTEST)


@pytest.mark.parametrize("path", HONEST)
def test_other_names_are_not(path: str) -> None:
    assert not guarded(path, PYTEST)


@pytest.fixture
def tasks_own(template: Path) -> None:
    (template / "sitecustomize.py").write_text("task = 1\n")
    (template / "sub").mkdir()
    (template / "sub" / "conftest.py").write_text("task = 1\n")


async def test_guarded_files_of_a_carried_folder_are_the_tasks(lab: Lab, tasks_own: None) -> None:
    async with lab.sandbox() as agent:
        await work(
            agent,
            "echo mine > sitecustomize.py; echo mine > pytest.py; rm sub/conftest.py; mkdir __pycache__; touch __pycache__/x.pyc keep",
        )
        look = "cat sitecustomize.py sub/conftest.py; ls"
        verdict = await make("command", {"command": look, "protect": ["conftest.py"]}).evaluate(lab.evidence(agent))
    assert verdict.report["output_end"].split() == ["task", "=", "1", "task", "=", "1", "keep", "sitecustomize.py", "sub"]
    assert verdict.report["carried"]["undone"] == ["pytest.py", "sitecustomize.py", "sub/conftest.py"]


async def test_modes_and_inner_links_are_carried(lab: Lab) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "mkdir -p bin; echo 'echo ran' > bin/run; chmod +x bin/run; ln -s bin/run now; mkdir empty; printf x > 'a b\nc'")
        verdict = await make("command", {"command": "./now; test -d empty && cat 'a b\nc'"}).evaluate(lab.evidence(agent))
    assert verdict.report["output_end"] == "ran\nx"


async def test_trusted_files_replace_links_and_are_not_written_through_them(lab: Lab) -> None:
    async with lab.sandbox() as box:
        await work(
            box, "mkdir out; echo old > out/file; ln -s out tests; ln -s out/file direct; mkdir folder; touch folder/x; touch parent"
        )
        files = {"tests/file": b"new", "direct": b"new", "folder": b"new", "parent/child": b"new", "gone": None}
        await replace(box, box.workdir, files, budget=Budget(60))
        found = await box.exec("cat out/file tests/file direct folder parent/child; test -L tests || echo real; test -e gone || echo none")
    assert found.text == "old\nnewnewnewnewreal\nnone\n"


@pytest.mark.parametrize("path", ["/etc/x", "../x", "a/../../x", ""])
async def test_trusted_files_stay_inside(lab: Lab, path: str) -> None:
    async with lab.sandbox() as box:
        with pytest.raises(EvaluatorError, match="not inside"):
            await replace(box, box.workdir, {path: b""}, budget=Budget(60))


SETTINGS = "[project]\nname = 'x'\nversion = '1'\n[tool.pytest.ini_options]\naddopts = '-q'\n"


@pytest.mark.parametrize(
    ("now", "undone"),
    [
        (SETTINGS, False),
        (SETTINGS.replace("'1'", "'2'"), False),
        (SETTINGS + "[tool.ruff]\nline-length = 3\n", False),
        (SETTINGS.replace("-q", "-p mine"), True),
        (SETTINGS.replace("ini_options]", "ini_options]\nx = 1"), True),
        ("not toml [", True),
        ("", True),
    ],
)
async def test_only_pytests_part_of_a_project_file_is_guarded(lab: Lab, template: Path, now: str, undone: bool) -> None:
    (template / "pyproject.toml").write_text(SETTINGS)
    async with lab.sandbox() as box:
        trusted = await Trusted.take(box, box.workdir, PYTEST, budget=Budget(60))
        await box.write(f"{box.workdir}/pyproject.toml", now.encode())
        assert (await trusted.restore(box, budget=Budget(60)) == ("pyproject.toml",)) is undone
        assert (await box.read(f"{box.workdir}/pyproject.toml")).decode() == (SETTINGS if undone else now)


def test_always_is_part_of_what_guards_a_repository() -> None:
    assert set(ALWAYS) < set(PYTEST)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_timeout_is_the_policys_only_where_tests_had_their_time() -> None:
    clock = Clock()
    budget = Budget(100, clock)
    assert budget.allowance(None).fair
    assert budget.allowance(30).seconds == 30
    clock.now = 40
    assert budget.allowance(None).fair
    assert budget.allowance(1000).seconds == 60
    assert not budget.allowance(1000).fair
    clock.now = 60
    assert not budget.allowance(None).fair
    assert budget.allowance(30).fair
    with budget.paused():
        clock.now = 500
    assert budget.left() == 40
    clock.now = 600
    with pytest.raises(EvaluatorError, match="used up"):
        budget.left()


@given(st.floats(0.001, 1e6), st.floats(0, 1e6), st.none() | st.floats(0.001, 1e6))
def test_no_command_gets_more_than_is_left_or_asked_for(total: float, passed: float, limit: float | None) -> None:
    clock = Clock()
    budget = Budget(total, clock)
    clock.now = passed
    if passed >= total:
        with pytest.raises(EvaluatorError):
            budget.allowance(limit)
        return
    given_s = budget.allowance(limit).seconds
    assert 0 < given_s <= total - passed
    assert limit is None or given_s <= limit


async def test_making_a_sandbox_takes_no_time_from_the_evaluation(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.evaluator.report.GRACE_S", 0.0)

    @asynccontextmanager
    async def slow() -> AsyncIterator[Runtime]:
        await asyncio.sleep(1.5)
        async with lab.sandbox() as runtime:
            yield runtime

    part: dict[str, Any] = {"strategy": "command", "config": {"command": "true", "carry": "none"}}
    spec = EvaluatorSpec(strategy="composition", config={"parts": [part, part]})
    verdict = await from_spec(spec).evaluate(lab.evidence(None, fresh=slow, timeout_s=2.5))
    assert verdict.reward == 1


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_finite_number_is_read_from_either_file(value: float) -> None:
    assert from_text(f" {value!r}\n").reward == value
    assert from_json(repr(value)).reward == value
    assert from_json(f'{{"reward": {value!r}}}').reward == value


@given(st.text(max_size=100))
def test_any_text_is_a_number_or_an_error(text: str) -> None:
    for read in (from_text, from_json):
        try:
            read(text)
        except EvaluatorError:
            continue


_FLOOD = """
import os
name = "n" * 200
for number in range({count}):
    os.chdir({folder!r})
    for depth in range(15):
        part = f"{{number}}{{name}}" if depth == 0 else name
        os.makedirs(part, exist_ok=True)
        os.chdir(part)
    open("conftest.py", "w").close()
os.chdir({folder!r})
open("conftest.py", "w").write("agent = 1")
"""


@pytest.mark.parametrize(("limit", "value"), [("_FLOOD", 30), ("_LISTED_BYTES", 20_000), ("_ARGUMENT_BYTES", 10_000)])
async def test_a_flood_of_guarded_files_hides_none_of_them(
    lab: Lab, tasks_own: None, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    """Their list was cut at 8 MB, and what was not in it stayed; the rest did not fit on a command line."""
    monkeypatch.setattr(guards, limit, value)
    async with lab.sandbox() as agent:
        await agent.write("flood.py", _FLOOD.format(count=60, folder=agent.workdir).encode())
        await work(agent, f"rm sub/conftest.py; {PYTHON} flood.py; rm flood.py")
        look = "find . -name conftest.py; cat sub/conftest.py"
        verdict = await make("command", {"command": look, "protect": ["conftest.py"]}).evaluate(lab.evidence(agent))
    assert verdict.report["output_end"] == "./sub/conftest.py\ntask = 1\n"


async def test_many_guarded_files_are_all_removed(lab: Lab) -> None:
    async with lab.sandbox() as agent:
        await work(agent, "for n in $(seq 900); do mkdir $n && touch $n/conftest.py $n/setup.cfg; done")
        verdict = await make("command", {"command": "find . -type f | wc -l", "protect": ["conftest.py"]}).evaluate(lab.evidence(agent))
    assert verdict.report["output_end"].strip() == "900"


@pytest.mark.parametrize("name", ["_pytest.py", "iniconfig.py", "pygments/__init__.py", "packaging/__init__.py", "py.py"])
async def test_what_stands_in_for_pytests_own_parts_goes(lab: Lab, name: str) -> None:
    async with lab.sandbox() as agent:
        await work(agent, f"mkdir -p $(dirname {name}); echo 'print(1 / 0)' > {name}; echo 'def test_it(): assert False' > test_it.py")
        verdict = await make("command", {"command": f"{PYTHON} -m pytest -q -p no:cacheprovider"}).evaluate(lab.evidence(agent))
    assert verdict.report["exit_code"] == 1
    assert verdict.report["carried"]["undone"] == [name]


async def test_a_repository_of_that_name_is_the_agents_to_change(lab: Lab, template: Path) -> None:
    (template / "pygments").mkdir()
    (template / "pygments" / "__init__.py").write_text("old = 1\n")
    async with lab.sandbox() as agent:
        await work(agent, "echo new = 1 > pygments/__init__.py")
        verdict = await make("command", {"command": "cat pygments/__init__.py"}).evaluate(lab.evidence(agent))
    assert verdict.report["output_end"] == "new = 1\n"


@pytest.mark.parametrize("made", ["a/" * 2100, "a/" * 1500, ("n" * 200 + "/") * 25])
async def test_a_work_folder_too_deep_to_be_taken_out_is_the_agents_doing(lab: Lab, made: str) -> None:
    """No infrastructure failure: those are tried again until one suits the agent."""
    async with lab.sandbox() as agent:
        script = "import os, sys\nfor part in sys.argv[1].split('/'):\n os.mkdir(part)\n os.chdir(part)\nopen('x', 'w').close()\n"
        await agent.write("deep.py", script.encode())
        await work(agent, f"{PYTHON} deep.py {made.rstrip('/')}")
        verdict = await make("command", {"command": "true"}).evaluate(lab.evidence(agent))
    assert verdict.reward == 0.0
    assert "cannot be taken out" in verdict.report["reason"]


async def test_guarded_files_in_folders_whose_names_are_no_text_go(lab: Lab, tasks_own: None) -> None:
    """In containers their names do not survive the way back in."""
    async with lab.sandbox() as agent:
        await work(agent, "d=$(printf 'a\\377'); mkdir $d; echo agent > $d/conftest.py; echo agent > sub/conftest.py; touch $d/kept")
        look = "find . -name conftest.py; cat sub/conftest.py; ls a*"
        verdict = await make("command", {"command": look, "protect": ["conftest.py"]}).evaluate(lab.evidence(agent))
    assert verdict.report["output_end"].split() == ["./sub/conftest.py", "task", "=", "1", "kept"]
