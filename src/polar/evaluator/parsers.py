"""Outputs of test runners read into a status for each test. Pure.

Known forms: pytest (`-rA` summary, `-v` lines, `-n` lines), unittest (`-v`), JUnit XML, `go test -v`, `cargo test`, TAP, and plain lines
`PASSED name`. The output belongs to code that is being judged and may lie, so nothing is believed more than it must be: of several
statuses of one test the worst counts, lines inside pytest's summary outrank others of its form, a file that could not be collected fails
every test in it, and a run whose exit code says failure while no test does is no run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal
from xml.etree import ElementTree

Status = Literal["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"]
Parser = Literal["auto", "pytest", "unittest", "lines", "junit", "go", "cargo", "tap"]
_WORST: Mapping[Status, int] = {"XFAIL": 0, "XPASS": 0, "PASSED": 0, "SKIPPED": 1, "FAILED": 2, "ERROR": 3}
PASSING: frozenset[Status] = frozenset({"PASSED", "XFAIL", "XPASS"})

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_WORD = r"(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)"
_FIRST = re.compile(rf"^{_WORD}\s+(\S.*)$")
_XDIST = re.compile(rf"^\[gw\d+\]\s+\[\s*\d+%\]\s+{_WORD}\s+(\S.*)$")
_SUMMARY = re.compile(r"^=+ short test summary info =+$")
_RULE = re.compile(r"^={3,}")
_UNITTEST_NAME = re.compile(r"\S+ \([\w.<>\-]+\)")
_UNITTEST_WORDS: Mapping[str, Status] = {"ok": "PASSED", "FAIL": "FAILED", "ERROR": "ERROR", "expected failure": "XFAIL"}
_UNITTEST_MORE = ("skipped '", 'skipped "', "unexpected success")
_UNITTEST_FAILED = re.compile(r"^(FAIL|ERROR): (\S+ \([\w.<>\-]+\))")
_GO = re.compile(r"^\s*--- (PASS|FAIL|SKIP): (\S+)")
_GO_BEHIND = re.compile(r"--- (PASS|FAIL|SKIP): (\S+) \(\d+\.\d+s\)$")
"""Behind what the test printed without an end of line."""
_CARGO = re.compile(r"^test (.+?)(?: - should panic)? \.\.\. (ok|FAILED|ignored)\b")
_CARGO_BEGUN = re.compile(r"^test (.+?)(?: - should panic)? \.\.\. ")
_TAP = re.compile(r"^\s*(not )?ok\b(?:\s+\d+\b)?")
_TAP_DIRECTIVE = re.compile(r"(?<!\\)#")
_SUBTEST = re.compile(r"^SUBFAIL(?:ED)?\b|\sSUBFAIL(?:ED)?\b")
_NODE = re.compile(r"(?:^|\s)(?=\S+\.py::)")
# Hostile output can be long: no pattern here backtracks over a line, and lines are cut.
_LONGEST = 4_000


@dataclass(frozen=True, slots=True)
class Statuses:
    """`raw`: names as printed. Look up with `of`, which knows that `tests/a.py::T::test_x`, `test_x (tests.a.T)` and JUnit's
    `tests.a.T` + `test_x` are one test."""

    raw: Mapping[str, Status]
    _known: dict[str, Status] = field(init=False, repr=False, compare=False)
    _broken: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        known: dict[str, Status] = {}
        for name, status in self.raw.items():
            _add(known, canonical(name), status)
        object.__setattr__(self, "_known", known)
        broken = (name for name, status in self.raw.items() if status in ("FAILED", "ERROR") and "::" not in name and name.endswith(".py"))
        object.__setattr__(self, "_broken", frozenset(broken))

    def of(self, name: str) -> Status | None:
        """The status of a test; `None`: it did not run. A test of a file that could not be collected is an `ERROR`."""
        if name.split("::", 1)[0] in self._broken:
            return "ERROR"
        return self._known.get(canonical(name))

    def passed(self, name: str) -> bool:
        return self.of(name) in PASSING

    @property
    def failures(self) -> int:
        return sum(status in ("FAILED", "ERROR") for status in self.raw.values())

    def contradicts(self, exit_code: int) -> bool:
        """Whether the run ended as failed although no test of it says so: what was printed is not what was run."""
        return exit_code != 0 and bool(self.raw) and self.failures == 0


def parse(output: str, parser: Parser = "auto", *, known: Collection[str] = ()) -> Statuses:
    """Reads a run's output. `known` names are recognised whatever follows them on their line (a message after ` - `)."""
    if parser == "junit":
        return junit(output)
    lines = [line[:_LONGEST] for line in _ANSI.sub("", output).replace("\r", "\n").split("\n")]
    found: dict[str, Status] = {}
    if parser in ("auto", "pytest", "lines"):
        for name, status in _pytest(lines, frozenset(known), everywhere=parser == "lines"):
            _add(found, name, status)
    if parser in ("auto", "unittest"):
        for name, status in _unittest(lines):
            _add(found, name, status)
    for wanted, read in (("go", _go), ("cargo", _cargo), ("tap", _tap)):
        if parser == wanted or (parser == "auto" and wanted != "tap"):
            for name, status in read(lines):
                _add(found, name, status)
    return Statuses(found)


def junit(text: str) -> Statuses:
    """Reads JUnit XML. Entities are refused; what is no XML has no tests."""
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        return Statuses({})
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError):
        return Statuses({})
    found: dict[str, Status] = {}
    for case in root.iter("testcase"):
        name = ".".join(part for part in (case.get("classname"), case.get("name")) if part)
        kinds = {child.tag for child in case}
        status: Status = "ERROR" if "error" in kinds else "FAILED" if "failure" in kinds else "SKIPPED" if "skipped" in kinds else "PASSED"
        if name:
            _add(found, name, status)
    return Statuses(found)


def canonical(name: str) -> str:
    """One spelling for the names that runners give to a Python test; other names as they are."""
    name = name.strip()
    if "::" in name and ".py" in name.split("::", 1)[0]:
        head, bracket, rest = name.partition("[")
        file, _, inner = head.partition(".py::")
        return ".".join(part for part in (file.lstrip("./").replace("/", "."), *inner.split("::")) if part) + bracket + rest
    if match := re.fullmatch(r"(\S+) \(([\w.<>\-]+)\)", name):
        test, where = match.groups()
        return where if where.endswith(f".{test}") else f"{where}.{test}"
    return name


def _add(found: dict[str, Status], name: str, status: Status) -> None:
    """The worst status of a name counts; of equals the first."""
    if name not in found or _WORST[status] > _WORST[found[name]]:
        found[name] = status


def _pytest(lines: list[str], known: frozenset[str], *, everywhere: bool) -> Iterable[tuple[str, Status]]:
    """Where a summary names tests that passed (`-rA`), `PASSED` outside of it counts for nothing: it is what tests printed. Failures
    count everywhere."""
    inside = summed = False
    for line in lines:
        inside = bool(_SUMMARY.match(line)) or (inside and not _RULE.match(line))
        summed = summed or (inside and line.startswith("PASSED ") and not everywhere)
    inside = False
    for line in lines:
        inside = bool(_SUMMARY.match(line)) or (inside and not _RULE.match(line))
        if (subtest := _SUBTEST.search(line)) is not None:
            if (failed := _node(line[: subtest.start()] or line[subtest.end() :], known)) is not None:
                yield failed, "FAILED"
            continue
        if match := _FIRST.match(line) or _XDIST.match(line):
            name, status = match.group(2), _status(match.group(1))
            if name.startswith("[") and name.split("]", 1)[0][1:].isdigit():
                continue
            name = _named(name, known)
        elif (verbose := _verbose(line)) is not None:
            name, status = verbose
            if "::" not in name and name not in known:
                continue
        else:
            continue
        if inside or not summed or status in ("FAILED", "ERROR"):
            yield name, status


def _node(text: str, known: frozenset[str]) -> str | None:
    """The test of a line about one of its subtests: `SUBFAILED[message] (i=1) NAME - why`, or `NAME [message] (i=1) SUBFAIL`. pytest calls
    a test passed although a subtest of it failed."""
    match = _NODE.search(text)
    if match is None:
        return None
    name = _named(text[match.end() :], known)
    return name if name in known else re.split(r" [\[(]", name, maxsplit=1)[0]


def _verbose(line: str) -> tuple[str, Status] | None:
    """`name STATUS (reason) [ 50%]`."""
    line = line.rstrip()
    if line.endswith("%]"):
        line = line[: line.rfind("[")].rstrip()
    if line.endswith(")"):
        for word in _WORST:
            if (at := line.find(f" {word} (")) > 0:
                line = line[: at + 1 + len(word)]
                break
    name, _, last = line.rpartition(" ")
    return (name.strip(), _status(last)) if name.strip() and last in _WORST else None


def _named(rest: str, known: frozenset[str]) -> str:
    """The test's name at the start of what follows a status: a known one, or all before the message."""
    if rest in known:
        return rest
    at = rest.find(" - ")
    while at >= 0:
        if rest[:at] in known:
            return rest[:at]
        at = rest.find(" - ", at + 1)
    first = rest.find(" - ")
    open_bracket = rest.find("[")
    if 0 <= open_bracket < first:  # a parameter may hold " - " too: cut after its bracket where that is told
        close = rest.find("] - ", open_bracket)
        if close >= 0:
            return rest[: close + 1]
        if rest.endswith("]"):
            return rest.rstrip()
    return (rest[:first] if first >= 0 else rest).rstrip()


def _unittest(lines: list[str]) -> Iterable[tuple[str, Status]]:
    """What a test prints stands between its name and its status, which is then behind it or on a line of its own."""
    head: str | None = None
    begun: str | None = None
    for line in lines:
        before, dots, word = line.rpartition(" ... ")
        word = word.strip()
        if begun is not None and not dots and (word in _UNITTEST_WORDS or word.startswith(_UNITTEST_MORE)):
            yield begun, _unittest_status(word)
            head = begun = None
        elif match := _UNITTEST_FAILED.match(line):
            yield match.group(2), "FAILED" if match.group(1) == "FAIL" else "ERROR"
        elif dots:
            tokens = before.split()
            names = [" ".join(pair) for pair in (tokens[-2:], tokens[:2])]
            name = next((name for name in names if _UNITTEST_NAME.fullmatch(name)), head)
            if word in _UNITTEST_WORDS or word.startswith(_UNITTEST_MORE):
                if name is not None:
                    yield name, _unittest_status(word)
                head = begun = None
            elif name is not None:
                begun = name
        elif _UNITTEST_NAME.fullmatch(line.strip()):
            head, begun = line.strip(), None


def _unittest_status(word: str) -> Status:
    if word.startswith("skipped"):
        return "SKIPPED"
    return _UNITTEST_WORDS.get(word, "FAILED")


def _go(lines: list[str]) -> Iterable[tuple[str, Status]]:
    words: Mapping[str, Status] = {"PASS": "PASSED", "FAIL": "FAILED", "SKIP": "SKIPPED"}
    for line in lines:
        if match := _GO.match(line) or _GO_BEHIND.search(line):
            yield match.group(2), words[match.group(1)]


def _cargo(lines: list[str]) -> Iterable[tuple[str, Status]]:
    words: Mapping[str, Status] = {"ok": "PASSED", "FAILED": "FAILED", "ignored": "SKIPPED"}
    begun: str | None = None  # with --nocapture, what a test prints stands before its status
    for line in lines:
        if match := _CARGO.match(line):
            yield match.group(1), words[match.group(2)]
            begun = None
        elif match := _CARGO_BEGUN.match(line):
            begun = match.group(1)
        elif begun is not None and line.strip() in words:
            yield begun, words[line.strip()]
            begun = None


def _tap(lines: list[str]) -> Iterable[tuple[str, Status]]:
    for line in lines:
        if match := _TAP.match(line):
            name, directive = [*_TAP_DIRECTIVE.split(line[match.end() :], maxsplit=1), ""][:2]
            name = name.strip().removeprefix("- ").replace("\\#", "#").replace("\\\\", "\\").strip()
            skipped = directive.strip().lower().startswith(("skip", "todo"))
            if name:
                yield name, "SKIPPED" if skipped else "FAILED" if match.group(1) else "PASSED"


def _status(word: str) -> Status:
    return next(status for status in _WORST if status == word)
