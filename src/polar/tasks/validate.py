"""Is a task what it says? The reference solution must get a reward of 1, doing nothing no more than the task says (0), each time the same,
and what the agent must not see must not be there. By the same sandboxes, agents and evaluators as in a rollout, without any model.

A task that fails here would train on noise: an unsolvable one, a broken verifier, a free reward.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from polar.chat import JsonObject
from polar.errors import ConfigError, HarnessError, PolarError
from polar.evaluator import Evaluator, Evidence, Verdict, from_spec
from polar.harness.agent import AgentRun
from polar.harness.base import Endpoint
from polar.harness.spec import AgentSpec
from polar.rollout.models import TaskRequest
from polar.rollout.node.hidden import BUNDLED_TASKS
from polar.rollout.node.history import hide_solutions
from polar.rollout.node.sandboxes import FreshSandboxes, Sandboxes
from polar.rollout.node.stages import Slots
from polar.runtime import Owner, Runtime, RuntimeSpec, backend_of
from polar.tasks.oracle import noop_agent, oracle_agent
from polar.tasks.request import AnyTask, to_request
from polar.trajectory import Trajectory

Kind = Literal["oracle", "noop"]
NOWHERE = "http://127.0.0.1:9"
"""The model's address of a run without a model: the discard port."""
_SMALLEST = 24
"""Bytes; files below are alike by chance."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of one agent. `reward` is `None` where there was none, and `error` says why."""

    kind: Kind
    reward: float | None
    seconds: float
    error: str | None = None
    leaks: tuple[str, ...] = ()
    """Hidden files that the agent's sandbox held before the agent came."""
    report: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Validation:
    """What came out for one task. `problems` is empty exactly if the task is good."""

    task: str
    trials: tuple[Trial, ...]
    problems: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems

    def rewards(self, kind: Kind) -> list[float | None]:
        return [trial.reward for trial in self.trials if trial.kind == kind]

    def to_json(self) -> JsonObject:
        return {
            "task": self.task,
            "ok": self.ok,
            "problems": list(self.problems),
            "oracle": self.rewards("oracle"),
            "noop": self.rewards("noop"),
            "seconds": round(self.seconds, 2),
        }


async def validate(
    tasks: Sequence[AnyTask],
    runtime: RuntimeSpec,
    *,
    jobs: int = 2,
    repeats: int = 2,
    folder: Path | None = None,
    progress: Callable[[Validation], None] = lambda _: None,
) -> list[Validation]:
    """Validates the tasks, so many at a time, each `repeats` times; results in the order of the tasks, `progress` as they come.

    Logs go to `folder/<task>`, and nowhere without one. Raises `ConfigError` where the runtime cannot be had on this machine; what is
    wrong with a task is in its result.
    """
    places = asyncio.Semaphore(jobs)
    async with stage(runtime) as sandboxes:

        async def one(task: AnyTask) -> Validation:
            async with places:
                logs = (folder or sandboxes.owner.root.parent / "logs") / task.name
                validation = await _validated(task, runtime, sandboxes, repeats, logs)
            progress(validation)
            return validation

        return list(await asyncio.gather(*(one(task) for task in tasks)))


@asynccontextmanager
async def stage(runtime: RuntimeSpec) -> AsyncIterator[Sandboxes]:
    """Sandboxes of this process's own, without a model, gone at the end. Raises `ConfigError` where there can be none."""
    unavailable = await backend_of(runtime).unavailable()
    if unavailable is not None:
        raise ConfigError(unavailable)
    scratch = Path(tempfile.mkdtemp(prefix="polar-validate-"))
    owner = Owner.open(scratch / "sandboxes")
    sandboxes = Sandboxes(owner, gateway=None, hidden=BUNDLED_TASKS)
    try:
        yield sandboxes
    finally:
        await sandboxes.aclose()
        owner.close()
        await asyncio.to_thread(shutil.rmtree, scratch, True)


async def _validated(task: AnyTask, runtime: RuntimeSpec, sandboxes: Sandboxes, repeats: int, folder: Path) -> Validation:
    began = time.monotonic()
    trials: list[Trial] = []
    agents: dict[Kind, Callable[[], AgentSpec]] = {"oracle": lambda: oracle_agent(task), "noop": noop_agent}
    try:
        for kind, agent in agents.items():
            for number in range(1, repeats + 1):
                trials.append(await rehearse(task, agent(), runtime, sandboxes, folder / f"{kind}-{number}", kind=kind))
    except ConfigError as error:
        return Validation(task.name, tuple(trials), (str(error),), time.monotonic() - began)
    return Validation(task.name, tuple(trials), tuple(problems(task, trials)), time.monotonic() - began)


def problems(task: AnyTask, trials: Sequence[Trial]) -> list[str]:
    """What is wrong with a task, by what came out of its trials."""
    found = [f"{trial.kind}: {trial.error}" for trial in trials if trial.error is not None]
    oracle, noop = _rewards(trials, "oracle"), _rewards(trials, "noop")
    if any(reward != 1.0 for reward in oracle):
        found.append(f"the reference solution gets {_shown(oracle)}, not 1")
    if any(reward > task.noop_reward or reward >= 1.0 for reward in noop):
        found.append(f"doing nothing gets {_shown(noop)}, not {task.noop_reward:g}")
    for name, rewards in (("reference solution", oracle), ("agent that does nothing", noop)):
        if len(set(rewards)) > 1:
            found.append(f"the {name} does not always get the same")
    found += [f"the agent can read {leak}" for trial in trials for leak in trial.leaks]
    return list(dict.fromkeys(found))


def _rewards(trials: Sequence[Trial], kind: Kind) -> list[float]:
    return [trial.reward for trial in trials if trial.kind == kind and trial.reward is not None]


def _shown(rewards: Sequence[float]) -> str:
    return " or ".join(dict.fromkeys(f"{reward:g}" for reward in rewards))


async def rehearse(
    task: AnyTask, agent: AgentSpec, runtime: RuntimeSpec, sandboxes: Sandboxes, folder: Path, *, kind: Kind = "oracle"
) -> Trial:
    """One session of an agent that needs no model, as a node would run it. Raises `ConfigError` for a task or an agent that cannot be;
    whatever else goes wrong is the trial's error."""
    request = to_request(task, agent=agent, runtime=runtime, task_id=task.name)
    if request.evaluator is None:
        raise ConfigError(f"task {task.name} has no evaluator: nothing can be validated")
    evaluator = from_spec(request.evaluator)
    began = time.monotonic()
    seen: list[str] = []
    try:
        verdict = await _judged(task, request, evaluator, sandboxes, folder, seen)
    except ConfigError:
        raise
    except (PolarError, OSError, TimeoutError) as error:
        return Trial(kind, None, time.monotonic() - began, str(error) or type(error).__name__, tuple(seen))
    return Trial(kind, verdict.reward, time.monotonic() - began, None, tuple(seen), verdict.report)


async def _judged(
    task: AnyTask, request: TaskRequest, evaluator: Evaluator[Any], sandboxes: Sandboxes, folder: Path, seen: list[str]
) -> Verdict:
    """The session itself; what the agent could read of what it must not goes to `seen`."""
    assert request.evaluator is not None
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    task_folder = None if request.task_folder is None else Path(request.task_folder)
    spec = request.runtime or RuntimeSpec()
    run = AgentRun(request.agent, task_folder=task_folder)
    fresh = FreshSandboxes(sandboxes, spec, task.name, Slots(1), task_folder=task_folder, folder=folder)
    agent = await sandboxes.make(spec, task.name, task_folder=task_folder, log_file=folder / "prepare.log")
    try:
        await hide_solutions(agent, request.evaluator)
        seen += await leaks(agent, task.hidden(), folder)
        await run.set_up(agent, Endpoint(NOWHERE, "none", run.dialect, "none"), context=None)
        ran = await run.run(agent, request.instruction, folder=folder, timeout_s=request.agent_seconds)
        if ran.problem is not None:
            said = await asyncio.to_thread(ran.stderr.read_text, errors="replace")
            raise HarnessError(f"the command failed: {ran.problem} {said[-300:]}".rstrip())
        collected = await run.collect(agent, folder)
        evidence = Evidence(
            session=task.name,
            task=request.task_id,
            instruction=request.instruction,
            metadata=request.metadata,
            trajectory=Trajectory(task.name),
            answer=ran.answer,
            patch=collected.patch,
            exit_code=ran.exit_code,
            problem=None,
            timed_out=False,
            agent=agent,
            fresh=fresh.fresh,
            folder=folder / "evaluator",
            task_folder=task_folder,
            timeout_s=request.budget.evaluation_seconds or 900.0,
            transcript=collected.transcript,
            other=fresh.other,
        )
        return await evaluator.evaluate(evidence)
    finally:
        await fresh.aclose()
        await sandboxes.remove(agent)


async def leaks(agent: Runtime, hidden: Mapping[str, bytes], folder: Path) -> list[str]:
    """Which hidden files lie in the agent's work folder under any name, or in the object store of its repository."""
    wanted = {content: name for name, content in hidden.items() if len(content) >= _SMALLEST}
    if not wanted:
        return []
    copy = folder / "start"
    try:
        await agent.download(agent.workdir, copy)
        found = await asyncio.to_thread(_files_among, copy, wanted)
    finally:
        await asyncio.to_thread(shutil.rmtree, copy, True)
    objects = await agent.exec("git cat-file --batch-all-objects --batch-check='%(objectname)'", timeout_s=60, keep_bytes=64 << 20)
    if objects.ok:
        stored = set(objects.text.split())
        found += [f"{name} in the repository's history" for content, name in wanted.items() if _blob(content) in stored]
    return found


def _files_among(folder: Path, wanted: Mapping[bytes, str]) -> list[str]:
    sizes = {len(content) for content in wanted}
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size in sizes:
            name = wanted.get(path.read_bytes())
            if name is not None:
                found.append(f"{name} as {path.relative_to(folder).as_posix()}")
    return found


def _blob(content: bytes) -> str:
    """Git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def summary(validations: Sequence[Validation]) -> dict[str, Any]:
    """For `--json`."""
    return {"ok": all(one.ok for one in validations), "tasks": [one.to_json() for one in validations]}
