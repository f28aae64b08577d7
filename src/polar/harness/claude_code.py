"""Anthropic's Claude Code: Messages only, a native binary.

Measured on 2.1.332. It speaks to whatever ANTHROPIC_BASE_URL says and keeps a path prefix there on every request. As root it
refuses to skip permissions unless IS_SANDBOX is set. Sub-agents run in the background; their report arrives as a user message. A model
whose name it does not know is taken to hold a million tokens unless CLAUDE_CODE_MAX_CONTEXT_TOKENS says otherwise.
"""

from __future__ import annotations

import math
from typing import Any

from polar.harness.base import (
    DEFAULTS,
    Command,
    Endpoint,
    Harness,
    Options,
    Rule,
    asked_max_tokens,
    export,
    hint,
    json_lines,
    last_user_text,
    register,
    system_text,
)
from polar.harness.home import Home
from polar.harness.mcp import typed
from polar.records import Completion

_SMALLEST_WINDOW = 100_000
"""The program raises a smaller auto-compact window to this; a percentage of it goes lower."""


_TRANSPORTS = {"stdio": "stdio", "sse": "sse", "streamable-http": "http"}


@register
class ClaudeCode(Harness):
    name = "claude-code"
    title = "Claude Code"
    version = "2.1.332"
    package = "@anthropic-ai/claude-code"
    program_path = "@anthropic-ai/claude-code/bin/claude.exe"
    dialects = ("anthropic",)
    executable = "claude"
    has_sub_agents = True
    mcp_transports = frozenset(_TRANSPORTS)
    skills_folder = ".claude/skills"
    transcripts = (".claude/projects",)
    rules = (
        Rule("sub_agent", "x-claude-code-agent-id", lambda c: hint(c, "x-claude-code-agent-id") != ""),
        Rule("compaction", "asks for a text-only summary", lambda c: "CRITICAL: Respond with TEXT ONLY" in last_user_text(c)),
        Rule("probe", "quota probe of one token", lambda c: asked_max_tokens(c) == 1 and not c.tools),
        Rule("title", "asks for a title without tools", lambda c: not c.tools and "title" in system_text(c).lower()),
        Rule("probe", "side call of the small model without tools", lambda c: not c.tools and "haiku" in c.model_requested),
    )

    def configure(self, home: Home, endpoint: Endpoint, options: Options) -> dict[str, str]:
        self.check(endpoint, options)
        state: dict[str, Any] = {"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True}
        if options.mcp_servers:
            state["mcpServers"] = typed(options.mcp_servers, _TRANSPORTS)
        home.write_json(".claude.json", state)
        if options.settings:
            home.write_json(".claude/settings.json", options.settings)
        environment = {
            "ANTHROPIC_BASE_URL": endpoint.root,
            "ANTHROPIC_API_KEY": endpoint.key,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ENABLE_TELEMETRY": "0",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_MAX_RETRIES": str(options.retries),
            **_lengths(options),
            "IS_SANDBOX": "1",
        }
        if options.mcp_servers:
            environment["ENABLE_TOOL_SEARCH"] = "false"  # else the model would have to search their tools before it sees them
        if options.compact_at is not None:
            window = min(options.context, max(_SMALLEST_WINDOW, options.compact_at))
            environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(window)
            environment["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"] = str(max(1, math.ceil(100 * options.compact_at / window)))
        return environment

    def command(self, program: tuple[str, ...], prompt: str, endpoint: Endpoint, options: Options, *, resume: bool = False) -> Command:
        flags = ("--model", endpoint.model, "--dangerously-skip-permissions", "--output-format", "stream-json", "--verbose")
        more = ("--continue",) if resume else ()
        return Command((*program, "--print", *flags, *more, *options.extra_args), stdin=prompt)

    def lines(self, endpoint: Endpoint, options: Options = DEFAULTS) -> list[str]:
        self.check_dialect(endpoint)
        where = export(ANTHROPIC_BASE_URL=endpoint.root, ANTHROPIC_API_KEY=endpoint.key, ANTHROPIC_MODEL=endpoint.model)
        return [*where, *export(**_lengths(options)), "claude"]

    def explains(self, completion: Completion) -> bool:
        return hint(completion, "user-agent").startswith("claude-cli/") and hint(completion, "x-claude-code-session-id") != ""

    def answer(self, stdout: str) -> str | None:
        result = _result(stdout)
        text = result.get("result") if result else None
        return text if isinstance(text, str) else None

    def problem(self, exit_code: int, stdout: str, stderr: str) -> str | None:
        result = _result(stdout)
        if result is not None and result.get("is_error"):
            return str(result.get("result") or result.get("subtype"))[:400]  # the subtype says "success" of an API error, too
        return super().problem(exit_code, stdout, stderr)


def _lengths(options: Options) -> dict[str, str]:
    return {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(options.context), "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(options.max_output)}


def _result(stdout: str) -> dict[str, object] | None:
    last = None
    for event in json_lines(stdout):
        if event.get("type") == "result":
            last = event
    return last
