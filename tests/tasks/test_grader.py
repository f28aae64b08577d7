"""The coding tasks' grader against code that would rather be graded well than be right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from polar.errors import EvaluatorError
from polar.tasks import SETS, load
from polar.tasks.harbor import grade

GRADER = SETS["coding"].folders[0] / "lru-cache" / "tests" / "grade.py"

Graded = Callable[..., tuple[float, str]]


@pytest.fixture
def graded(tmp_path: Path) -> Graded:
    """Grades `work.py` by cases; the reward and what was printed."""

    def run(code: str, cases: list[dict[str, object]], *, score: str = "all", sandboxed: bool = False) -> tuple[float, str]:
        tests, work, logs = tmp_path / "tests", tmp_path / "work", tmp_path / "logs"
        for folder in (tests, work):
            folder.mkdir(exist_ok=True)
        shutil.copy(GRADER, tests / "grade.py")
        (tests / "cases.json").write_text(json.dumps({"score": score, "cases": cases}))
        (work / "work.py").write_text(code)
        env = {"PATH": os.defpath, "VERIFIER_LOGS": str(logs)} | ({"VERIFIER_TESTS": str(tests)} if sandboxed else {})
        command = ["python3", "-I", "-B", str(tests / "grade.py")]
        done = subprocess.run(command, cwd=work, env=env, capture_output=True, text=True, timeout=60, check=True)
        return float((logs / "reward.txt").read_text()), done.stdout

    return run


ONE = {"name": "one", "python": "import work\nresult = work.answer()", "expect": {"result": 42}}


def test_right_and_wrong(graded: Graded) -> None:
    assert graded("def answer(): return 42", [ONE])[0] == 1
    assert graded("def answer(): return 41", [ONE])[0] == 0


def test_fractions(graded: Graded) -> None:
    two = {**ONE, "name": "two", "expect": {"result": 7}}
    assert graded("def answer(): return 42", [ONE, two], score="fraction")[0] == 0.5
    assert graded("def answer(): return 42", [ONE, two])[0] == 0


@pytest.mark.parametrize(
    "code",
    [
        "import os, sys\nprint('PASSED one'); sys.stdout.flush(); os._exit(0)",
        "raise SystemExit(0)",
        "class Equal:\n    def __eq__(self, other): return True\ndef answer(): return Equal()",
        "import json\njson.dump = lambda *a, **k: None\ndef answer(): return None",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_tricks_in_its_own_process_are_worth_nothing(code: str, graded: Graded) -> None:
    assert graded(code, [ONE])[0] == 0


def test_what_is_expected_is_out_of_reach_in_a_sandbox(graded: Graded, tmp_path: Path) -> None:
    code = f"import json\ndef answer(): return json.load(open({str(tmp_path / 'tests' / 'cases.json')!r}))['cases'][0]['expect']['result']"
    assert graded(code, [ONE])[0] == 1, "outside of a sandbox the file must stay: the trick works"
    assert graded(code, [ONE], sandboxed=True)[0] == 0


def test_the_reward_file_is_the_graders_last_word(graded: Graded, tmp_path: Path) -> None:
    reward = tmp_path / "logs" / "reward.txt"
    code = f"""
import os, time
def answer():
    os.makedirs({str(reward.parent)!r}, exist_ok=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        for fd in range(3, 64):
            try:
                os.close(fd)
            except OSError:
                pass
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        time.sleep(1)
        open({str(reward)!r}, "w").write("1")
        os._exit(0)
    return 41
"""
    assert graded(code, [ONE])[0] == 0
    time.sleep(1.5)
    assert float(reward.read_text()) == 0


def test_cases_do_not_see_each_other(graded: Graded) -> None:
    write = {"name": "w", "run": "echo x > left.txt", "expect": {"exit": 0, "files": {"left.txt": "x\n"}}}
    look = {"name": "l", "run": "ls left.txt", "expect": {"exit": 2}}
    assert graded("", [write, look])[0] == 1
    assert not os.path.exists("left.txt")


def test_what_never_ends_is_ended_and_decides(graded: Graded) -> None:
    began = time.monotonic()
    reward, output = graded("def answer():\n    while True: pass", [ONE, {**ONE, "name": "two"}])
    assert reward == 0
    assert "did not end" in output
    assert "two" not in output
    assert time.monotonic() - began < 20


def test_what_is_graded_ends_with_a_grader_that_is_killed(tmp_path: Path) -> None:
    tests, work = tmp_path / "tests", tmp_path / "work"
    tests.mkdir()
    work.mkdir()
    shutil.copy(GRADER, tests / "grade.py")
    told = tmp_path / "pid"
    case = {"name": "one", "run": f"echo $$ > {told}.part; mv {told}.part {told}; exec sleep 300", "expect": {"exit": 0}}
    (tests / "cases.json").write_text(json.dumps({"score": "all", "cases": [case]}))
    env = {"PATH": os.defpath, "VERIFIER_LOGS": str(tmp_path / "logs")}
    grader = subprocess.Popen(["python3", "-I", "-B", str(tests / "grade.py")], cwd=work, env=env, stdout=subprocess.DEVNULL)
    wait(told.exists)
    case_process = int(told.read_text())
    grader.kill()
    grader.wait()
    wait(lambda: ended(case_process))


def test_a_verifier_that_takes_too_long_leaves_nothing_running(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    told = tmp_path / "pid"
    (folder / "tests").mkdir(parents=True)
    (folder / "instruction.md").write_text("Do it.")
    (folder / "task.toml").write_text("[verifier]\ntimeout_sec = 1.0\n")
    (folder / "tests" / "test.sh").write_text(f"sleep 300 &\necho $! > {told}\nwait\n")
    with pytest.raises(EvaluatorError, match="took longer"):
        grade(load(folder), tmp_path)
    wait(lambda: ended(int(told.read_text())))


def wait(true: Callable[[], bool], within_s: float = 30.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ended(pid: int) -> bool:
    """Gone, or dead and not yet collected by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
