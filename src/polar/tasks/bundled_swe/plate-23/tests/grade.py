"""Grades the repository in the current folder: puts the hidden tests in place, runs them, writes the reward to $VERIFIER_LOGS/reward.txt.

The reward is 1 if all of FAIL_TO_PASS and PASS_TO_PASS in tests.json pass, else 0. What the agent did to test files and to the runner is undone first.
"""

import json
import os
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
TIMEOUT_S = 100


def main():
    with open(os.path.join(HERE, "tests.json"), encoding="utf-8") as file:
        plan = json.load(file)
    for name in plan["files"]:
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
        elif os.path.lexists(name):
            os.remove(name)
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        shutil.copyfile(os.path.join(HERE, "files", name), name)
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-B", *plan["command"]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False
        )
        output = done.stdout.decode("utf-8", "replace")
    except subprocess.TimeoutExpired:
        output = "the tests took too long"
    print(output)
    passed = {line.split(" ")[1] for line in output.splitlines() if line.startswith("PASSED ")}
    missing = [name for name in plan["FAIL_TO_PASS"] + plan["PASS_TO_PASS"] if name not in passed]
    logs = os.environ.get("VERIFIER_LOGS", "/logs/verifier")
    os.makedirs(logs, exist_ok=True)
    with open(os.path.join(logs, "reward.txt"), "w", encoding="ascii") as file:
        file.write("{}\n".format(0 if missing else 1))


if __name__ == "__main__":
    main()
