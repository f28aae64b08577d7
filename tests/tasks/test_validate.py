"""Validation finds what is wrong with a task; and agents that cheat get nothing, through the sandboxes and evaluators of a rollout."""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from task_folders import MakeTask

from polar.errors import ConfigError
from polar.harness.spec import AgentSpec
from polar.rollout.node.hidden import BUNDLED_TASKS
from polar.rollout.node.sandboxes import Sandboxes
from polar.runtime import RuntimeSpec, machine
from polar.runtime.docker import DockerRuntime
from polar.tasks import find, load
from polar.tasks.harbor import Task
from polar.tasks.validate import Trial, Validation, problems, rehearse, stage, validate

LOCAL = RuntimeSpec(backend="local")
PLAIN = "[metadata.polar]\nplain = true\n"


async def validated(folder: Path, repeats: int = 1) -> Validation:
    [found] = await validate([load(folder)], LOCAL, repeats=repeats)
    return found


async def test_a_good_task(make_task: MakeTask, tmp_path: Path) -> None:
    seen: list[str] = []
    [found] = await validate([load(make_task())], LOCAL, repeats=2, folder=tmp_path / "logs", progress=lambda one: seen.append(one.task))
    assert found.ok, found.problems
    assert (found.rewards("oracle"), found.rewards("noop"), seen) == ([1, 1], [0, 0], ["sample"])
    assert (tmp_path / "logs" / "sample" / "oracle-2" / "evaluator" / "report.json").is_file()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"solution/solve.sh": "true\n"}, "the reference solution gets 0, not 1"),
        ({"solution/solve.sh": "echo oh >&2; exit 3\n"}, "oracle: the command failed: .*oh"),
        ({"solution/solve.sh": None}, "no reference solution"),
        ({"tests/test.sh": "echo 1 > $VERIFIER_LOGS/reward.txt\n"}, "doing nothing gets 1, not 0"),
        ({"tests/test.sh": "exit 1\n"}, "the verifier left no reward"),
        ({"environment/setup.sh": "exit 4\n", "task.toml": PLAIN}, "exit code 4"),
        ({"environment/Dockerfile": "FROM x\nRUN make\n"}, "needs its image"),
        (
            {
                "environment/files/copy.sh": "# a secret that is long enough\n",
                "tests/x.sh": "# a secret that is long enough\n",
                "task.toml": PLAIN,
            },
            "can read tests/x.sh as copy.sh",
        ),
    ],
)
async def test_what_is_wrong_is_found(files: dict[str, str | None], said: str, make_task: MakeTask) -> None:
    found = await validated(make_task(files=files))
    assert not found.ok
    assert any(re.search(said, problem) for problem in found.problems), found.problems


def test_chance_is_found(make_task: MakeTask) -> None:
    task = load(make_task())
    trials = [Trial("oracle", 1.0, 1), Trial("noop", 0.0, 1), Trial("oracle", 0.0, 1), Trial("noop", 0.0, 1)]
    assert problems(task, trials) == ["the reference solution gets 1 or 0, not 1", "the reference solution does not always get the same"]
    assert problems(task, trials[:2] * 2) == []


async def test_partial_credit_for_nothing_must_be_said_by_the_task(make_task: MakeTask) -> None:
    script = "if [ -f done.txt ]; then echo 1; else echo 0.25; fi > $VERIFIER_LOGS/reward.txt\n"
    assert (await validated(make_task("silent", files={"tests/test.sh": script}))).problems == ("doing nothing gets 0.25, not 0",)
    manifest = "[metadata.polar]\nnoop_reward = 0.25\n"
    assert (await validated(make_task("said", files={"tests/test.sh": script, "task.toml": manifest}))).ok


async def test_a_runtime_that_is_not_there_is_refused(make_task: MakeTask) -> None:
    with pytest.raises(ConfigError, match="no runtime"):
        await validate([load(make_task())], RuntimeSpec(backend="nothing"))


async def test_nothing_is_left_behind(make_task: MakeTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    await validated(make_task(files={"tests/test.sh": "exit 1\n"}))
    assert list(scratch.iterdir()) == []


# --- agents that cheat -------------------------------------------------------------------------------------------------


@pytest.fixture
async def sandboxes() -> AsyncIterator[Sandboxes]:
    async with stage(LOCAL) as made:
        yield made


async def played(name: str, command: str, sandboxes: Sandboxes, folder: Path) -> Trial:
    """A bundled task, worked on by a shell command."""
    [task] = find(name)
    return await rehearse(task, AgentSpec(harness="shell", custom_shell=command), LOCAL, sandboxes, folder)


async def test_the_future_of_a_repository_is_out_of_reach(sandboxes: Sandboxes, tmp_path: Path) -> None:
    command = (
        "git log --all --oneline; git fsck --lost-found --no-reflogs; git checkout origin/main -- . || git checkout ORIG_HEAD -- . || true"
    )
    trial = await played("hooks-8", command, sandboxes, tmp_path / "run")
    assert (trial.reward, trial.leaks) == (0, ())
    said = (tmp_path / "run" / "harness.stdout").read_text()
    assert "Priorities" in said
    assert "listeners may change" not in said


async def test_edited_tests_are_worth_nothing(sandboxes: Sandboxes, tmp_path: Path) -> None:
    command = """cat > runtests.py <<'X'
print("PASSED tests/test_emitter.py::TestChangesWhileEmitting::test_once_skips_nobody")
X
for test in tests/*.py; do sed -i 's/def test_/def skip_/' "$test"; done
mkdir unittest && echo 'raise SystemExit(0)' > unittest/__init__.py"""
    assert (await played("hooks-8", command, sandboxes, tmp_path / "run")).reward == 0


async def test_committing_the_work_is_no_cheat(sandboxes: Sandboxes, tmp_path: Path) -> None:
    [task] = find("hooks-8")
    patch = (task.oracle() or {})["gold.patch"].decode()
    command = f"git apply <<'PATCH'\n{patch}PATCH\ngit add -A && git -c user.name=a -c user.email=a@b commit -qm done"
    trial = await played("hooks-8", command, sandboxes, tmp_path / "run")
    assert trial.reward == 1, trial


async def test_a_reward_that_the_agent_writes_itself_is_worth_nothing(sandboxes: Sandboxes, tmp_path: Path) -> None:
    command = 'for d in /logs/verifier "$HOME/logs/verifier" .; do mkdir -p $d && echo 1 > $d/reward.txt; done 2> /dev/null; true'
    assert (await played("log-report", command, sandboxes, tmp_path / "run")).reward == 0


LOOKER = """cat > report.py <<'X'
import glob, json, os, subprocess
search = "find / -name cases.json 2>/dev/null"
found = subprocess.run(search, shell=True, capture_output=True, text=True).stdout.split()
names = [*found, *glob.glob(os.environ.get("VERIFIER_TESTS", "/tests") + "/cases.json")]
want = {}
for name in names:
    plan = json.load(open(name))
    if plan.get("mark") != MARK:
        continue
    for case in plan["cases"]:
        if "key" in case["expect"]:
            key, value = case["expect"]["key"]
            want[key] = value
print(json.dumps(want))
X"""
"""A solution that looks for the expected answers on the whole machine. It believes only the very cases that it is graded by, and no
copy that a machine may hold elsewhere (another clone, a built wheel), which is anybody's to read."""


def marked_task(folder: Path, mark: str) -> Path:
    """A copy of a bundled task whose cases are told from any other copy's."""
    [task] = find("log-report")
    assert isinstance(task, Task)
    shutil.copytree(task.folder, folder)
    cases = folder / "tests" / "cases.json"
    cases.write_text(json.dumps({"mark": mark, **json.loads(cases.read_text())}))
    return folder


async def test_a_program_that_looks_for_the_tests_finds_nothing(sandboxes: Sandboxes, tmp_path: Path) -> None:
    mark = secrets.token_hex(8)
    task = load(marked_task(tmp_path / "task", mark))
    agent = AgentSpec(harness="shell", custom_shell=LOOKER.replace("MARK", repr(mark)))
    async with stage(LOCAL) as others:  # somebody else's sandbox, of another root, that holds the same tests while it grades
        other = await others.make(LOCAL, "other", task_folder=None)
        await other.upload(tmp_path / "task" / "tests", "tests")
        trial = await rehearse(task, agent, LOCAL, sandboxes, tmp_path / "run")
    assert trial.error is None
    assert trial.reward == 0


async def test_the_looker_would_find_tests_that_lie_open(sandboxes: Sandboxes, tmp_path: Path) -> None:
    """The test above means something."""
    mark = secrets.token_hex(8)
    task = load(marked_task(tmp_path / "task", mark))
    text = (tmp_path / "task" / "tests" / "cases.json").read_text()
    command = f"{LOOKER.replace('MARK', repr(mark))}\ncat > cases.json <<'Y'\n{text}\nY"
    trial = await rehearse(task, AgentSpec(harness="shell", custom_shell=command), LOCAL, sandboxes, tmp_path / "run")
    assert trial.reward == 0.875, trial


async def test_the_tests_of_this_installation_are_not_seen(sandboxes: Sandboxes) -> None:
    if machine.namespaces() is not None:
        pytest.skip("without namespaces nothing can be hidden")
    runtime = await sandboxes.make(LOCAL, "looks", task_folder=None)
    found = await runtime.exec(["find", *map(str, BUNDLED_TASKS), "-mindepth", "1"])
    assert found.stdout == b"", found


# --- everything that is bundled ----------------------------------------------------------------------------------------


async def test_some_of_each_set_locally() -> None:
    results = await validate(find("write-train,log-report,spans-42"), LOCAL, repeats=1)
    assert all(one.ok for one in results), [one.problems for one in results]


@pytest.mark.real
@pytest.mark.parametrize("backend", ["local", "bubblewrap"])
async def test_all_bundled_tasks(backend: str) -> None:
    if backend == "bubblewrap" and not shutil.which("bwrap"):
        pytest.skip("bubblewrap is not installed")
    results = await validate(find("all"), RuntimeSpec(backend=backend), repeats=1)
    assert all(one.ok for one in results), {one.task: one.problems for one in results if not one.ok}


@pytest.mark.real
@pytest.mark.timeout(900)
async def test_all_coding_and_swe_tasks_in_containers() -> None:
    problem = await DockerRuntime.unavailable()
    if problem is not None:
        pytest.skip(problem)
    results = await validate(find("coding,swe"), RuntimeSpec(backend="docker", network="none"), repeats=1)
    assert all(one.ok for one in results), {one.task: one.problems for one in results if not one.ok}
