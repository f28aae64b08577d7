"""How an instance of SWE-bench is tested and graded, as the installed `swebench` library says. Knows no sandbox and no patch of an agent.

Two forms of the library differ in where an instance's script comes from:

* 4.1 up to 5 has specs by repository and version (`Specs`): a row as first published, without `eval_script`, is enough;
* 5 has none (`Scripts`): the row brings `eval_script`, `log_parser` and `eval_type` itself. Such rows work with 4.1 too.

A row that brings no script, of a repository that the library does not know (SWE-Gym's, one's own), needs a test command and the name of
a log parser. Nothing is guessed: what neither the row, the configuration nor the library says is a `ConfigError`. Nothing is downloaded.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pkgutil
import re
import secrets
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from polar.chat import JsonObject
from polar.errors import ConfigError
from polar.evaluator import patches

START, END, EXIT = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
"""Marks of the library, in scripts and logs. `EXIT` is followed by `: ` and the tests' exit code (5 only)."""
WITH_SPECS = "swebench>=4.1,<5"
TESTBED = "/testbed"
"""Where the benchmark's images keep the repository, which its scripts take for granted."""
ACTIVATE = "if [ -f /opt/miniconda3/bin/activate ]; then . /opt/miniconda3/bin/activate && conda activate testbed; fi"
NO_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
"""Files of a test patch that a test command is not given."""

EVAL_TYPES = ("pass_and_fail", "fail_only")
"""Whether a test that the log does not show has failed or passed."""

LogParser = Callable[[str, Any], dict[str, str]]
"""Of the library: a log and its `TestSpec` in, status by test out."""


@dataclass(frozen=True, slots=True)
class Spec:
    """How one instance is tested. `script` prints the library's marks around the tests' output; `native` is the library's `TestSpec`."""

    instance_id: str
    script: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    log_parser: str
    parse: LogParser
    native: Any


class Library(ABC):
    """One installed version of the library."""

    def __init__(self, version: str) -> None:
        self.version = version

    def spec(self, row: JsonObject, *, log_parser: str | None = None, test_command: str | None = None, repo_dir: str = TESTBED) -> Spec:
        """How the row is tested; `log_parser` and `test_command` are the configuration's. Raises `ConfigError` where a script or a parser
        is missing, and says what would give it."""
        command = test_command or row.get("test_cmd")
        if row.get("eval_script"):
            script = str(row["eval_script"])
        elif command:
            script = script_of(row, str(command))
        else:
            script = self._script(row)
        name = log_parser or row.get("log_parser") or self._parser_of(str(row.get("repo")))
        if not name:
            raise ConfigError(
                f"swebench {self.version} does not say which log parser goes with {row.get('repo')}: give log_parser, "
                "the name of one of swebench.harness.log_parsers, such as parse_log_pytest"
            )
        if name not in self.parsers:
            raise ConfigError(f"swebench {self.version} has no log parser {name!r}; it has: {', '.join(sorted(self.parsers))}")
        eval_type = str(row.get("eval_type") or "pass_and_fail")
        if eval_type not in EVAL_TYPES:
            raise ConfigError(f"the row {row['instance_id']} has the eval_type {eval_type!r}; there are: {', '.join(EVAL_TYPES)}")
        native = self._native({**row, "eval_type": eval_type, "log_parser": str(name), "eval_script": script})
        script = native.eval_script
        if repo_dir != TESTBED:
            script = re.sub(rf"{TESTBED}(?![\w.-])", lambda _: repo_dir, script)
        tests = names(row["FAIL_TO_PASS"]), names(row["PASS_TO_PASS"])
        return Spec(str(row["instance_id"]), script, *tests, str(name), self.parsers[name], native)

    @property
    @abstractmethod
    def parsers(self) -> Mapping[str, LogParser]:
        """The library's log parsers by their names."""

    @abstractmethod
    def grade(self, spec: Spec, log: Path) -> JsonObject:
        """The library's report of a log: `resolved`, and `tests_status` where the tests ran."""

    @abstractmethod
    def _script(self, row: JsonObject) -> str:
        """The script of a row that brings none. Raises `ConfigError`."""

    @abstractmethod
    def _parser_of(self, repo: str) -> str | None:
        """The name of the repository's log parser."""

    @abstractmethod
    def _native(self, row: JsonObject) -> Any:
        """The library's `TestSpec` of a row that has everything."""


class Specs(Library):
    """4.1 up to 5. Of a spec, only the evaluation is made: the library's `make_test_spec` makes the environment's installation too, for
    which it downloads requirement files. The environment is there already: the instance's image, or the task's own."""

    @cached_property
    def parsers(self) -> Mapping[str, LogParser]:
        package = _module("harness.log_parsers")
        modules = [importlib.import_module(f"{package.__name__}.{one.name}") for one in pkgutil.iter_modules(package.__path__)]
        return {name: value for module in modules for name, value in vars(module).items() if name.startswith("parse_log_")}

    def grade(self, spec: Spec, log: Path) -> JsonObject:
        """As the library's `get_eval_report`, which looks the parser up by repository and so knows no repositories but its own. A test that
        was to be repaired must have passed: here the library counts one that was skipped neither as a failure nor as a success, and code
        under test can skip the test that tests it."""
        constants, grading = _module("harness.constants"), _module("harness.grading")
        report: JsonObject = {"patch_exists": True, "patch_successfully_applied": False, "resolved": False}
        output = log.read_text(errors="replace")
        if START not in output or END not in output:
            return report
        statuses = spec.parse(output.split(START)[1].split(END)[0], spec.native)
        expected = {"instance_id": spec.instance_id, "FAIL_TO_PASS": list(spec.fail_to_pass), "PASS_TO_PASS": list(spec.pass_to_pass)}
        tests = grading.get_eval_tests_report(statuses, expected)
        full = grading.get_resolution_status(tests) == constants.ResolvedStatus.FULL.value
        repaired = set(spec.fail_to_pass) <= set(tests["FAIL_TO_PASS"]["success"])
        return {**report, "patch_successfully_applied": True, "resolved": full and repaired, "tests_status": tests}

    def _script(self, row: JsonObject) -> str:
        repo, version, known = str(row.get("repo")), str(row.get("version")), _module("harness.constants").MAP_REPO_VERSION_TO_SPECS
        elsewhere = "give test_command and log_parser, or a row with an eval_script"
        if repo not in known:
            raise ConfigError(f"swebench {self.version} has no specs of {repo}, and 5 has none at all; {elsewhere}")
        if version not in known[repo]:
            raise ConfigError(f"swebench {self.version} has no spec of {repo} {version}, only of {', '.join(known[repo])}; {elsewhere}")
        whole = {**row, "repo": repo, "version": version}
        base, patch = str(row["base_commit"]), str(row["test_patch"])
        create = _module("harness.test_spec.create_scripts")
        try:
            lines = create.make_eval_script_list(whole, known[repo][version], "testbed", TESTBED, base, patch)
        except importlib.import_module("unidiff").UnidiffParseError as error:  # what the library reads patches with
            raise ConfigError(f"the test_patch of {row['instance_id']} is no patch: {error}") from error
        return _bash(lines)

    def _parser_of(self, repo: str) -> str | None:
        parser = _module("harness.log_parsers").MAP_REPO_TO_PARSER.get(repo)
        return None if parser is None else str(parser.__name__)

    def _native(self, row: JsonObject) -> Any:
        repo = str(row.get("repo", ""))
        if row["eval_type"] == "fail_only" or repo in _module("harness.constants").FAIL_ONLY_REPOS:
            raise ConfigError(
                f"tests of {repo} count as passed where the log does not show them to fail, for swebench {self.version} even where they "
                "never ran: grade it with a row that has an eval_script and pip install 'swebench>=5'"
            )
        return _module("harness.test_spec.test_spec").TestSpec(
            instance_id=str(row["instance_id"]),
            repo=repo,
            version=str(row.get("version", "")),
            repo_script_list=[],
            env_script_list=[],
            eval_script_list=_lines(str(row["eval_script"])),
            arch="x86_64",
            FAIL_TO_PASS=list(names(row["FAIL_TO_PASS"])),
            PASS_TO_PASS=list(names(row["PASS_TO_PASS"])),
            language=_module("harness.constants").MAP_REPO_TO_EXT.get(repo, "py"),
            docker_specs={},
            namespace="swebench",
        )


class Scripts(Library):
    """5: rows bring their scripts."""

    @property
    def parsers(self) -> Mapping[str, LogParser]:
        registry: Mapping[str, LogParser] = _module("harness.log_parsers").PARSER_REGISTRY
        return registry

    def grade(self, spec: Spec, log: Path) -> JsonObject:
        prediction = {"instance_id": spec.instance_id, "model_name_or_path": "polar", "model_patch": ""}
        reports = _module("harness.grading").get_eval_report(spec.native, prediction, str(log), include_tests_status=True)
        report: JsonObject = reports[spec.instance_id]
        return report

    def _script(self, row: JsonObject) -> str:
        raise ConfigError(
            f"the row {row['instance_id']} has no eval_script, and swebench {self.version} has no specs of {row.get('repo')} "
            f"{row.get('version')} to make one from: pip install '{WITH_SPECS}', or give test_command and log_parser"
        )

    def _parser_of(self, repo: str) -> str | None:
        return None

    def _native(self, row: JsonObject) -> Any:
        return _module("harness.utils").make_test_spec({"image": "", "repo": "", "version": "", **row})


def library() -> Library:
    """The installed library. Raises `ConfigError` where it is missing or too old."""
    try:
        version = importlib.metadata.version("swebench")
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(f"the evaluator swebench needs the library of that name: pip install '{WITH_SPECS}'") from error
    return of_version(version)


def of_version(version: str) -> Library:
    """The library's form in this version. Raises `ConfigError` for one that is too old."""
    major, minor = (int(part) for part in [*re.findall(r"\d+", version), "0", "0"][:2])
    if (major, minor) < (4, 1):
        raise ConfigError(f"swebench {version} is too old: pip install '{WITH_SPECS}'")
    return Specs(version) if major == 4 else Scripts(version)


def script_of(row: JsonObject, command: str) -> str:
    """The script of a row whose test command is given: test files put back to `base_commit`, the row's `test_patch` over them, then the
    command with the test files at its end (as they are called after the patch)."""
    base, patch = shlex.quote(str(row["base_commit"])), str(row["test_patch"])
    files = [path for path in patches.touched(patch.encode()) if not patches.unsafe(path)]
    there = [one for one in patches.sections(patch.encode()) if b"\ndeleted file mode " not in one.text.split(b"\n@@ ")[0]]
    after = dict.fromkeys(path for one in there for path in one.paths[-1:])
    named = [shlex.quote(path) for path in after if path in files and not path.endswith(NO_TESTS)]
    quoted = " ".join(map(shlex.quote, files))
    back = f'for path in {quoted}; do git checkout -q {base} -- "$path" 2> /dev/null || rm -f -- "$path"; done'
    end = "EOF_" + secrets.token_hex(6)
    apply = f"git apply -v - <<'{end}'\n{patch.rstrip(chr(10))}\n{end}"
    return _bash([f"cd {TESTBED}", ACTIVATE, back, apply, f": '{START}'", " ".join([command, *named]), f": '{END}'", back])


def names(value: Any) -> tuple[str, ...]:
    """Names of tests: a list, or one as JSON text, as published rows have it. Raises `ValueError`."""
    value = json.loads(value) if isinstance(value, str) else value
    if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"a list of tests' names is wanted, not {str(value)[:100]}")
    return tuple(value)


def _bash(lines: list[str]) -> str:
    return "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\n"


def _lines(script: str) -> list[str]:
    """What the library's `TestSpec` makes this script of again."""
    return script.removeprefix(_bash([])).removesuffix("\n").split("\n")


def _module(name: str) -> Any:
    """A module of the library, which is optional and slow to import. Raises `ConfigError` where it cannot be imported."""
    try:
        return importlib.import_module(f"swebench.{name}")
    except ImportError as error:
        raise ConfigError(f"the library swebench is installed, but does not work: {error}; pip install '{WITH_SPECS}'") from error
