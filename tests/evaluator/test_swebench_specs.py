"""Scripts, log parsers and verdicts of the installed library, for rows as SWE-bench Verified first had them and for others."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from evaluator_lab import PYTEST, Lab, git, patch_of, work
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_test_map import FIX, TEST_PATCH, put

from polar.errors import ConfigError
from polar.evaluator import make
from polar.evaluator.swebench_specs import END, START, Scripts, Specs, library, of_version
from polar.runtime.spec import RuntimeSpec
from polar.tasks.instances import Instance

pytest.importorskip("swebench")
with_specs = pytest.mark.skipif(not isinstance(library(), Specs), reason="swebench 5 has no specs by repository")


class Case(NamedTuple):
    """A repository of SWE-bench Verified: a version and a test file of it, what the library runs, and how its test runner says `test_fix`
    and `test_old`."""

    repo: str
    version: str
    file: str
    runs: str
    fix: str
    old: str
    passed: str = "PASSED {}"
    failed: str = "FAILED {} - assert 3 == -1"


DJANGO = {"passed": "{} ... ok", "failed": "{} ... FAIL"}
CASES = [
    Case(
        "astropy/astropy",
        "1.3",
        "astropy/io/tests/test_a.py",
        "pytest -rA -vv",
        "astropy/io/tests/test_a.py::test_fix[a b]",
        "x.py::test_o",
    ),
    Case(
        "astropy/astropy",
        "5.1",
        "astropy/io/tests/test_a.py",
        "pytest -rA astropy",
        "astropy/io/tests/test_a.py::test_fix",
        "x.py::test_old",
    ),
    Case("django/django", "4.2", "tests/calc/tests.py", "runtests.py", "test_fix (calc.tests.T)", "test_old (calc.tests.T)", **DJANGO),
    Case(
        "matplotlib/matplotlib",
        "3.7",
        "lib/tests/test_a.py",
        "pytest -rA lib",
        "lib/tests/test_a.py::test_fix[MouseButton.LEFT]",
        "x::test_old",
    ),
    Case("mwaskom/seaborn", "0.12", "tests/test_a.py", "pytest --no-header -rA", "tests/test_a.py::test_fix", "tests/test_a.py::test_old"),
    Case("pallets/flask", "2.3", "tests/test_a.py", "pytest -rA tests", "tests/test_a.py::test_fix", "tests/test_a.py::test_old"),
    Case("psf/requests", "2.10", "tests/test_a.py", "pytest -rA tests", "tests/test_a.py::test_fix[/x/y]", "tests/test_a.py::test_old"),
    Case("pydata/xarray", "0.12", "xarray/tests/test_a.py", "pytest -rA xarray", "xarray/tests/test_a.py::test_fix", "x::test_old"),
    Case("pylint-dev/pylint", "2.15", "tests/test_a.py", "pytest -rA tests", "tests/test_a.py::test_fix", "tests/test_a.py::test_old"),
    Case(
        "pytest-dev/pytest", "7.0", "testing/test_a.py", "pytest -rA testing", "testing/test_a.py::test_fix", "testing/test_a.py::test_old"
    ),
    Case(
        "scikit-learn/scikit-learn", "1.3", "sklearn/tests/test_a.py", "pytest -rA sk", "sklearn/tests/test_a.py::test_fix", "x::test_old"
    ),
    Case("sphinx-doc/sphinx", "7.2", "tests/test_a.py", "tox --current-env", "tests/test_a.py::test_fix", "tests/test_a.py::test_old"),
    Case("sympy/sympy", "1.12", "sympy/core/tests/test_a.py", "bin/test -C", "test_fix", "test_old", "{} ok", "{} F"),
]
by_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.repo}-{case.version}")


def row_of(case: Case, base: str = "abc", **more: Any) -> dict[str, Any]:
    """A row with the fields that SWE-bench Verified has. The names of tests are as the library's parser reports them."""
    parse = library().spec(ROW | {"repo": case.repo, "version": case.version}).parse
    [fix] = parse(case.passed.format(case.fix), None)
    [old] = parse(case.passed.format(case.old), None)
    lines = ["from calc import sub", "def test_fix(): assert sub(1, 2) == -1", "def test_old(): pass"]
    patch = f"diff --git a/{case.file} b/{case.file}\nnew file mode 100644\n--- /dev/null\n+++ b/{case.file}\n@@ -0,0 +1,{len(lines)} @@\n"
    return {
        **ROW,
        "repo": case.repo,
        "version": case.version,
        "instance_id": f"{case.repo.replace('/', '__')}-1",
        "base_commit": base,
        "test_patch": patch + "".join(f"+{line}\n" for line in lines),
        "FAIL_TO_PASS": json.dumps([fix]),
        "PASS_TO_PASS": json.dumps([old]),
        **more,
    }


ROW: dict[str, Any] = {
    "repo": "pallets/flask",
    "version": "2.3",
    "instance_id": "pallets__flask-1",
    "base_commit": "abc",
    "patch": "",
    "test_patch": "diff --git a/tests/test_a.py b/tests/test_a.py\n--- a/tests/test_a.py\n+++ b/tests/test_a.py\n@@ -1 +1 @@\n-a\n+b\n",
    "problem_statement": "sub adds",
    "hints_text": "",
    "created_at": "2026-01-01T00:00:00Z",
    "FAIL_TO_PASS": '["tests/test_a.py::test_fix"]',
    "PASS_TO_PASS": '["tests/test_a.py::test_old"]',
    "environment_setup_commit": "def",
    "difficulty": "15 min - 1 hour",
}


def log_of(folder: Path, *lines: str) -> Path:
    path = folder / "log.txt"
    path.write_text("\n".join([START, *lines, END, ""]))
    return path


@with_specs
@by_case
def test_a_verified_row_is_tested_as_the_library_says(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own `make_test_spec`, which downloads requirements for an environment, makes the same script; ours is made without a network."""
    row = row_of(case)
    downloads = importlib.import_module("swebench.harness.test_spec.python").requests

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a download")

    monkeypatch.setattr(downloads, "get", refuse)
    spec = library().spec(row)
    monkeypatch.setattr(downloads, "get", lambda *_, **__: SimpleNamespace(status_code=200, text="dependencies:\n"))
    theirs = importlib.import_module("swebench.harness.test_spec.test_spec").make_test_spec(row, namespace="swebench")
    assert spec.script == theirs.eval_script
    assert case.runs in spec.script.split(f": '{START}'")[1].split(f": '{END}'")[0]
    assert spec.parse is importlib.import_module("swebench.harness.log_parsers").MAP_REPO_TO_PARSER[case.repo]
    task = Instance(row, "rows.jsonl:1")
    assert task.fields(RuntimeSpec(backend="docker"))["runtime"].image == theirs.instance_image_key == task.image


@with_specs
@by_case
def test_a_verified_row_is_graded_as_the_library_says(case: Case, tmp_path: Path) -> None:
    row = row_of(case)
    spec = library().spec(row)
    passed, failed = (one.format for one in (case.passed, case.failed))
    for reward, lines in (
        (True, [passed(case.fix), passed(case.old)]),
        (False, [failed(case.fix), passed(case.old)]),
        (False, [passed(case.fix), failed(case.old)]),
        (False, [passed(case.old)]),
        (False, ["Killed"]),
    ):
        log = log_of(tmp_path, *lines)
        assert library().grade(spec, log)["resolved"] is reward is theirs(row, log), lines


def theirs(row: dict[str, Any], log: Path) -> bool:
    """The library's own verdict of a log."""
    create = importlib.import_module("swebench.harness.test_spec.test_spec")
    facts = {name: json.loads(row[name]) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    nothing: dict[str, Any] = {"repo_script_list": [], "eval_script_list": [], "env_script_list": [], "docker_specs": {}, "namespace": None}
    spec = create.TestSpec(row["instance_id"], row["repo"], row["version"], arch="x86_64", language="py", **facts, **nothing)
    prediction = {"instance_id": row["instance_id"], "model_name_or_path": "x", "model_patch": "x"}
    report = importlib.import_module("swebench.harness.grading").get_eval_report(spec, prediction, str(log), include_tests_status=True)
    return bool(report[row["instance_id"]]["resolved"])


STATUS = st.sampled_from(["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", None])


@with_specs
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(statuses=st.tuples(STATUS, STATUS, STATUS), ends=st.booleans())
def test_the_verdict_is_the_librarys_except_that_what_was_skipped_is_not_repaired(
    statuses: tuple[str | None, ...], ends: bool, tmp_path: Path
) -> None:
    row = {**ROW, "FAIL_TO_PASS": '["t.py::a", "t.py::b"]', "PASS_TO_PASS": '["t.py::c"]'}
    log = log_of(tmp_path, *(f"{status} t.py::{name}" for status, name in zip(statuses, "abc", strict=True) if status))
    if not ends:
        log.write_text(log.read_text().replace(END, ""))
    resolved = library().grade(library().spec(row), log)["resolved"]
    assert resolved is (theirs(row, log) and "SKIPPED" not in statuses[:2])


def executables(folder: Path, texts: dict[str, str]) -> None:
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True, mode=0o755)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)


def tools(lab: Lab, folder: Path, texts: dict[str, str]) -> None:
    """Sandboxes have the repository where the benchmark has it, and these programs; what would install it does nothing."""
    executables(folder, {"python": "#!/bin/sh\necho $*\n", **texts})
    lab.defaults["mounts"].append({"source": str(folder), "target": "/opt/tools"})
    lab.defaults["env"]["PATH"] = "/opt/tools:/usr/local/bin:/usr/bin:/bin"
    lab.defaults["workdir"] = "/testbed"


@with_specs
@by_case
async def test_a_verified_row_through_a_sandbox(case: Case, lab: Lab, repository: Path, tmp_path: Path) -> None:
    """The library's script as it is, with test runners that look at the program: 1 for the gold patch, 0 for none."""
    runner = "\n".join(
        [
            "#!/bin/sh",
            f"echo '{case.passed.format(case.old)}'",
            f"if grep -q 'a - b' calc.py && grep -q test_fix {case.file}; then echo '{case.passed.format(case.fix)}'",
            f"else echo '{case.failed.format(case.fix)}'; fi\n",
        ]
    )
    tools(lab, tmp_path / "bin", {"pytest": runner, "tox": runner})
    executables(repository, {"bin/test": runner, "tests/runtests.py": runner})
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "runners")
    evaluator = make("swebench", {"instance": row_of(case, git(repository, "rev-parse", "HEAD"))})
    for script, reward in ((FIX, 1), ("true", 0)):
        async with lab.sandbox() as agent:
            await work(agent, script)
            patch = await patch_of(agent)
        verdict = await evaluator.evaluate(lab.evidence(None, patch=patch))
        assert verdict.reward == reward, verdict.report
        assert verdict.metrics == {"fail_to_pass_passed": reward, "pass_to_pass_passed": 1}


@with_specs
async def test_a_verified_row_with_pytest_itself(lab: Lab, repository: Path, tmp_path: Path) -> None:
    tools(lab, tmp_path / "bin", {"pytest": f'#!/bin/sh\nexec {PYTEST} "$@"\n'})
    tests = {"FAIL_TO_PASS": '["tests/test_calc.py::test_sub"]', "PASS_TO_PASS": '["tests/test_calc.py::test_add"]'}
    row = {**ROW, **tests, "test_patch": TEST_PATCH, "base_commit": git(repository, "rev-parse", "HEAD")}
    evaluator = make("swebench", {"instance": row})
    skips = "import pytest\n\n\ndef sub(a, b):\n    pytest.skip('not today')\n"
    for script, reward in (
        (FIX, 1),
        ("true", 0),
        (put("tests/test_calc.py", "def test_sub(): pass\ndef test_add(): pass\n"), 0),
        (put("calc.py", skips, ">>"), 0),
    ):
        async with lab.sandbox() as agent:
            await work(agent, script)
            patch = await patch_of(agent)
        verdict = await evaluator.evaluate(lab.evidence(None, patch=patch))
        assert verdict.reward == reward, (script, verdict.report)


@with_specs
def test_every_log_parser_of_the_library_is_found_by_its_name() -> None:
    theirs = importlib.import_module("swebench.harness.log_parsers").MAP_REPO_TO_PARSER
    assert {repo for repo, parser in theirs.items() if library().parsers.get(parser.__name__) is not parser} == set()


@with_specs
def test_rows_of_other_languages_have_specs_too() -> None:
    spec = library().spec({**ROW, "repo": "redis/redis", "version": "12272"})
    assert spec.log_parser == "parse_log_redis"


@with_specs
@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"repo": "dask/dask", "version": "2.30"}, "no specs of dask/dask.*test_command"),
        ({"version": "99"}, r"no spec of pallets/flask 99, only of 2\.0"),
        ({"test_patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n"}, "no patch"),
        ({"repo": "chartjs/Chart.js", "version": "4.0"}, "swebench>=5"),
        ({"eval_script": "x", "eval_type": "fail_only"}, "swebench>=5"),
    ],
    ids=["repository", "version", "patch", "counts what never ran", "says so itself"],
)
def test_what_the_library_cannot_test_is_told_at_submission(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make("swebench", {"instance": {**ROW, **row}})


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"eval_script": "x", "log_parser": "parse_log_of_tomorrow"}, "no log parser 'parse_log_of_tomorrow'.*parse_log_pytest"),
        ({"eval_script": "x", "log_parser": "parse_log_pytest", "eval_type": "maybe"}, "eval_type 'maybe'.*pass_and_fail"),
        ({"repo": "dask/dask", "test_cmd": "pytest -rA"}, "which log parser goes with dask/dask.*parse_log_pytest"),
        ({"FAIL_TO_PASS": "[]", "PASS_TO_PASS": []}, "names no test"),
        ({"FAIL_TO_PASS": '{"a": 1}'}, "list of tests' names"),
    ],
    ids=["parser", "type", "no parser", "no tests", "no list"],
)
def test_what_no_library_can_test_is_told_at_submission(row: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make("swebench", {"instance": {**ROW, **row}})


def test_a_row_of_another_set_with_its_command_and_parser(tmp_path: Path) -> None:
    """SWE-Gym's rows are of other repositories, whose specs the library does not have."""
    row = {**ROW, "repo": "dask/dask", "version": "2.30", "instance_id": "dask__dask-1"}
    spec = library().spec(row, log_parser="parse_log_pytest", test_command="pytest -n0 -rA")
    assert "\npytest -n0 -rA tests/test_a.py\n" in spec.script
    assert spec.log_parser == "parse_log_pytest"
    old = "PASSED tests/test_a.py::test_old"
    for reward, fix in ((True, "PASSED"), (False, "FAILED"), (False, "SKIPPED")):
        assert library().grade(spec, log_of(tmp_path, old, f"{fix} tests/test_a.py::test_fix"))["resolved"] is reward


def test_a_row_of_today_is_tested_by_its_own_script(tmp_path: Path) -> None:
    script = f"cd /testbed\n: '{START}'\nmake check\n: '{END}'\n"
    row = {**ROW, "repo": "acme/lib", "eval_script": script, "log_parser": "parse_log_gotest", "eval_type": "pass_and_fail"}
    row |= {"FAIL_TO_PASS": ["TestFix"], "PASS_TO_PASS": ["TestOld"]}
    spec = library().spec(row, test_command="not this", repo_dir="/srv/lib")
    assert spec.script.startswith("#!/bin/bash\nset -uxo pipefail\ncd /srv/lib\n")
    assert "make check" in spec.script
    assert "not this" not in spec.script
    for reward, fix in ((True, "PASS"), (False, "FAIL")):
        log = log_of(tmp_path, f"--- {fix}: TestFix (0.00s)", "--- PASS: TestOld (0.00s)")
        assert library().grade(spec, log)["resolved"] is reward


def test_files_that_the_test_patch_takes_away_or_renames_are_not_run() -> None:
    patch = (
        "diff --git a/t/gone.py b/t/gone.py\ndeleted file mode 100644\n--- a/t/gone.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n"
        "diff --git a/t/old.py b/t/new.py\nsimilarity index 100%\nrename from t/old.py\nrename to t/new.py\n"
        "diff --git a/t/data.json b/t/data.json\n--- a/t/data.json\n+++ b/t/data.json\n@@ -1 +1 @@\n-1\n+2\n"
    )
    script = library().spec({**ROW, "test_patch": patch}, log_parser="parse_log_pytest", test_command="run").script
    assert "\nrun t/new.py\n" in script
    assert "for path in t/gone.py t/old.py t/new.py t/data.json; do" in script


def test_version_5_says_what_has_the_specs() -> None:
    with pytest.raises(ConfigError, match=r"5\.0\.2 has no specs of pallets/flask 2\.3.*pip install 'swebench>=4\.1,<5'"):
        Scripts("5.0.2").spec(ROW)


def test_a_library_that_is_missing_or_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(of_version("4.1.0"), Specs)
    assert isinstance(of_version("5.0.2"), Scripts)
    assert isinstance(of_version("5"), Scripts)
    for version in ("4.0.4", "3.0.17", "2.1", "4"):
        with pytest.raises(ConfigError, match="too old"):
            of_version(version)

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ConfigError, match=r"pip install 'swebench>=4\.1,<5'"):
        make("swebench", {"instance": ROW})
