"""Fixtures of the evaluators' tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from evaluator_lab import Lab, git, make_site


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = tmp_path / "template"
    folder.mkdir()
    return folder


@pytest.fixture
def task_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "task"
    folder.mkdir()
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_site(tmp_path_factory.mktemp("site"))


@pytest.fixture
def lab(tmp_path: Path, template: Path, task_folder: Path, site: Path) -> Iterator[Lab]:
    place = Lab(tmp_path, template, task_folder, site)
    yield place
    place.owner.close()


@pytest.fixture
def repository(template: Path) -> Path:
    """A small repository with a bug: `sub` adds. Its first commit is the base; `main` has the fix too, one commit later."""
    (template / "calc.py").write_text("def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a + b\n")
    (template / "tests").mkdir()
    (template / "tests" / "test_calc.py").write_text("from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n")
    (template / "setup.cfg").write_text("[metadata]\nname = calc\n\n[tool:pytest]\naddopts = -p no:cacheprovider\n")
    git(template, "init", "-q")
    git(template, "add", "-A")
    git(template, "commit", "-q", "-m", "base")
    return template
