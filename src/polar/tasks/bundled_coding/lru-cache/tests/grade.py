"""Grades the work folder (the current one) by the cases in cases.json beside this file; writes the reward to $VERIFIER_LOGS/reward.txt.

The code under test runs in processes of its own, each case in a fresh copy of the work folder, and is judged by what comes out of them: it
never holds what is expected, and cannot reach this process's count. Where the tests were put into a sandbox for this one run (Harbor's
/tests, or $VERIFIER_TESTS), cases.json is gone before any of it runs; what it leaves running is ended, and what runs when this process
is killed ends with it. Needs Python 3.8 on Linux.

A case is `run` (a shell command) or `python` (a snippet that sets `result`), with `files` put into the folder first and `stdin`. `expect`
tells what must hold of it: `exit`, `stdout`, `json` (the whole of stdout), `key` (one key of that), `result`, `files`, `absent`.
A case with `keep` works before the agent comes and must go on working: without it the reward is 0. Of the others, `"score": "fraction"`
gives the share that passes, `"score": "all"` gives 1 or 0.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.realpath(__file__))
TIMEOUT_S = 10
SUBREAPER = 36  # of prctl: whoever loses its parent becomes a child of this process
DEATH_SIGNAL = 1  # of prctl: what a process gets when its parent ends
LIBC = ctypes.CDLL(None)
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("VERIFIER_")}
DRIVER = """
import json, os, sys
sys.path.insert(0, "")
def raises(function, *args, **kwargs):
    try:
        return ["returned", function(*args, **kwargs)]
    except Exception as error:
        return [type(error).__name__, str(error)]
names = {"raises": raises}
exec(sys.argv[2], names)
with os.fdopen(int(sys.argv[1]), "w") as out:
    json.dump(names["result"], out)
"""


def run(command, folder, stdin, pass_fds=()):
    """Exit code (124 after a timeout) and stdout of a command; nothing that it started is left afterwards."""
    grader = os.getpid()

    def bound():
        LIBC.prctl(DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != grader:  # it ended before that
            os._exit(137)

    process = subprocess.Popen(
        command,
        preexec_fn=bound,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=pass_fds,
        env={**ENVIRONMENT, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONIOENCODING": "utf-8"},
    )
    try:
        stdout, _ = process.communicate(stdin.encode(), timeout=TIMEOUT_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        stdout, code = b"", 124
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        end_orphans()
    return code, stdout.decode("utf-8", "replace")


def end_orphans():
    """Ends what the code under test moved out of its process group: since this process is its subreaper, it is a child now."""
    while True:
        children = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent_of(pid) == os.getpid()]
        if not children:
            return
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            except OSError:
                pass


def parent_of(pid):
    try:
        with open("/proc/{}/stat".format(pid), "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except OSError:
        return None


def outcome(case, folder):
    """Everything that `expect` may ask for, as the code under test left it."""
    for name, text in case.get("files", {}).items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    stdin = case.get("stdin", "")
    if "run" in case:
        code, stdout = run(["sh", "-c", case["run"]], folder, stdin)
        return {"exit": code, "stdout": stdout}
    read, write = os.pipe()
    try:
        code, stdout = run([sys.executable, "-c", DRIVER, str(write), case["python"]], folder, stdin, (write,))
    finally:
        os.close(write)
    with os.fdopen(read, encoding="utf-8", errors="replace") as pipe:
        text = pipe.read()
    return {"exit": code, "stdout": stdout, "result": json.loads(text) if text else None}


def wrong(case, folder):
    """What is not as expected, in words; empty where all is."""
    try:
        found = outcome(case, folder)
        if found["exit"] == 124:
            return "exit: 124, it did not end within {} s".format(TIMEOUT_S)
        for kind, value in case["expect"].items():
            if kind == "json":
                seen = json.loads(found["stdout"])
            elif kind == "key":
                seen = [value[0], json.loads(found["stdout"])[value[0]]]
            elif kind == "files":
                seen = {name: open(os.path.join(folder, name), encoding="utf-8", newline="").read() for name in value}
            elif kind == "absent":
                seen = [name for name in value if not os.path.lexists(os.path.join(folder, name))]
            else:
                seen = found[kind]
            if seen != value:
                return "{}: {!r}".format(kind, seen)[:300]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        return "{}: {}".format(type(error).__name__, error)[:300]
    return ""


def main():
    LIBC.prctl(SUBREAPER, 1, 0, 0, 0)
    path = os.path.join(HERE, "cases.json")
    with open(path, encoding="utf-8") as file:
        plan = json.load(file)
    if HERE in ("/tests", os.path.realpath(os.environ.get("VERIFIER_TESTS", "/tests"))):
        os.remove(path)
    kept, passed, counted = True, 0, 0
    for case in plan["cases"]:
        with tempfile.TemporaryDirectory(prefix="case-") as folder:
            box = os.path.join(folder, "work")
            shutil.copytree(os.getcwd(), box, symlinks=True, ignore=shutil.ignore_patterns(".git", "__pycache__"))
            problem = wrong(case, box)
        print("{} {}{}".format("FAILED" if problem else "PASSED", case["name"], " - " + problem if problem else ""))
        if case.get("keep"):
            kept = kept and not problem
        elif "exit: 124" in problem and plan["score"] == "all":
            print("(the others are left out: one that does not end decides it)")
            counted, passed = 1, 0
            break
        else:
            counted += 1
            passed += not problem
    share = passed / counted
    reward = 0.0 if not kept else share if plan["score"] == "fraction" else float(share == 1)
    logs = os.environ.get("VERIFIER_LOGS", "/logs/verifier")
    os.makedirs(logs, exist_ok=True)
    with open(os.path.join(logs, "reward.txt"), "w", encoding="ascii") as file:
        file.write("{:.4f}\n".format(reward))


if __name__ == "__main__":
    main()
