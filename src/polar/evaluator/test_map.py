"""`test_map`: a repository's own tests judge. The agent's patch is applied to a fresh sandbox, the tests are put back to the task's
own, one command runs them, and its output tells which passed. The reward is 1 where every test of `FAIL_TO_PASS` and of `PASS_TO_PASS`
passed.

What an agent did to tests counts for nothing: files of `tests`, `tests_dir` and `test_patch`, those that the tests to be judged by are in,
and what steers pytest (`polar.evaluator.guards.PYTEST`), are dropped from its patch and overwritten after it. A patch that does not apply,
a build that fails and tests that do not end are rewards of 0; a test patch that does not apply is the task's fault, and an error.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, field_validator, model_validator

from polar.chat import JsonObject
from polar.errors import EvaluatorError, UnsafePath
from polar.evaluator import patches
from polar.evaluator.base import Evaluator, Evidence, Verdict, register
from polar.evaluator.budget import Budget
from polar.evaluator.command import facts, task_path
from polar.evaluator.commands import GIT_ENV, keep, run_tests
from polar.evaluator.guards import PARTLY, PYTEST, Trusted, guarded, replace
from polar.evaluator.parsers import Parser, Statuses, junit, parse
from polar.evaluator.place import sandbox
from polar.runtime.base import ExecResult, Runtime

MAX_TESTS = 64 << 20


class PatchedRepo(BaseModel):
    """What every evaluator that grades a patch in a repository takes."""

    model_config = ConfigDict(extra="forbid")

    repo_dir: str | None = None
    """Where the repository is in the sandbox; `None`: the work folder."""
    base_commit: str | None = None
    """The agent's repository shows nothing after it (`polar.evaluator.guards.hide_history`); `None`: its HEAD."""
    patch_command: str | None = None
    """Run in the agent's sandbox, in `repo_dir`, to get its patch; `None`: the difference of the work folder that was recorded."""
    exclude_patterns: list[str] = Field(default_factory=list)
    """Paths of the agent's patch that are left out: names, or globs with a slash for whole paths."""
    protect: list[str] = Field(default_factory=lambda: list(PYTEST))
    """Names that only the task may set."""
    allow: list[str] = Field(default_factory=list)
    """Paths that the agent may change although `protect` names them: where the task is about such a file."""
    apply_timeout_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    timeout_seconds: float | None = Field(default=1200.0, gt=0, allow_inf_nan=False)


def _names(value: Any) -> Any:
    """SWE-bench rows hold their lists as JSON text."""
    return json.loads(value) if isinstance(value, str) else value


class MappedTestsConfig(PatchedRepo):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    test_command: str
    fail_to_pass: list[str] = Field(default_factory=list, validation_alias=AliasChoices("fail_to_pass", "FAIL_TO_PASS"))
    pass_to_pass: list[str] = Field(default_factory=list, validation_alias=AliasChoices("pass_to_pass", "PASS_TO_PASS"))
    expected: dict[str, str] = Field(default_factory=dict)
    """Test to status (`PASSED`, `FAILED`, ...): each must come out exactly so."""
    parser: Parser = "auto"
    junit_path: str | None = None
    """With `parser: junit`: the XML file that the command writes, relative to `repo_dir`. One that is there before is removed."""
    test_patch: str | None = None
    """Applied after the agent's patch, to files put back to their committed state."""
    tests: dict[str, str] = Field(default_factory=dict)
    """Path in the repository to content: written over whatever is there."""
    tests_dir: str | None = None
    """A folder of the node, relative to the task's, whose files are written over the repository's."""
    setup: list[str] = Field(default_factory=list)
    """Commands after the patch and before the tests (a build); one that fails is a reward of 0."""
    partial: bool = False
    """The reward is the share of tests that are as they must be, instead of 0 or 1."""

    _lists = field_validator("fail_to_pass", "pass_to_pass", mode="before")(_names)

    @model_validator(mode="after")
    def _something_to_check(self) -> MappedTestsConfig:
        if not (self.fail_to_pass or self.pass_to_pass or self.expected):
            raise ValueError("give FAIL_TO_PASS, PASS_TO_PASS or expected: without a test nothing can be judged")
        if (self.parser == "junit") != (self.junit_path is not None):
            raise ValueError("parser junit and junit_path go together")
        if self.junit_path is not None and patches.unsafe(self.junit_path):
            raise ValueError("junit_path is relative to the repository, and inside of it")
        return self


@dataclass(frozen=True, slots=True)
class Prepared:
    """The agent's patch in a fresh repository. `refused`: why it could not be applied."""

    repo: str
    trusted: Trusted
    report: JsonObject
    refused: str | None = None


async def bring_patch(
    config: PatchedRepo, evidence: Evidence, runtime: Runtime, budget: Budget, *, trusted_paths: Sequence[str], env: Mapping[str, str]
) -> Prepared:
    """Applies what may be applied of the agent's patch. `trusted_paths`: files that the evaluator brings itself.

    Raises `EvaluatorError` where there is no patch to be had.
    """
    repo = config.repo_dir or runtime.workdir
    protect = tuple(config.protect)
    trusted = await Trusted.take(runtime, repo, protect, budget=budget)
    if runtime is evidence.agent:
        return Prepared(repo, trusted, {"patch": "in place"})
    patch = await _patch(config, evidence, runtime, budget, env)
    if isinstance(patch, str):
        return Prepared(repo, trusted, {"patch": "none"}, patch)
    own = frozenset(trusted_paths)

    def drop(path: str) -> bool:
        if path in own or guarded(path, config.exclude_patterns):
            return True
        steers = guarded(path, protect) and path.rsplit("/", 1)[-1] not in PARTLY
        return steers and not guarded(path, config.allow)

    def kept_of_it() -> tuple[bytes, tuple[str, ...], int]:
        kept, gone = patches.filtered(patch, drop, keep_clear=[*own, *trusted.files])
        keep(evidence.folder / "graded.patch", kept)
        return kept, gone, len(patches.touched(kept))

    kept, gone, files = await asyncio.to_thread(kept_of_it)  # it may have millions of lines, and others share the event loop
    applied = await patches.apply(runtime, kept, repo, budget=budget, limit_s=config.apply_timeout_seconds)
    report: JsonObject = {"patch": applied.how, "patch_files": files}
    if gone:
        report["patch_dropped"] = list(gone)
    return Prepared(repo, trusted, report, None if applied.ok else f"the patch does not apply: {applied.how}")


async def _patch(config: PatchedRepo, evidence: Evidence, fresh: Runtime, budget: Budget, env: Mapping[str, str]) -> bytes | str:
    """The patch, or why the agent's work has none, which is its own doing. That a command fails is, where the same command works on the
    task as it was (`fresh`)."""
    if config.patch_command is None:
        if evidence.patch is None and evidence.patch_refused is not None:
            return evidence.patch_refused
        if evidence.patch is None:
            raise EvaluatorError("no patch of the agent's work was taken (is git in its sandbox?), and the evaluator is to apply one")
        return evidence.patch
    if evidence.agent is None:
        raise EvaluatorError("the agent's sandbox is gone, and patch_command is to run in it")
    done = await _patch_command(config, evidence.agent, budget, env)
    if done.ok and not done.truncated:
        return done.stdout
    why = f"patch_command gave no patch: {done.tail() or 'more than 64 MiB'}"
    control = await _patch_command(config, fresh, budget, env)
    if not control.ok or control.truncated:
        raise EvaluatorError(why)
    return why


async def _patch_command(config: PatchedRepo, runtime: Runtime, budget: Budget, env: Mapping[str, str]) -> ExecResult:
    return await runtime.exec(
        config.patch_command or "",
        cwd=config.repo_dir,
        env={**GIT_ENV, **env},
        timeout_s=min(config.apply_timeout_seconds, budget.left()),
        keep_bytes=64 << 20,
    )


async def restore_trusted(config: PatchedRepo, prepared: Prepared, runtime: Runtime, budget: Budget) -> None:
    """Puts back what steers the tests; what `allow` names stays."""
    trusted = prepared.trusted
    undone = await trusted.restore(runtime, budget=budget, keep=config.allow)
    if undone:
        prepared.report["undone"] = list(undone)


@register
class MappedTests(Evaluator[MappedTestsConfig]):
    name = "test_map"
    Config = MappedTestsConfig

    async def evaluate(self, evidence: Evidence) -> Verdict:
        config = self.config
        files = self._trusted_files(evidence)
        patched = patches.touched(config.test_patch.encode()) if config.test_patch else ()
        async with sandbox(evidence) as runtime:
            budget = Budget(evidence.timeout_s)
            prepared = await bring_patch(
                config, evidence, runtime, budget, trusted_paths=[*files, *patched, *test_files(config)], env=self.env
            )
            if prepared.refused is not None:
                return self._nothing(prepared.report, prepared.refused)
            await restore_trusted(config, prepared, runtime, budget)
            await self._tests(runtime, prepared.repo, files, patched, budget)
            for number, command in enumerate(config.setup):
                ran = await run_tests(
                    runtime,
                    command,
                    budget=budget,
                    limit_s=config.timeout_seconds,
                    cwd=prepared.repo,
                    env=self.env,
                    log=evidence.folder / f"setup-{number}.log",
                )
                if ran.exit_code != 0 or ran.timed_out:
                    return self._nothing({**prepared.report, **facts(ran)}, f"the setup command {command!r} failed on the agent's work")
            if config.junit_path is not None:  # an agent's own, where the tests end before they write theirs
                await replace(runtime, prepared.repo, {config.junit_path: None}, budget=budget)
            ran = await run_tests(
                runtime,
                config.test_command,
                budget=budget,
                limit_s=config.timeout_seconds,
                cwd=prepared.repo,
                env=self.env,
                log=evidence.folder / "tests.log",
            )
            report = {**prepared.report, **facts(ran)}
            if ran.timed_out:
                return self._nothing(report, "the tests did not finish in time")
            statuses = await self._statuses(runtime, prepared.repo, ran.output)
        if statuses.contradicts(ran.exit_code):
            return self._nothing(
                report, f"the run ended with exit code {ran.exit_code}, and no test of it failed: its output is not believed"
            )
        return self._verdict(statuses, report)

    def _trusted_files(self, evidence: Evidence) -> dict[str, bytes]:
        """The tests that the task gives, by their path in the repository."""
        files = {}
        if self.config.tests_dir is not None:
            folder = task_path(evidence, self.config.tests_dir)
            paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            if sum(path.stat().st_size for path in paths) > MAX_TESTS:
                raise EvaluatorError(f"{folder} holds more than {MAX_TESTS >> 20} MiB of tests")
            files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
        return {**files, **{path: text.encode() for path, text in self.config.tests.items()}}

    async def _tests(self, runtime: Runtime, repo: str, files: Mapping[str, bytes], patched: Sequence[str], budget: Budget) -> None:
        """Puts the task's tests in their places, over whatever is there."""
        if self.config.test_patch:
            await committed(runtime, repo, patched, budget)
            applied = await patches.apply(runtime, self.config.test_patch.encode(), repo, budget=budget)
            if not applied.ok:
                raise EvaluatorError(f"the task's test_patch does not apply: {applied.how}")
        await replace(runtime, repo, files, budget=budget)

    async def _statuses(self, runtime: Runtime, repo: str, output: str) -> Statuses:
        """In a thread: what code under test prints may take longer to read than a node may be silent."""
        config = self.config
        if config.junit_path is None:
            known = {*config.fail_to_pass, *config.pass_to_pass, *config.expected}
            return await asyncio.to_thread(parse, output, config.parser, known=known)
        try:
            written = await runtime.read(f"{repo}/{config.junit_path}")
        except (FileNotFoundError, UnsafePath):
            return Statuses({})
        return await asyncio.to_thread(junit, written.decode(errors="replace"))

    def _verdict(self, statuses: Statuses, report: JsonObject) -> Verdict:
        config = self.config
        groups = {"FAIL_TO_PASS": config.fail_to_pass, "PASS_TO_PASS": config.pass_to_pass}
        tests = {
            name: {
                "success": [test for test in wanted if statuses.passed(test)],
                "failure": [test for test in wanted if not statuses.passed(test)],
            }
            for name, wanted in groups.items()
        }
        if config.expected:
            right = [test for test, status in config.expected.items() if statuses.of(test) == status.upper()]
            tests["expected"] = {"success": right, "failure": [test for test in config.expected if test not in right]}
        good = sum(len(one["success"]) for one in tests.values())
        total = good + sum(len(one["failure"]) for one in tests.values())
        metrics = {"tests_right": float(good), "tests_total": float(total)}
        reward = good / total if config.partial else float(good == total)
        return Verdict(reward, metrics=metrics, report={**report, "tests_status": tests, "tests_seen": len(statuses.raw)})

    def _nothing(self, report: JsonObject, reason: str) -> Verdict:
        return Verdict(0.0, report={**report, "reason": reason})


def test_files(config: MappedTestsConfig) -> list[str]:
    """The files of the tests that are asked for, where their names tell them."""
    names = (*config.fail_to_pass, *config.pass_to_pass, *config.expected)
    return list(dict.fromkeys(name.split("::", 1)[0] for name in names if "::" in name and " " not in name.split("::", 1)[0]))


async def committed(runtime: Runtime, repo: str, paths: Sequence[str], budget: Budget) -> None:
    """Puts these files back to their committed state; those that HEAD does not have are removed. Raises `EvaluatorError`."""
    await replace(runtime, repo, dict.fromkeys(paths), budget=budget)
    script = 'cd -- "$1" || exit 1; shift\nfor path in "$@"; do git cat-file -e "HEAD:./$path" 2> /dev/null || continue\n'
    script += 'git checkout -q HEAD -- "$path" || exit 1; done'
    done = await runtime.exec(["sh", "-c", script, "sh", repo, *paths], env=GIT_ENV, timeout_s=min(60.0, budget.left()))
    if not done.ok:
        raise EvaluatorError(f"the task's tests could not be put back to their committed state: {done.tail()}")
