"""Any command, with the environment set that clients of the four providers read.

`{{INSTRUCTION}}`, `{{INSTRUCTION_FILE}}`, `{{MODEL}}`, `{{BASE_URL}}` and `{{KEY}}` in the command are replaced, each quoted for a POSIX
shell. The command is the first of `Options.extra_args`; without a placeholder for the instruction, it gets the instruction on
its standard input.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polar.errors import ConfigError
from polar.harness.base import DEFAULTS, Command, Endpoint, Harness, Options, export, register
from polar.harness.home import Home

INSTRUCTION_FILE = "POLAR_INSTRUCTION_FILE"
"""The variable that names a file with the prompt; every run has it."""

_TIMEOUTS = ("timeout_sec", "timeout_seconds", "timeout")

_PLACEHOLDER = re.compile(r"\{\{(INSTRUCTION|INSTRUCTION_FILE|MODEL|BASE_URL|KEY)\}\}")


_WITH_PIPEFAIL = """\
if command -v bash >/dev/null 2>&1; then exec bash -o pipefail -c "$1"; fi
if (set -o pipefail) 2>/dev/null; then set -o pipefail; fi
eval "$1"
"""
"""A pipe must not hide an exit code. bash has that option everywhere, other shells sometimes."""


@dataclass(frozen=True, slots=True)
class ShellStep:
    """One command of `custom_shell`. `timeout_s` ends this step only, within the agent's own time."""

    command: str
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None


def read_steps(given: Any) -> tuple[ShellStep, ...]:
    """`AgentSpec.custom_shell` as steps that run one after another: a line, an object with `command`, `cwd`, `env` and `timeout_sec` (the
    reference's `ExecInput`), or a list of either. Raises `ConfigError`."""
    if given is None:
        return ()
    items = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if not items:
        raise ConfigError("custom_shell is an empty list: it needs at least one command")
    return tuple(_read_step(item) for item in items)


def _read_step(item: Any) -> ShellStep:
    if isinstance(item, str):
        item = {"command": item}
    if not isinstance(item, Mapping):
        raise ConfigError(f"custom_shell: a step is a line or an object with a command, not {type(item).__name__}")
    unknown = sorted(set(item) - {"command", "cwd", "env", *_TIMEOUTS})
    if unknown:
        raise ConfigError(f"custom_shell: unknown field {unknown[0]!r}; there are: command, cwd, env, {', '.join(_TIMEOUTS)}")
    command, cwd, env = item.get("command"), item.get("cwd"), item.get("env") or {}
    if not isinstance(command, str) or not command.strip():
        raise ConfigError("custom_shell: a step needs a command")
    if cwd is not None and not isinstance(cwd, str):
        raise ConfigError("custom_shell: cwd is a path")
    if not isinstance(env, Mapping) or not all(isinstance(value, str) for pair in env.items() for value in pair):
        raise ConfigError("custom_shell: env maps names to texts")
    timeout = next((item[name] for name in _TIMEOUTS if item.get(name) is not None), None)
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf):
        raise ConfigError(f"custom_shell: {timeout!r} is no time in seconds")
    return ShellStep(command, cwd, dict(env), None if timeout is None else float(timeout))


@register
class Shell(Harness):
    name = "shell"
    title = "shell command"
    dialects = ("openai_chat", "anthropic", "openai_responses", "google")
    resumable = False

    def configure(self, home: Home, endpoint: Endpoint, options: Options) -> dict[str, str]:
        self.check(endpoint, options)
        return variables(endpoint)

    def command(self, program: tuple[str, ...], prompt: str, endpoint: Endpoint, options: Options, *, resume: bool = False) -> Command:
        if not options.extra_args:
            raise ConfigError("harness shell needs a command, such as: 'my-agent --task {{INSTRUCTION}}'")
        line = " ".join(options.extra_args)
        values = {
            "INSTRUCTION": shlex.quote(prompt),
            "INSTRUCTION_FILE": f'"${INSTRUCTION_FILE}"',
            "MODEL": shlex.quote(endpoint.model),
            "BASE_URL": shlex.quote(endpoint.root),
            "KEY": shlex.quote(endpoint.key),
        }
        substituted = _PLACEHOLDER.sub(lambda match: values[match[1]], line)
        takes_prompt = "{{INSTRUCTION}}" in line or "{{INSTRUCTION_FILE}}" in line
        return Command(("/bin/sh", "-c", _WITH_PIPEFAIL, "sh", substituted), stdin=None if takes_prompt else prompt)

    def lines(self, endpoint: Endpoint, options: Options = DEFAULTS) -> list[str]:
        return export(**variables(endpoint))


def variables(endpoint: Endpoint) -> dict[str, str]:
    """What the providers' own clients, LiteLLM and common agents read."""
    return {
        "POLAR_BASE_URL": endpoint.root,
        "POLAR_API_KEY": endpoint.key,
        "POLAR_MODEL": endpoint.model,
        "OPENAI_BASE_URL": endpoint.v1,
        "OPENAI_API_BASE": endpoint.v1,
        "OPENAI_API_KEY": endpoint.key,
        "OPENAI_MODEL": endpoint.model,
        "ANTHROPIC_BASE_URL": endpoint.root,
        "ANTHROPIC_API_BASE": endpoint.root,
        "ANTHROPIC_API_KEY": endpoint.key,
        "ANTHROPIC_MODEL": endpoint.model,
        "GOOGLE_GEMINI_BASE_URL": endpoint.root,
        "GOOGLE_API_URL": endpoint.root,
        "GOOGLE_API_KEY": endpoint.key,
        "GEMINI_API_BASE": endpoint.v1beta,
        "GEMINI_API_KEY": endpoint.key,
        "GEMINI_MODEL": endpoint.model,
    }
