"""`harbor`: a Harbor task's own verifier, `tests/test.sh` (https://www.harborframework.com/docs/tasks).

Harbor's contract: the tests are uploaded to `/tests` only now, run from the work folder, and leave their reward in
`/logs/verifier/reward.txt` or `reward.json`. The file decides, whatever the exit code; no file means that the verifier failed, which is
no zero. The reward is clamped to 0..1.

Three places to run it: a fresh sandbox into which the agent's work folder was brought (default); the agent's own (`in_place`, Harbor's
`shared` mode); or Harbor's `separate` mode, a sandbox with an image of its own (`verifier_runtime`) into which the declared `artifacts`
are brought and nothing else. Where the sandbox has no writable place at `/` (the `local` runtime), tests and logs lie elsewhere: scripts
find them by `$VERIFIER_TESTS`, `$VERIFIER_LOGS` and `$(dirname "$0")`.
"""

from __future__ import annotations

import asyncio
import fnmatch
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from polar.chat import JsonObject
from polar.errors import EvaluatorError, UnsafePath
from polar.evaluator import rewards
from polar.evaluator.base import Evaluator, Evidence, Verdict, register
from polar.evaluator.budget import Budget
from polar.evaluator.carry import MAX_BYTES, How, carry
from polar.evaluator.command import checked_weights, facts, task_path
from polar.evaluator.commands import emptied, own_path, run_tests
from polar.evaluator.guards import ALWAYS
from polar.evaluator.place import sandbox
from polar.runtime.base import Runtime

ARTIFACTS = "/logs/artifacts"
"""Harbor brings this folder over in separate mode whether it is declared or not."""


class Artifact(BaseModel):
    """A file or folder of the agent's sandbox that a separate verifier gets, at the same path or at `destination`."""

    model_config = ConfigDict(extra="forbid")

    source: str
    destination: str | None = None
    exclude: list[str] = Field(default_factory=list)
    """Names that are left out, as in `.git` or `*.pyc`."""


class HarborConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tests_dir: str = "tests"
    """A folder of the node, relative to the task's."""
    tests_target: str = "/tests"
    verifier_dir: str = "/logs/verifier"
    test_command: str | None = None
    """`None`: `bash <tests_target>/test.sh`, with sh where the image has no bash."""
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Harbor's `[verifier] timeout_sec`; `None`: what is left of the evaluation's budget."""
    carry: How = "workdir"
    in_place: bool = False
    verifier_runtime: dict[str, Any] | None = None
    """Fields of the task's `runtime` that the verifier's differs in (`image`, `build_context`, `cpus`, ...): Harbor's separate mode."""
    upload_tests: bool | None = None
    """`None`: yes, but not into an image built from a context, which holds them already."""
    artifacts: list[str | Artifact] = Field(default_factory=list)
    collect: list[str] = Field(default_factory=list)
    """Commands run in the agent's sandbox before its artifacts are taken: Harbor's `[[verifier.collect]]` hooks."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Of the named scores in `reward.json`: the reward is their weighted mean. Without: the score called `reward`."""
    protect: list[str] = Field(default_factory=list)
    """Further names in the work folder that only the task may set (`polar.evaluator.guards`), such as `conftest.py`."""
    user: str | None = None
    base_commit: str | None = None
    """The agent's repository, in `repo_dir` (`None`: the work folder), shows no history after it."""
    repo_dir: str | None = None
    clamp: bool = True
    missing_reward: float | None = None
    """What a verifier that left no reward file means; `None`: an error of the evaluator."""

    @model_validator(mode="after")
    def _whole(self) -> HarborConfig:
        checked_weights(self.weights)
        if self.in_place and self.verifier_runtime:
            raise ValueError("in_place grades in the agent's sandbox, verifier_runtime in another one: choose one")
        return self


@register
class Harbor(Evaluator[HarborConfig]):
    name = "harbor"
    Config = HarborConfig

    def __init__(self, config: HarborConfig, env: Mapping[str, str] | None = None) -> None:
        super().__init__(config, env)
        self.needs_fresh = not config.in_place and config.verifier_runtime is None

    async def evaluate(self, evidence: Evidence) -> Verdict:
        config = self.config
        separate = config.verifier_runtime is not None
        report: JsonObject = {}
        async with sandbox(evidence, in_place=config.in_place, changes=config.verifier_runtime) as runtime:
            budget = Budget(evidence.timeout_s)
            if separate:
                report["artifacts"] = await self._artifacts(evidence, runtime, budget)
            else:
                brought = await carry(evidence, runtime, config.carry, protect=(*ALWAYS, *config.protect), budget=budget)
                report["carried"] = brought.report()
                if brought.refused is not None:
                    return Verdict(0.0, report={**report, "reason": brought.refused})
            logs, tests = await emptied(runtime, config.verifier_dir, budget=budget), config.tests_target
            upload = config.upload_tests
            if upload if upload is not None else not (config.verifier_runtime or {}).get("build_context"):
                folder = task_path(evidence, config.tests_dir)
                tests = await emptied(runtime, tests, budget=budget)
                await runtime.upload(folder, tests)
            script = f"{tests}/test.sh"
            ran = await run_tests(
                runtime,
                config.test_command or f"if command -v bash > /dev/null; then exec bash '{script}'; else exec sh '{script}'; fi",
                budget=budget,
                limit_s=config.timeout_seconds,
                env={**self.env, "VERIFIER_LOGS": logs, "VERIFIER_TESTS": tests},
                user=config.user,
                log=evidence.folder / "verifier.log",
            )
            report.update(facts(ran))
            if ran.timed_out:
                return Verdict(0.0, report={**report, "reason": "the tests did not finish in time"})
            scores = await rewards.read(runtime, logs, weights=config.weights, keep=evidence.folder)
        if scores is None:
            if config.missing_reward is None:
                raise EvaluatorError(
                    f"the verifier left no reward in {config.verifier_dir} (exit code {ran.exit_code}); it printed: {ran.output[-300:]}"
                )
            return Verdict(config.missing_reward, report={**report, "reason": "the verifier left no reward"})
        reward = min(1.0, max(0.0, scores.reward)) if config.clamp else scores.reward
        return Verdict(reward, metrics=dict(scores.named), report=report)

    async def _artifacts(self, evidence: Evidence, runtime: Runtime, budget: Budget) -> list[str]:
        """Brings the declared artifacts over; the paths that were there."""
        agent = evidence.agent
        if agent is None:
            raise EvaluatorError("the agent's sandbox is gone, and with it the artifacts to grade")
        for command in self.config.collect:
            await run_tests(agent, command, budget=budget, env=self.env, log=evidence.folder / "collect.log")
        declared = [Artifact(source=one) if isinstance(one, str) else one for one in self.config.artifacts]
        if all(one.source != ARTIFACTS for one in declared):
            declared.append(Artifact(source=ARTIFACTS))
        brought: list[str] = []
        for number, artifact in enumerate(declared):
            local = evidence.folder / f"artifact-{number}"
            source, target = own_path(agent, artifact.source), own_path(runtime, artifact.destination or artifact.source)
            if artifact.source == agent.workdir and artifact.destination is None:
                source, target = agent.workdir, runtime.workdir
            try:
                await agent.download(source, local, max_bytes=MAX_BYTES)
                await asyncio.to_thread(_without, local, artifact.exclude)
                await runtime.upload(local, target)
                brought.append(artifact.source)
            except FileNotFoundError:
                continue
            except UnsafePath as error:
                brought.append(f"{artifact.source} (refused: {error})")
            finally:
                await asyncio.to_thread(_remove, local)
        return brought


def _without(local: Path, patterns: list[str]) -> None:
    """Removes what a declared artifact leaves out, by name or by path below it."""
    if not local.is_dir() or local.is_symlink():
        return
    for path in sorted(local.rglob("*"), reverse=True):
        inside = PurePosixPath(path.relative_to(local).as_posix())
        if any(fnmatch.fnmatchcase(inside.name, one) or fnmatch.fnmatchcase(str(inside), one) for one in patterns):
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
