"""Harnesses: the agent programs that Polar runs unchanged.

One file per program: `codex`, `claude_code`, `gemini_cli`, `qwen_code`, `opencode`, `pi`, `mini_swe_agent`, and `shell` for any command.
`base` says what a preset is, `install` puts one into the cache, `run` runs one, `check` proves that the gateway serves it.
"""

from polar.folders import cache_dir
from polar.harness import claude_code, codex, gemini_cli, mini_swe_agent, opencode, pi, qwen_code, shell
from polar.harness.base import Endpoint, Harness, Options, Tag, named, registered
from polar.harness.install import Installation, find_node, install, installed
from polar.harness.run import RunResult, launch, run

__all__ = [
    "Endpoint",
    "Harness",
    "Installation",
    "Options",
    "RunResult",
    "Tag",
    "cache_dir",
    "find_node",
    "install",
    "installed",
    "launch",
    "named",
    "registered",
    "run",
]

del claude_code, codex, gemini_cli, mini_swe_agent, opencode, pi, qwen_code, shell
