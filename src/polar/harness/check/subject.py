"""What can be checked: the installed presets, each with its dialects and its plan."""

from __future__ import annotations

from dataclasses import dataclass

from polar.harness.base import Dialect, Harness, named
from polar.harness.check.plan import PLANS, Plan
from polar.harness.install import Installation, Progress, install


@dataclass(frozen=True, slots=True)
class Subject:
    name: str
    version: str
    harness: Harness
    installation: Installation
    dialects: tuple[Dialect, ...]
    plan: Plan


def subject(name: str, progress: Progress = lambda line: None) -> Subject:
    """Installs what is not there yet. Raises `ConfigError` for an unknown name, `HarnessError` where it cannot be installed."""
    harness = named(name)
    return Subject(name, harness.version, harness, install(name, progress=progress), harness.dialects, PLANS[name])


def all_names() -> tuple[str, ...]:
    return tuple(PLANS)
