"""Google's Gemini CLI: generateContent only, JavaScript.

Measured on 0.61.0. A settings file must pick the key as its way to authenticate once a base URL is set (else exit 41). Without a model
on the command line every prompt costs a router call. Nothing on the wire names the session, so the key must. A connection cut in its
first chunk ends the run without a retry.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from polar.harness.base import (
    DEFAULTS,
    Command,
    Endpoint,
    Harness,
    Options,
    Rule,
    export,
    hint,
    last_user_text,
    merge,
    register,
    system_text,
    tool_names,
)
from polar.harness.home import Home
from polar.harness.mcp import typed
from polar.records import Completion

_MODEL_LIMIT = 1_048_576
"""What the program believes every model takes; its compression threshold is a fraction of it."""

_FULL = 0.7
"""The part of the true length at which it compresses: its own default, half of the believed length, is never reached, and what is left
must hold a turn's tool results and an answer."""


_TRANSPORTS = {"stdio": "stdio", "sse": "sse", "streamable-http": "http"}


@register
class GeminiCli(Harness):
    name = "gemini-cli"
    title = "Gemini CLI"
    version = "0.61.0"
    package = "@google/gemini-cli"
    program_path = "@google/gemini-cli/bundle/gemini.js"
    needs_node = (20, 0)
    dialects = ("google",)
    executable = "gemini"
    has_sub_agents = True
    mcp_transports = frozenset(_TRANSPORTS)
    skills_folder = ".gemini/skills"
    transcripts = (".gemini/tmp",)
    rules = (
        Rule("compaction", "asks for a state snapshot", lambda c: "<state_snapshot>" in last_user_text(c) and not c.tools),
        Rule("compaction", "summariser's system prompt", lambda c: "<state_snapshot>" in system_text(c) and not c.tools),
        Rule("sub_agent", "has the tool complete_task", lambda c: "complete_task" in tool_names(c)),
        Rule("router", "scores the prompt's complexity", lambda c: "complexity_score" in json.dumps(c.asked.get("response_format"))),
        Rule("probe", "asks who speaks next", lambda c: "who should logically speak next" in last_user_text(c)),
        Rule("probe", "asks for JSON without tools", lambda c: not c.tools and bool(c.asked.get("response_format"))),
        Rule("title", "no tools", lambda c: not c.tools and "title" in system_text(c).lower()),
    )

    def configure(self, home: Home, endpoint: Endpoint, options: Options) -> dict[str, str]:
        self.check(endpoint, options)
        settings: dict[str, Any] = {
            "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
            "general": {
                "enableAutoUpdate": False,
                "enableAutoUpdateNotification": False,
                "disableAutoUpdate": True,
                "maxAttempts": options.retries + 1,
            },
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "model": {"name": endpoint.model, "compressionThreshold": _threshold(options)},
            "mcpServers": typed(options.mcp_servers, _TRANSPORTS),
        }
        home.write_json(".gemini/settings.json", merge(settings, options.settings))
        return {"GOOGLE_GEMINI_BASE_URL": endpoint.root, "GEMINI_API_KEY": endpoint.key, "GEMINI_CLI_NO_RELAUNCH": "true"}

    def command(self, program: tuple[str, ...], prompt: str, endpoint: Endpoint, options: Options, *, resume: bool = False) -> Command:
        more = ("--resume", "latest") if resume else ()
        flags = ("--model", endpoint.model, "--yolo", "--skip-trust", "--output-format", "json")
        return Command((*program, *flags, *more, *options.extra_args), stdin=prompt)

    def lines(self, endpoint: Endpoint, options: Options = DEFAULTS) -> list[str]:
        self.check_dialect(endpoint)
        auth = {"auth": {"selectedType": "gemini-api-key"}}
        settings = json.dumps({"security": auth, "model": {"compressionThreshold": _threshold(options)}})
        return [
            *export(GOOGLE_GEMINI_BASE_URL=endpoint.root, GEMINI_API_KEY=endpoint.key),
            'export GEMINI_CLI_HOME="$(mktemp -d)"',
            f"mkdir \"$GEMINI_CLI_HOME/.gemini\" && printf '%s' '{settings}' > \"$GEMINI_CLI_HOME/.gemini/settings.json\"",
            f"gemini --model {shlex.quote(endpoint.model)}",
        ]

    def explains(self, completion: Completion) -> bool:
        return hint(completion, "user-agent").startswith("GeminiCLI")

    def answer(self, stdout: str) -> str | None:
        text = _output(stdout).get("response")
        return text if isinstance(text, str) else None

    def problem(self, exit_code: int, stdout: str, stderr: str) -> str | None:
        error = _output(stdout).get("error")
        if isinstance(error, dict):
            return f"{error.get('type')}: {error.get('message')}"[:400]
        return super().problem(exit_code, stdout, stderr)


def _threshold(options: Options) -> float:
    compact_at = int(options.context * _FULL) if options.compact_at is None else options.compact_at
    return compact_at / _MODEL_LIMIT


def _output(stdout: str) -> dict[str, object]:
    start = stdout.find("{")
    try:
        value = json.loads(stdout[start:]) if start >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
