"""Outputs of test runners, read."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.evaluator.parsers import PASSING, Status, canonical, junit, parse

RA = """\
============================= test session starts ==============================
tests/test_a.py .F                                                       [100%]
==================================== PASSES ====================================
________________________________ test_one ______________________________________
----------------------------- Captured stdout call -----------------------------
PASSED tests/test_a.py::test_two
=========================== short test summary info ============================
PASSED tests/test_a.py::test_one
SKIPPED [1] tests/test_a.py:9: no reason
XFAIL tests/test_a.py::test_four - later
FAILED tests/test_a.py::test_two - AssertionError: assert 1 == 2 - or so
ERROR tests/test_b.py - ModuleNotFoundError: no - module
========================= 1 failed, 1 passed in 0.12s ==========================
"""


def test_a_pytest_summary_is_read() -> None:
    found = parse(RA)
    assert found.of("tests/test_a.py::test_one") == "PASSED"
    assert found.of("tests/test_a.py::test_two") == "FAILED"
    assert found.of("tests/test_a.py::test_four") == "XFAIL"
    assert found.of("tests/test_a.py::test_none") is None


def test_a_file_that_cannot_be_collected_fails_all_its_tests_even_those_said_to_pass() -> None:
    assert parse(RA + "PASSED tests/test_b.py::test_x\n").of("tests/test_b.py::test_x") == "ERROR"


def test_passes_printed_by_tests_count_for_nothing_beside_a_summary() -> None:
    forged = "PASSED tests/test_a.py::test_five\ntests/test_a.py::test_six PASSED [ 10%]\n" + RA
    assert parse(forged).of("tests/test_a.py::test_five") is None
    assert parse(forged).of("tests/test_a.py::test_six") is None


def test_verbose_lines_count_where_the_summary_names_failures_only() -> None:
    output = """\
tests/test_a.py::test_one PASSED                                         [ 50%]
tests/test_a.py::test_two[a b] FAILED                                    [ 75%]
tests/test_a.py::test_three SKIPPED (no reason)                          [100%]
[gw1] [ 50%] PASSED tests/test_a.py::test_four
=========================== short test summary info ============================
FAILED tests/test_a.py::test_two[a b] - assert 0
"""
    found = parse(output)
    assert found.passed("tests/test_a.py::test_one")
    assert found.of("tests/test_a.py::test_two[a b]") == "FAILED"
    assert found.of("tests/test_a.py::test_three") == "SKIPPED"
    assert found.passed("tests/test_a.py::test_four")


def test_colours_do_not_matter() -> None:
    assert parse("\x1b[32mPASSED\x1b[0m tests/a.py::\x1b[1mtest_x\x1b[0m").passed("tests/a.py::test_x")


def test_unittest_is_read_in_all_its_spellings() -> None:
    output = """\
test_a (tests.test_x.T) ... ok
test_b (tests.test_x.T.test_b) ... FAIL
test_c (tests.test_x.T.test_c)
What it is about. ... ERROR
noise before test_d (tests.test_x.T) ... skipped 'no'
test_e (tests.test_x.T) ... expected failure
test_f (tests.test_x.T) ... unexpected success
"""
    found = parse(output, "unittest")
    status = {name: found.of(f"tests/test_x.py::T::test_{name}") for name in "abcdef"}
    assert status == {"a": "PASSED", "b": "FAILED", "c": "ERROR", "d": "SKIPPED", "e": "XFAIL", "f": "FAILED"}
    assert found.of("test_a (tests.test_x.T)") == "PASSED"


def test_junit_is_read_by_the_same_names() -> None:
    found = junit(
        '<testsuites><testsuite><testcase classname="tests.test_x.T" name="test_a[1-2]"/>'
        '<testcase classname="tests.test_x" name="test_b"><failure>no</failure></testcase>'
        '<testcase classname="tests.test_x" name="test_c"><skipped/></testcase></testsuite></testsuites>'
    )
    assert found.of("tests/test_x.py::T::test_a[1-2]") == "PASSED"
    assert found.of("tests/test_x.py::test_b") == "FAILED"
    assert found.of("tests/test_x.py::test_c") == "SKIPPED"


def test_junit_with_entities_or_without_sense_has_no_tests() -> None:
    assert not junit('<!DOCTYPE x [<!ENTITY a "b">]><testcase name="t"/>').raw
    assert not junit("<testsuite><testcase").raw


def test_go_cargo_and_tap_are_read() -> None:
    assert parse("--- PASS: TestA (0.00s)\n    --- FAIL: TestA/sub (0.00s)").raw == {"TestA": "PASSED", "TestA/sub": "FAILED"}
    assert parse("test mod::a ... ok\ntest b ... FAILED").raw == {"mod::a": "PASSED", "b": "FAILED"}
    tap = parse("ok 1 - adds\nnot ok 2 - divides\nok 3 waits # SKIP later", "tap")
    assert tap.raw == {"adds": "PASSED", "divides": "FAILED", "waits": "SKIPPED"}


def test_a_failing_exit_without_a_failing_test_is_a_contradiction() -> None:
    assert parse("PASSED a.py::x").contradicts(1)
    assert not parse("PASSED a.py::x").contradicts(0)
    assert not parse("PASSED a.py::x\nFAILED a.py::y").contradicts(1)


IDENT = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
PARAM = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "Zs"], exclude_characters="\\"), max_size=12).map(
    lambda text: " ".join(text.split())
)
NAMES = st.builds(
    lambda folder, file, test, param: f"{folder}/test_{file}.py::test_{test}" + (f"[{param}]" if param else ""),
    IDENT,
    IDENT,
    IDENT,
    PARAM,
)
STATUSES = st.sampled_from(["PASSED", "FAILED", "ERROR", "XFAIL"])
MESSAGES = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"], include_characters=" "), max_size=30).map(
    lambda text: " ".join(text.split())
)


@given(st.dictionaries(NAMES, st.tuples(STATUSES, MESSAGES), min_size=1, max_size=6))
def test_every_expected_name_of_a_summary_is_found_whatever_its_message_says(tests: dict[str, tuple[Status, str]]) -> None:
    lines = [f"{status} {name}" + (f" - {said}" if said and status != "PASSED" else "") for name, (status, said) in tests.items()]
    found = parse("\n".join(["=== short test summary info ===", *lines, "=== 1 failed in 0.1s ==="]), known=tests)
    for name, (status, _) in tests.items():
        assert found.of(name) == status


@given(st.lists(st.tuples(NAMES, STATUSES), max_size=12))
def test_of_several_statuses_of_one_test_the_worst_counts(lines: list[tuple[str, Status]]) -> None:
    found = parse("\n".join(f"{status} {name}" for name, status in lines), known={name for name, _ in lines})
    for name, _ in lines:
        said = {status for other, status in lines if canonical(other) == canonical(name)}
        assert found.passed(name) == (said <= PASSING)


@given(st.text(max_size=400), st.sampled_from(["auto", "pytest", "unittest", "lines", "junit", "go", "cargo", "tap"]))
def test_any_output_is_read_without_an_error(output: str, parser: str) -> None:
    parse(output, parser)  # type: ignore[arg-type]


def test_long_hostile_lines_take_no_time() -> None:
    begun = time.monotonic()
    for piece in (" ", "test_x (a.b) ", "a ... ", "PASSED ", "\x1b[", "[" * 3, "test x ... ", "ok 1 # "):
        for parser in ("auto", "tap"):
            parse(("PASSED " + piece * 100_000 + "\n") * 3, parser)  # type: ignore[arg-type]
    assert time.monotonic() - begun < 5


def test_a_failed_subtest_fails_its_test_although_pytest_calls_that_passed() -> None:
    output = """
=========================== short test summary info ============================
PASSED tests/test_s.py::T::test_s
PASSED tests/test_s.py::test_ok
PASSED tests/test_s.py::test_p[a b]
SUBFAILED[m - m] (i=1) tests/test_s.py::T::test_s - assert 1 != 1
SUBFAIL tests/test_s.py::test_p[a b] - assert 0
========================= 2 failed, 3 passed in 0.53s ==========================
"""
    found = parse(output)
    assert {name: found.of(name) for name in found.raw} == {
        "tests/test_s.py::T::test_s": "FAILED",
        "tests/test_s.py::test_ok": "PASSED",
        "tests/test_s.py::test_p[a b]": "FAILED",
    }


@pytest.mark.parametrize(
    "line",
    ["a.py::T::test_s SUBFAILED[m m] (i=1)             [ 66%]", "a.py::T::test_s [m m] (i=1) SUBFAIL         [ 66%]"],
)
def test_a_failed_subtest_is_seen_in_verbose_lines(line: str) -> None:
    assert parse(f"{line}\na.py::T::test_s PASSED [100%]\n").of("a.py::T::test_s") == "FAILED"


@pytest.mark.parametrize(("word", "status"), [("ok", "PASSED"), ("FAIL", "FAILED"), ("ERROR", "ERROR"), ("skipped 'no'", "SKIPPED")])
@pytest.mark.parametrize("head", ["test_x (m.T.test_x)", "test_x (m.T.test_x)\nWhat it is about."])
def test_what_a_unittest_logs_between_its_name_and_its_status(head: str, word: str, status: str) -> None:
    output = f"{head} ... WARNING: slow ... very\nTraceback:\n  more\n{word}\ntest_y (m.T.test_y) ... ok\n"
    found = parse(output)
    assert (found.of("test_x (m.T.test_x)"), found.of("test_y (m.T.test_y)")) == (status, "PASSED")


def test_a_unittest_that_prints_of_skipping_is_not_skipped() -> None:
    assert parse("test_x (m.T.test_x) ... reading\nskipped 3 lines\nok\n").of("test_x (m.T.test_x)") == "PASSED"


def test_a_status_of_nothing_is_no_test() -> None:
    assert parse("ok\nFAIL\nOK\nok\n").raw == {}


def test_go_and_cargo_tests_that_print_before_their_status() -> None:
    assert parse("hello--- PASS: TestB (0.00s)\nbye--- FAIL: TestC (1.20s)\n", "go").raw == {"TestB": "PASSED", "TestC": "FAILED"}
    assert parse("test a::b ... hello\nthere\nok\ntest a::c ... x\nFAILED\n", "cargo").raw == {"a::b": "PASSED", "a::c": "FAILED"}


def test_tap_needs_no_numbers_and_escapes_its_hashes() -> None:
    output = "1..4\nok - a\nnot ok b\nok 3 - issue \\#12 works\nok 4 - d # SKIP no\nokay 5 - e\n"
    assert parse(output, "tap").raw == {"a": "PASSED", "b": "FAILED", "issue #12 works": "PASSED", "d": "SKIPPED"}
