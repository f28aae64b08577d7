"""What can be checked: the six CLIs by their presets, and mini-SWE-agent through `shell`, each with its dialects and its plan."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from polar.harness.base import Dialect, Harness, named
from polar.harness.check.plan import PLANS, Plan
from polar.harness.install import Installation, Progress, cache_dir, install, pip_install

MINI = "mini-swe-agent"
MINI_VERSION = "2.4.6"
_MINI_MODELS: dict[Dialect, str] = {"openai_chat": "openai/{{MODEL}}", "anthropic": "anthropic/{{MODEL}}"}


@dataclass(frozen=True, slots=True)
class Subject:
    """`command` is what the harness `shell` runs; `None` for a preset."""

    name: str
    version: str
    harness: Harness
    installation: Installation
    dialects: tuple[Dialect, ...]
    plan: Plan

    def command(self, dialect: Dialect) -> tuple[str, ...]:
        """The harness's extra arguments: for mini-SWE-agent, the whole command."""
        if self.name != MINI or self.installation.folder is None:
            return ()
        python = shlex.quote(str(self.installation.folder / "bin" / "python"))
        settings = "MSWEA_CONFIGURED=true MSWEA_COST_TRACKING=ignore_errors LITELLM_LOCAL_MODEL_COST_MAP=True"
        model = _MINI_MODELS[dialect]
        flags = f'-y --exit-immediately -t {{{{INSTRUCTION}}}} -m {model} -o "$HOME/trajectory.json"'
        return (f"{settings} {python} -m minisweagent.run.mini {flags}",)


def subject(name: str, progress: Progress = lambda line: None) -> Subject:
    """Installs what is not there yet. Raises `ConfigError` for an unknown name, `HarnessError` where it cannot be installed."""
    if name == MINI:
        harness = named("shell")
        folder = pip_install(f"{MINI}=={MINI_VERSION}", cache_dir() / "harness" / MINI / MINI_VERSION, progress=progress)
        return Subject(MINI, MINI_VERSION, harness, Installation(MINI, MINI_VERSION, folder, ()), tuple(_MINI_MODELS), PLANS[MINI])
    harness = named(name)
    return Subject(name, harness.version, harness, install(name, progress=progress), harness.dialects, PLANS[name])


def all_names() -> tuple[str, ...]:
    return tuple(PLANS)
