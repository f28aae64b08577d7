"""The other side of `python` with `subprocess`: calls one function with the evidence that a file holds, and writes what it gave.

What the function prints is the process's output; its answer has a file of its own, so that nothing printed is taken for one.
"""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polar.chat import JsonObject
from polar.errors import EvaluatorError
from polar.evaluator.base import Evidence, Verdict
from polar.evaluator.python import call, load
from polar.runtime.base import Runtime
from polar.trajectory import Trajectory


def main(arguments: Sequence[str]) -> int:
    """`question.json answer.json`."""
    question, answer = map(Path, arguments)
    asked: JsonObject = json.loads(question.read_bytes())
    evidence = restored(asked["evidence"])
    said: JsonObject
    try:
        function = load(asked["function"], evidence.task_folder)
        value: Any = asyncio.run(call(function, evidence, asked["kwargs"]))
        said = {"value": asdict(value) if isinstance(value, Verdict) else value}
        text = json.dumps(said)
    except Exception as error:  # whatever the function raised is its answer
        traceback.print_exc()
        text = json.dumps({"error": f"raised {type(error).__name__}: {error}"})
    making = answer.with_suffix(".part")
    making.write_text(text)
    making.rename(answer)
    return 0


def restored(data: JsonObject) -> Evidence:
    """The evidence of `polar.evaluator.python.plain`."""

    def fresh() -> AbstractAsyncContextManager[Runtime]:
        raise EvaluatorError("a function in a subprocess has no sandboxes; leave subprocess out")

    paths = {name: None if data[name] is None else Path(data[name]) for name in ("task_folder", "transcript")}
    patch = None if data["patch"] is None else bytes.fromhex(data["patch"])
    fields = {**data, **paths, "patch": patch, "trajectory": Trajectory.from_json(data["trajectory"]), "folder": Path(data["folder"])}
    return Evidence(**fields, agent=None, fresh=fresh)
