"""`python`: a function of the task's or the trainer's judges.

`function` is `module:name` or `path/to/file.py:name`, the latter relative to the task's folder. It gets the `Evidence` and gives a number,
a `Verdict` or an object with `reward` (and `row_rewards`, `metrics`, `report`); it may be async. Its exceptions and its timeouts are the
evaluator's failure, not the policy's.

In this process it may use sandboxes (`evidence.fresh`, `evidence.agent`); a synchronous one runs in a thread, which nothing can end: one
that hangs stays, and takes none of the threads that others share. With
`subprocess` it runs in a Python of its own, which a timeout ends with everything that it started; there it has the same evidence without
sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from pydantic import BaseModel, ConfigDict, Field

from polar.chat import JsonObject
from polar.errors import EvaluatorError, PolarError
from polar.evaluator.base import Evaluator, Evidence, Verdict, register
from polar.evaluator.budget import Budget
from polar.evaluator.commands import keep
from polar.runtime.transfer import in_thread

CHILD = "import sys; from polar.evaluator.python_child import main; sys.exit(main(sys.argv[1:]))"


class PythonConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    function: str = Field(pattern=r"^[^:]+:[A-Za-z_][A-Za-z0-9_]*$")
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed on by name."""
    subprocess: bool = False
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """`None`: what is left of the evaluation's budget."""
    needs_fresh: bool = False
    """Whether it asks for a fresh sandbox, which is then made while the agent runs."""


@register
class Python(Evaluator[PythonConfig]):
    name = "python"
    Config = PythonConfig

    def __init__(self, config: PythonConfig, env: Mapping[str, str] | None = None) -> None:
        super().__init__(config, env)
        self.needs_fresh = config.needs_fresh and not config.subprocess

    async def evaluate(self, evidence: Evidence) -> Verdict:
        config, budget = self.config, Budget(evidence.timeout_s)
        limit_s = min(config.timeout_seconds or budget.left(), budget.left())
        if config.subprocess:
            return verdict(await self._child(evidence, limit_s), config.function)
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                function = await in_thread(lambda: load(config.function, evidence.task_folder))
                return verdict(await call(function, evidence, config.kwargs), config.function)
        except PolarError:
            raise
        except (Exception, SystemExit) as error:  # an exit would end the whole node
            if limit.expired():
                raise EvaluatorError(f"{config.function} did not return in {limit_s:g} s") from error
            where = "".join(traceback.format_exception(error)[-3:])[-800:]
            raise EvaluatorError(f"{config.function} raised {type(error).__name__}: {error}\n{where}") from error

    async def _child(self, evidence: Evidence, limit_s: float) -> Any:
        """Runs the function in a Python of its own, in a process group of its own."""
        config = self.config
        asked = {"function": config.function, "kwargs": config.kwargs, "evidence": plain(evidence)}
        with tempfile.TemporaryDirectory(prefix="polar-evaluator-") as folder:
            question, answer = Path(folder) / "question.json", Path(folder) / "answer.json"
            await asyncio.to_thread(keep, question, json.dumps(asked, default=str).encode())
            log = evidence.folder / "python.log"
            with await asyncio.to_thread(_opened, log) as printed:  # a file takes any amount, and nobody waits for its end
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-c",
                    CHILD,
                    str(question),
                    str(answer),
                    env={**os.environ, **self.env},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=printed,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            try:
                async with asyncio.timeout(limit_s):
                    await process.wait()
            except TimeoutError as error:
                raise EvaluatorError(f"{config.function} did not return in {limit_s:g} s") from error
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            try:
                said: JsonObject = json.loads(await asyncio.to_thread(answer.read_bytes))
            except (OSError, ValueError) as error:
                tail = await asyncio.to_thread(_end, log, 500)
                raise EvaluatorError(f"{config.function} gave no answer (exit code {process.returncode}): {tail}") from error
        if "error" in said:
            raise EvaluatorError(f"{config.function} {said['error']}")
        return said["value"]


def _opened(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def _end(path: Path, most: int) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most))
        return file.read().decode(errors="replace")


def load(function: str, task_folder: Path | None) -> Callable[..., Any]:
    """The function that `module:name` or `file.py:name` names. Raises `EvaluatorError` where there is none."""
    source, _, name = function.partition(":")
    try:
        module = _file(source, task_folder) if source.endswith(".py") else importlib.import_module(source)
        found = getattr(module, name)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        raise EvaluatorError(f"{function} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise EvaluatorError(f"{function} is no function")
    return found  # type: ignore[no-any-return]


def _file(source: str, task_folder: Path | None) -> ModuleType:
    """A module from a file, under a name that is the file's alone: tasks may use one file name for different functions."""
    path = Path(source) if Path(source).is_absolute() else (task_folder or Path.cwd()) / source
    content = path.read_bytes()
    name = "polar_task_" + hashlib.sha256(os.fsencode(path.resolve()) + b"\0" + content).hexdigest()[:24]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


async def call(function: Callable[..., Any], evidence: Any, kwargs: Mapping[str, Any]) -> Any:
    """Calls it, in a thread of its own where it is not async."""
    if inspect.iscoroutinefunction(function):
        return await function(evidence, **kwargs)
    value = await in_thread(lambda: function(evidence, **kwargs))
    return await value if inspect.isawaitable(value) else value


def verdict(value: Any, function: str) -> Verdict:
    """What a function gave, as a `Verdict`. Raises `EvaluatorError` for what is none."""
    if isinstance(value, Verdict):
        return value
    if isinstance(value, (bool, int, float)):
        return Verdict(float(value))
    if isinstance(value, Mapping) and isinstance(value.get("reward"), (bool, int, float)):
        unknown = set(value) - {"reward", "row_rewards", "metrics", "report"}
        if not unknown:
            rows = tuple(None if one is None else float(one) for one in value.get("row_rewards") or ())
            metrics = {str(name): float(number) for name, number in dict(value.get("metrics") or {}).items()}
            return Verdict(float(value["reward"]), rows, metrics, dict(value.get("report") or {}))
        raise EvaluatorError(f"{function} gave an object with unknown fields: {', '.join(sorted(map(str, unknown)))}")
    raise EvaluatorError(f"{function} must give a number, a Verdict or an object with a reward, not {type(value).__name__}")


def plain(evidence: Evidence) -> JsonObject:
    """The evidence as JSON, without sandboxes."""
    return {
        "session": evidence.session,
        "task": evidence.task,
        "instruction": evidence.instruction,
        "metadata": evidence.metadata,
        "trajectory": evidence.trajectory.to_json(),
        "answer": evidence.answer,
        "patch": None if evidence.patch is None else evidence.patch.hex(),
        "exit_code": evidence.exit_code,
        "problem": evidence.problem,
        "timed_out": evidence.timed_out,
        "folder": str(evidence.folder),
        "task_folder": None if evidence.task_folder is None else str(evidence.task_folder),
        "timeout_s": evidence.timeout_s,
        "transcript": None if evidence.transcript is None else str(evidence.transcript),
    }
