"""The demo's tasks: file tasks made by rule, as many as wanted, as lines that `polar run` and `polar train` read. Knows no model.

A task's files are put into its sandbox by one shell line, and one shell line judges what is there afterwards. Training and held-out
instances never mix: `polar.tasks.files` splits them by a hash of their words.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import orjson

from polar.tasks.files import FAMILIES, FileTask, instances

JsonObject = dict[str, Any]
AGENT_S, GRADE_S = 60.0, 30.0


def write_tasks(path: Path, *, count: int, held_out: bool, seed: int, families: tuple[str, ...] = FAMILIES) -> Path:
    """`count` different tasks, families in turn; the same ones for the same seed."""
    chosen: dict[str, FileTask] = {}
    for task in instances(seed, held_out=held_out, families=families):
        chosen.setdefault(task.name, task)
        if len(chosen) == count:
            break
    path.write_bytes(b"".join(orjson.dumps(line(task)) + b"\n" for task in chosen.values()))
    return path


def line(task: FileTask) -> JsonObject:
    """The task as a line of JSON. It is judged in the agent's own sandbox: the bundled model attacks nobody, and a second sandbox would
    cost more than the session."""
    steps = [{"type": "exec", "command": files_line(task)}] if task.files else []
    return {
        "id": task.name,
        "instruction": task.instruction,
        "split": "held_out" if task.held_out else "train",
        "solution": task.solution,
        "timeout_seconds": AGENT_S,
        "runtime": {"prepare": steps},
        "evaluator": {"strategy": "command", "config": {"command": check_line(task), "in_place": True, "timeout_seconds": GRADE_S}},
        "metadata": {"family": task.family},
    }


def files_line(task: FileTask) -> str:
    """A shell line that writes the task's files into the working folder."""
    return " && ".join(f"printf %s {shlex.quote(text)} > {shlex.quote(name)}" for name, text in sorted(task.files.items()))


def check_line(task: FileTask) -> str:
    """A shell line that ends with 0 if the working folder holds exactly what is expected, trailing newlines aside; else it says why not."""
    tests = [
        f'{{ [ "$(cat {shlex.quote(name)} 2>/dev/null)" = {shlex.quote(text)} ] || {{ echo "wrong content: {name}"; exit 1; }}; }}'
        for name, text in sorted(task.expected.items())
    ]
    names = " ".join(sorted(task.expected))
    tests.append(f'{{ [ "$(echo *)" = {shlex.quote(names)} ] || {{ echo "other files: $(echo *)"; exit 1; }}; }}')
    return " && ".join(tests)
