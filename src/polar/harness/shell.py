"""Any command, with the environment set that clients of the four providers read.

`{{INSTRUCTION}}`, `{{INSTRUCTION_FILE}}`, `{{MODEL}}`, `{{BASE_URL}}` and `{{KEY}}` in the command are replaced, each quoted for a POSIX
shell. The command is the first of `Options.extra_args`; without a placeholder for the instruction, it gets the instruction on
its standard input.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from polar.errors import ConfigError
from polar.harness.base import DEFAULTS, Command, Endpoint, Harness, Options, export, register

INSTRUCTION_FILE = "POLAR_INSTRUCTION_FILE"
"""The variable that names a file with the prompt; every run has it."""

_PLACEHOLDER = re.compile(r"\{\{(INSTRUCTION|INSTRUCTION_FILE|MODEL|BASE_URL|KEY)\}\}")


@register
class Shell(Harness):
    name = "shell"
    title = "shell command"
    dialects = ("openai_chat", "anthropic", "openai_responses", "google")
    resumable = False

    def configure(self, home: Path, endpoint: Endpoint, options: Options) -> dict[str, str]:
        self.check_dialect(endpoint)
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
        return Command(("/bin/sh", "-c", substituted), stdin=None if takes_prompt else prompt)

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
        "GEMINI_API_BASE": endpoint.v1beta,
        "GEMINI_API_KEY": endpoint.key,
        "GEMINI_MODEL": endpoint.model,
    }
