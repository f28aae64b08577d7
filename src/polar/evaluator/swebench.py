"""`swebench`: an instance in SWE-bench's format, graded by the `swebench` library's own log parsers and rules (version 5).

An instance row of today carries all that is needed: `eval_script`, `log_parser`, `eval_type`, `FAIL_TO_PASS`, `PASS_TO_PASS`, `test_patch`.
Rows of SWE-bench Verified as first published lack the first three; for their twelve repositories the script is made here as the
benchmark's own harness made it (test patch over files put back to `base_commit`, the repository's test command, the named files). The
script runs in our sandbox: the instance's image, or any sandbox with the repository in `repo_dir`. Nothing is downloaded.

The library cuts the log at fixed marks, which code under test can print. Here the script prints marks with a random part, and what looks
like one of the library's in the output is taken out before the library sees it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
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
from polar.evaluator.test_map import PatchedRepo, bring_patch, restore_trusted

START, END, EXIT = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
NOT_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate && conda activate testbed; fi"
_PYTEST = "pytest -rA"
VERIFIED: Mapping[str, tuple[str, str]] = {
    "astropy/astropy": ("parse_log_astropy", "pytest -rA -vv -o console_output_style=classic --tb=no"),
    "django/django": ("parse_log_django", "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"),
    "matplotlib/matplotlib": ("parse_log_matplotlib", _PYTEST),
    "mwaskom/seaborn": ("parse_log_seaborn", "pytest --no-header -rA"),
    "pallets/flask": ("parse_log_flask", _PYTEST),
    "psf/requests": ("parse_log_requests", _PYTEST),
    "pydata/xarray": ("parse_log_xarray", _PYTEST),
    "pylint-dev/pylint": ("parse_log_pylint", _PYTEST),
    "pytest-dev/pytest": ("parse_log_pytest", _PYTEST),
    "scikit-learn/scikit-learn": ("parse_log_scikit", _PYTEST),
    "sphinx-doc/sphinx": ("parse_log_sphinx", "tox --current-env -epy39 -v --"),
    "sympy/sympy": ("parse_log_sympy", "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose"),
}
"""Repositories of SWE-bench Verified: the library's log parser, and the test command, for rows that name neither."""


class SwebenchConfig(PatchedRepo):
    model_config = ConfigDict(extra="forbid")

    instance: dict[str, Any] | None = None
    instance_path: str | None = None
    """A JSON or JSON Lines file on the node, relative to the task's folder; with several rows, `instance_id` says which."""
    instance_id: str | None = None
    repo_dir: str | None = "/testbed"
    """In which the images of SWE-bench keep the repository; scripts that say `/testbed` are rewritten for another place."""
    test_command: str | None = None
    log_parser: str | None = None
    """Of the library (`swebench.harness.log_parsers`); over the row's own."""
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
        super().__init__(config, env)
        library("types")

    async def evaluate(self, evidence: Evidence) -> Verdict:
        config = self.config
        instance = config.instance or self._read(evidence)
        async with sandbox(evidence) as runtime:
            budget = Budget(evidence.timeout_s)
            repo = config.repo_dir or runtime.workdir
            spec = await asyncio.to_thread(make_spec, instance, config, repo)
            test_patch = str(instance.get("test_patch") or "").encode()
            trusted = [*patches.touched(test_patch), *_files(spec)]
            prepared = await bring_patch(config, evidence, runtime, budget, trusted_paths=trusted, env=self.env)
            if prepared.refused is not None:
                return Verdict(0.0, report={**prepared.report, "instance_id": spec.instance_id, "reason": prepared.refused})
            await restore_trusted(config, prepared, runtime, budget)
            mark = secrets.token_hex(8)
            script = f"{runtime.home}/evaluator/eval.sh"
            await runtime.write(script, marked(spec.eval_script, mark).encode(), mode=0o755)
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
        await asyncio.to_thread(keep, log, unmarked(ran.output, mark).encode(errors="replace"))
        graded = await asyncio.to_thread(_grade, spec, evidence.patch, log)
        return _verdict(graded, report)

    def _read(self, evidence: Evidence) -> JsonObject:
        path = task_path(evidence, self.config.instance_path or "")
        try:
            text = path.read_text()
            rows = [json.loads(line) for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else json.loads(text)
            rows = rows if isinstance(rows, list) else [rows]
            wanted = self.config.instance_id
            found = [row for row in rows if wanted is None or row.get("instance_id") == wanted]
            if len(found) != 1:
                raise EvaluatorError(f"{path} holds {len(found)} instances {wanted or ''}; give the instance_id of one")
            return checked(found[0])
        except (OSError, ValueError, AttributeError) as error:
            raise EvaluatorError(f"{path}: {error}") from error


def library(module: str) -> Any:
    """A module of the library, which is optional and slow to import. Raises `ConfigError` where it is missing or too old."""
    try:
        return importlib.import_module(f"swebench.{module}")
    except ImportError as error:
        raise ConfigError(f"the evaluator swebench needs the library of that name: pip install 'swebench>=5' ({error})") from error


def checked(instance: JsonObject) -> JsonObject:
    """The row. Raises `ValueError` for one that cannot be graded."""
    missing = [name for name in ("instance_id", "FAIL_TO_PASS", "PASS_TO_PASS") if name not in instance]
    if missing:
        raise ValueError(f"the instance has no {', '.join(missing)}")
    if not instance.get("eval_script") and not (instance.get("test_patch") and instance.get("base_commit")):
        raise ValueError("the instance has neither an eval_script nor a test_patch with a base_commit to make one from")
    return instance


def make_spec(instance: JsonObject, config: SwebenchConfig, repo: str) -> Any:
    """The library's `TestSpec` of how the instance is tested. Raises `EvaluatorError` for a parser that it does not have."""
    parser, command = VERIFIED.get(str(instance.get("repo")), ("parse_log_pytest", _PYTEST))
    parser = config.log_parser or instance.get("log_parser") or parser
    if parser not in library("harness.log_parsers").PARSER_REGISTRY:
        raise EvaluatorError(f"swebench has no log parser {parser!r}")
    script = instance.get("eval_script") or eval_script(instance, config.test_command or instance.get("test_cmd") or command)
    whole = {"image": "", "repo": "", "version": "", "eval_type": "pass_and_fail", **instance}
    spec = library("harness.utils").make_test_spec({**whole, "log_parser": parser, "eval_script": script})
    if repo != "/testbed":
        spec.eval_script_list = [re.sub(r"/testbed(?![\w.-])", lambda _: repo, line) for line in spec.eval_script_list]
    return spec


def eval_script(instance: JsonObject, command: str) -> str:
    """The script that the benchmark's harness makes of a row without one."""
    base, patch = str(instance["base_commit"]), str(instance["test_patch"])
    files = [path for path in patches.touched(patch.encode()) if not patches.unsafe(path)]
    named = [path for path in files if not path.endswith(NOT_TESTS)]
    if instance.get("repo") == "django/django":
        named = [path.removesuffix(".py").removeprefix("tests/").replace("/", ".") for path in named]
    quoted = " ".join(map(shlex.quote, files))
    back = f'for path in {quoted}; do git checkout -q {shlex.quote(base)} -- "$path" 2> /dev/null || rm -f -- "$path"; done'
    end = "EOF_" + secrets.token_hex(6)
    return "\n".join(
        [
            "cd /testbed",
            ACTIVATE,
            back,
            f"git apply -v - <<'{end}'\n{patch.rstrip(chr(10))}\n{end}",
            f": '{START}'",
            f"{command} {' '.join(map(shlex.quote, named))}",
            f": '{END}'",
            back,
        ]
    )


def marked(script: str, mark: str) -> str:
    """The script with marks that nothing but it knows."""
    for text in (START, END, EXIT):
        script = script.replace(text, text + mark)
    return script


def unmarked(output: str, mark: str) -> str:
    """The output with the script's marks as the library reads them, and any others taken out."""
    hidden = {text: f"\0{number}\0" for number, text in enumerate((START, END, EXIT))}
    output = output.replace("\0", "")
    for text, place in hidden.items():
        output = output.replace(text + mark, place)
    output = output.replace(">>>>> ", "> ")
    for text, place in hidden.items():
        output = output.replace(place, text)
    return output


def _files(spec: Any) -> list[str]:
    """Files of the instance's tests, where their names tell them."""
    names = (*spec.FAIL_TO_PASS, *spec.PASS_TO_PASS)
    return list(dict.fromkeys(name.split("::", 1)[0] for name in names if "::" in name and " " not in name.split("::", 1)[0]))


def _grade(spec: Any, patch: bytes | None, log: Path) -> JsonObject:
    prediction: dict[str, str] = {
        "instance_id": spec.instance_id,
        "model_name_or_path": "polar",
        "model_patch": (patch or b"").decode(errors="replace"),
    }
    report: JsonObject = library("harness.grading").get_eval_report(spec, prediction, str(log), include_tests_status=True)[spec.instance_id]
    return report


def _verdict(graded: JsonObject, report: JsonObject) -> Verdict:
    tests = graded.get("tests_status", {})
    metrics = {f"{name.lower()}_passed": float(len(tests[name]["success"])) for name in ("FAIL_TO_PASS", "PASS_TO_PASS") if name in tests}
    return Verdict(float(bool(graded["resolved"])), metrics=metrics, report={**report, **graded})
