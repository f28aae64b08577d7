"""A stand-in for the program `apptainer`: writes down what it was called with, keeps a list of instances, runs commands on this machine.

Run as a program. `APPTAINER_FAKE_STATE` is its folder: `calls.jsonl`, `instances.json`; a file `fail-<subcommand>` makes that one fail with
the file's content as its message.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path


def main() -> int:
    state, arguments = Path(os.environ["APPTAINER_FAKE_STATE"]), sys.argv[1:]
    inside = {name.removeprefix("APPTAINERENV_"): value for name, value in os.environ.items() if name.startswith("APPTAINERENV_")}
    with (state / "calls.jsonl").open("a") as log:
        log.write(json.dumps({"argv": arguments, "inside": inside, "env": dict(os.environ)}) + "\n")
    listed = state / "instances.json"
    instances = json.loads(listed.read_text()) if listed.exists() else {}
    what = "-".join(arguments[:2]) if arguments[0] in ("instance", "overlay") else arguments[0]
    if (state / f"fail-{what}").exists():
        print((state / f"fail-{what}").read_text(), file=sys.stderr)
        return 255
    if what == "instance-start":
        keeper = subprocess.Popen(
            ["sleep", "600"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        instances[arguments[-1]] = keeper.pid
    elif what == "instance-list":
        print(json.dumps({"instances": [{"instance": name, "pid": pid, "img": "x"} for name, pid in instances.items()]}))
    elif what == "instance-stop":
        os.kill(instances.pop(arguments[-1]), signal.SIGKILL)
    elif what == "exec":
        at = next(number for number, one in enumerate(arguments) if one.startswith("instance://"))
        if arguments[at].removeprefix("instance://") not in instances:
            print("FATAL: no instance found", file=sys.stderr)
            return 255
        os.chdir(arguments[arguments.index("--pwd") + 1])
        os.execvpe(arguments[at + 1], arguments[at + 1 :], {"PATH": os.environ["PATH"], **inside})
    listed.write_text(json.dumps(instances))
    return 0


if __name__ == "__main__":
    sys.exit(main())
