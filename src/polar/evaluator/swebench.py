"""`swebench`: an instance in SWE-bench's format, graded by the `swebench` library's own specs, log parsers and rules.

A row as SWE-bench first published them is enough: how its repository is tested at its version, the library knows (4.1). A row of today
says so itself (`eval_script`, `log_parser`, `eval_type`), and the library's version 5 takes only such. The script runs in our sandbox: the
instance's image, or any sandbox with the repository in `repo_dir`. Nothing is downloaded, and the sandbox has no network: where a script
installs the repository again first, as the library's do, that succeeds only if what it builds with is there, and else changes nothing.

The library cuts the log at fixed marks, which code under test can print. Here the script prints marks with a random part; the library sees
what is between them alone, without what looks like marks of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from polar.chat import JsonObject
from polar.errors import ConfigError, EvaluatorError
from polar.evaluator import patches
from polar.evaluator.base import Evaluator, Evidence, Verdict, register
from polar.evaluator.budget import Budget
from polar.evaluator.command import facts, task_path
from polar.evaluator.commands import SAFE_ENV, keep, run_tests
from polar.evaluator.place import sandbox
from polar.evaluator.swebench_specs import END, EXIT, START, TESTBED, Spec, library, names
from polar.evaluator.test_map import PatchedRepo, bring_patch, restore_trusted


class SwebenchConfig(PatchedRepo):
    model_config = ConfigDict(extra="forbid")

    instance: dict[str, Any] | None = None
    instance_path: str | None = None
    """A JSON or JSON Lines file on the node, relative to the task's folder; with several rows, `instance_id` says which."""
    instance_id: str | None = None
    repo_dir: str | None = "/testbed"
    """In which the images of SWE-bench keep the repository; scripts that say `/testbed` are rewritten for another place."""
    test_command: str | None = None
    """For a row without `eval_script`: over the library's, or where it has none. The files of the test patch are put at its end."""
    log_parser: str | None = None
    """Of the library (`swebench.harness.log_parsers`); over the row's own and the repository's."""
    timeout_seconds: float | None = Field(default=1800.0, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _one_instance(self) -> SwebenchConfig:
        if (self.instance is None) == (self.instance_path is None):
            raise ValueError("give the instance itself or an instance_path")
        if self.instance is not None:
            checked(self.instance)
        return self


@register
class Swebench(Evaluator[SwebenchConfig]):
    name = "swebench"
    Config = SwebenchConfig

    def __init__(self, config: SwebenchConfig, env: Mapping[str, str] | None = None) -> None:
        """Raises `ConfigError` where the library is missing, or neither it nor the row says how the row is tested."""
        super().__init__(config, env)
        self.library = library()
        if config.instance is not None:
            self._spec(config.instance)

    async def evaluate(self, evidence: Evidence) -> Verdict:
        config = self.config
        instance = config.instance or self._read(evidence)
        async with sandbox(evidence) as runtime:
            budget = Budget(evidence.timeout_s)
            repo = config.repo_dir or runtime.workdir
            try:
                spec = await asyncio.to_thread(self._spec, instance, repo)
            except ConfigError as error:
                raise EvaluatorError(f"the instance {instance['instance_id']} cannot be tested: {error}") from error
            test_patch = str(instance.get("test_patch") or "").encode()
            trusted = [*patches.touched(test_patch), *_files(spec)]
            prepared = await bring_patch(config, evidence, runtime, budget, trusted_paths=trusted, env=self.env)
            if prepared.refused is not None:
                return Verdict(0.0, report={**prepared.report, "instance_id": spec.instance_id, "reason": prepared.refused})
            await restore_trusted(config, prepared, runtime, budget)
            mark = secrets.token_hex(8)
            script = f"{runtime.home}/evaluator/eval.sh"
            await runtime.write(script, marked(spec.script, mark).encode(), mode=0o755)
            ran = await run_tests(
                runtime,
                f"exec bash '{script}'",
                budget=budget,
                limit_s=config.timeout_seconds,
                cwd=repo,
                env={**SAFE_ENV, **self.env},
                log=evidence.folder / "eval.log",
            )
        report = {**prepared.report, "instance_id": spec.instance_id, **facts(ran)}
        if ran.timed_out:
            return Verdict(0.0, report={**report, "reason": "the tests did not finish in time"})
        if START + mark not in ran.output and not ran.truncated:
            raise EvaluatorError(f"the evaluation script of {spec.instance_id} never came to its tests: {ran.output[-300:]}")
        log = evidence.folder / "test_output.txt"
        await asyncio.to_thread(keep, log, graded_part(ran.output, mark).encode(errors="replace"))
        graded = await asyncio.to_thread(self.library.grade, spec, log)
        return _verdict(graded, report)

    def _spec(self, instance: JsonObject, repo: str = TESTBED) -> Spec:
        config = self.config
        return self.library.spec(instance, log_parser=config.log_parser, test_command=config.test_command, repo_dir=repo)

    def _read(self, evidence: Evidence) -> JsonObject:
        path = task_path(evidence, self.config.instance_path or "")
        try:
            text = path.read_text()
            rows = [json.loads(line) for line in text.split("\n") if line.strip()] if path.suffix == ".jsonl" else json.loads(text)
            rows = rows if isinstance(rows, list) else [rows]
            wanted = self.config.instance_id
            found = [row for row in rows if wanted is None or row.get("instance_id") == wanted]
            if len(found) != 1:
                raise EvaluatorError(f"{path} holds {len(found)} instances {wanted or ''}; give the instance_id of one")
            return checked(found[0])
        except (OSError, ValueError, AttributeError) as error:
            raise EvaluatorError(f"{path}: {error}") from error


def checked(instance: JsonObject) -> JsonObject:
    """The row. Raises `ValueError` for one that cannot be graded."""
    missing = [name for name in ("instance_id", "FAIL_TO_PASS", "PASS_TO_PASS") if name not in instance]
    if missing:
        raise ValueError(f"the instance has no {', '.join(missing)}")
    if not instance.get("eval_script") and not (instance.get("test_patch") and instance.get("base_commit")):
        raise ValueError("the instance has neither an eval_script nor a test_patch with a base_commit to make one from")
    if not (names(instance["FAIL_TO_PASS"]) or names(instance["PASS_TO_PASS"])):
        raise ValueError("the instance names no test in FAIL_TO_PASS or PASS_TO_PASS: nothing can be judged")
    return instance


def marked(script: str, mark: str) -> str:
    """The script with marks that nothing but it knows."""
    for text in (START, END, EXIT):
        script = script.replace(text, text + mark)
    return script


def graded_part(output: str, mark: str) -> str:
    """What the script printed from its first mark to its last, with the library's marks, and without any others. A mark that is missing
    is missing there too."""
    _, start, rest = output.partition(START + mark)
    tests, end, rest = rest.partition(END + mark)
    code = re.search(re.escape(EXIT + mark) + r": (\d+)", rest)
    part = [START] * bool(start) + [tests.replace(">>>>> ", "> ")] + [END] * bool(end)
    if code is not None:
        part.append(f"{EXIT}: {code[1]}")
    return "\n".join(part) + "\n"


def _files(spec: Spec) -> list[str]:
    """Files of the instance's tests, where their names tell them."""
    tests = (*spec.fail_to_pass, *spec.pass_to_pass)
    return list(dict.fromkeys(name.split("::", 1)[0] for name in tests if "::" in name and " " not in name.split("::", 1)[0]))


def _verdict(graded: JsonObject, report: JsonObject) -> Verdict:
    tests = graded.get("tests_status", {})
    metrics = {f"{name.lower()}_passed": float(len(tests[name]["success"])) for name in ("FAIL_TO_PASS", "PASS_TO_PASS") if name in tests}
    return Verdict(float(bool(graded["resolved"])), metrics=metrics, report={**report, **graded})
