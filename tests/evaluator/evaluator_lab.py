"""Real sandboxes of backend `local`, and evidence to judge."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from polar.evaluator import Evidence
from polar.runtime import Owner, Place, Runtime, RuntimeSpec, create
from polar.trajectory import Trajectory

NUMBERS = itertools.count()
PYTHON, SITE = "/opt/python/bin/python3", "/opt/site"
"""Where a sandbox has this Python and its pytest."""
PYTEST_PARTS = ("pytest", "_pytest", "py.py", "pluggy", "iniconfig", "packaging", "pygments")


def make_site(folder: Path) -> Path:
    """pytest and what it needs, alone: it starts faster without everybody's plug-ins."""
    folder.chmod(0o755)
    installed = Path(pytest.__file__).parent.parent
    facts = [path.name for part in PYTEST_PARTS for path in installed.glob(f"{part}-*.dist-info")]
    for name in (*PYTEST_PARTS, *facts):
        source = installed / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    return folder


PYTEST = f"{PYTHON} -m pytest -rA -p no:cacheprovider"


class Lab:
    """Sandboxes that start with the files of `template`, as the agent's and every fresh one do."""

    def __init__(self, root: Path, template: Path, task_folder: Path, site: Path) -> None:
        self.owner = Owner.open(root / "owner")
        self.root, self.template, self.task_folder = root, template, task_folder
        self.defaults: dict[str, Any] = {
            "backend": "local",
            "network": "none",
            "env": {"PYTHONPATH": SITE, "LD_LIBRARY_PATH": "/opt/python/lib"},
            "mounts": [{"source": sys.base_prefix, "target": "/opt/python"}, {"source": str(site), "target": SITE}],
        }

    @asynccontextmanager
    async def sandbox(self, **spec: Any) -> AsyncIterator[Runtime]:
        name = f"box-{next(NUMBERS)}"
        place = Place(name, self.owner.id, self.owner.sandbox(name))
        runtime = create(RuntimeSpec(**{**self.defaults, **spec}), place)
        try:
            async with runtime:
                await runtime.upload(self.template, runtime.workdir)
                yield runtime
        finally:
            self.owner.remove(name)

    def evidence(self, agent: Runtime | None, **more: Any) -> Evidence:
        facts: dict[str, Any] = {
            "session": "s",
            "task": "t",
            "instruction": "do it",
            "metadata": {},
            "trajectory": Trajectory("s"),
            "answer": None,
            "patch": None,
            "exit_code": 0,
            "problem": None,
            "timed_out": False,
            "agent": agent,
            "fresh": self.sandbox,
            "folder": self.root / f"evidence-{next(NUMBERS)}",
            "task_folder": self.task_folder,
            "timeout_s": 60.0,
        }
        return Evidence(**{**facts, **more})


async def work(runtime: Runtime, script: str) -> None:
    """What an agent does."""
    done = await runtime.exec(script, timeout_s=60)
    assert done.ok, done


async def patch_of(runtime: Runtime) -> bytes:
    """The agent's patch, as the harness takes it."""
    done = await runtime.exec("git add -A -f . && git diff --cached --binary HEAD", timeout_s=60)
    assert done.ok, done
    return done.stdout


def git(folder: Path, *arguments: str) -> str:
    fixed = ["-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "init.defaultBranch=main", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *fixed, *arguments], cwd=folder, check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.strip()
