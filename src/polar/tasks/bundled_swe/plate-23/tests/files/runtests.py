"""Runs unittest test files and prints a line a test, as `pytest -rA` does: `PASSED tests/test_x.py::Class::test_name`.

    python3 runtests.py [tests/test_x.py ...]
"""

import importlib.util
import os
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent


def tests_of(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    return [test for group in suite for test in group]


def main(names):
    sys.path.insert(0, str(ROOT))
    paths = [ROOT / name for name in names] or sorted((ROOT / "tests").glob("test_*.py"))
    lines = []
    for path in paths:
        shown = path.relative_to(ROOT).as_posix()
        try:
            tests = tests_of(path)
        except Exception as error:
            lines.append(f"ERROR {shown} - {type(error).__name__}: {error}")
            continue
        for test in tests:
            result = unittest.TestResult()
            test.run(result)
            status = "ERROR" if result.errors else "FAILED" if result.failures else "SKIPPED" if result.skipped else "PASSED"
            lines.append(f"{status} {shown}::{type(test).__name__}::{test._testMethodName}")
            for _, trace in result.errors + result.failures:
                print(trace)
    print("\n".join(lines))
    sys.stdout.flush()
    return int(any(line.startswith(("FAILED", "ERROR")) for line in lines))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
