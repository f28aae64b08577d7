"""Alibaba's Qwen Code: Chat Completions, Messages and generateContent, JavaScript.

Measured on 0.24.4. Its flag `--auth-type` picks the protocol. Over Messages it sends a User-Agent that begins with `claude-cli`. Tool
results are lists of text parts. Without statistics switched off it asks for a metrics host.
"""

from __future__ import annotations

import json
import math
import shlex
from typing import Any

from polar.harness.base import (
    DEFAULTS,
    Command,
    Dialect,
    Endpoint,
    Harness,
    Options,
    Rule,
    export,
    hint,
    json_lines,
    last_user_text,
    merge,
    register,
    system_text,
    tool_names,
)
from polar.harness.home import Home
from polar.harness.mcp import stdio_entry, url_entry
from polar.harness.spec import McpServer
from polar.records import Completion

_AUTH: dict[Dialect, str] = {"openai_chat": "openai", "anthropic": "anthropic", "google": "gemini"}


@register
class QwenCode(Harness):
    name = "qwen-code"
    title = "Qwen Code"
    version = "0.24.4"
    package = "@qwen-code/qwen-code"
    program_path = "@qwen-code/qwen-code/cli-entry.js"
    needs_node = (20, 0)
    dialects = ("openai_chat", "anthropic", "google")
    executable = "qwen"
    has_sub_agents = True
    mcp_transports = frozenset({"stdio", "sse", "streamable-http"})
    skills_folder = ".qwen/skills"
    transcripts = (".qwen/projects", ".qwen/tmp")
    rules = (
        Rule("compaction", "asks for a state snapshot", lambda c: "<state_snapshot>" in last_user_text(c)),
        Rule("compaction", "summariser's system prompt", lambda c: not c.tools and "summarizes a conversation" in system_text(c)[:300]),
        Rule("sub_agent", "sub-agent's system prompt", lambda c: "subagent" in system_text(c)[:300]),
        Rule("probe", "side query: its one tool is respond_in_schema", lambda c: tool_names(c) == {"respond_in_schema"}),
        Rule("probe", "asks for JSON without tools", lambda c: not c.tools and bool(c.asked.get("response_format"))),
        Rule("title", "asks for a title without tools", lambda c: not c.tools and "title" in (system_text(c) + last_user_text(c)).lower()),
    )

    def configure(self, home: Home, endpoint: Endpoint, options: Options) -> dict[str, str]:
        self.check(endpoint, options)
        settings: dict[str, Any] = {
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
            "model": {
                "name": endpoint.model,
                "generationConfig": {"maxRetries": options.retries, "contextWindowSize": _window(options)},
            },
            "security": {"auth": {"selectedType": _AUTH[endpoint.dialect]}, "folderTrust": {"enabled": False}},
            "mcpServers": {server.name: _server(server) for server in options.mcp_servers},
        }
        home.write_json(".qwen/settings.json", merge(settings, options.settings))
        return _variables(endpoint)

    def command(self, program: tuple[str, ...], prompt: str, endpoint: Endpoint, options: Options, *, resume: bool = False) -> Command:
        more = ("--continue",) if resume else ()
        flags = ("--auth-type", _AUTH[endpoint.dialect], "--model", endpoint.model, "--yolo", "--output-format", "stream-json")
        return Command((*program, *flags, *more, *options.extra_args), stdin=prompt)

    def lines(self, endpoint: Endpoint, options: Options = DEFAULTS) -> list[str]:
        self.check_dialect(endpoint)
        settings = json.dumps({"model": {"generationConfig": {"contextWindowSize": _window(options)}}})
        return [
            *export(**_variables(endpoint)),
            'export QWEN_CODE_SYSTEM_SETTINGS_PATH="$(mktemp)"',
            f"printf '%s' '{settings}' > \"$QWEN_CODE_SYSTEM_SETTINGS_PATH\"",
            f"qwen --auth-type {_AUTH[endpoint.dialect]} --model {shlex.quote(endpoint.model)}",
        ]

    def explains(self, completion: Completion) -> bool:
        return hint(completion, "user-agent").startswith(("QwenCode/", "claude-cli/0."))  # the latter over Messages

    def answer(self, stdout: str) -> str | None:
        text = None
        for event in json_lines(stdout):
            if event.get("type") == "result":
                text = event.get("result")
        return text if isinstance(text, str) else None

    def problem(self, exit_code: int, stdout: str, stderr: str) -> str | None:
        for event in json_lines(stdout):
            if event.get("type") == "result" and event.get("is_error"):
                return json.dumps(event.get("error") or event.get("subtype"))[:400]
        return super().problem(exit_code, stdout, stderr)


def _window(options: Options) -> int:
    """It compacts at 85 % of what it takes for the model's length."""
    return options.context if options.compact_at is None else math.ceil(options.compact_at / 0.85)


def _server(server: McpServer) -> dict[str, Any]:
    """It tells the transports apart by the name of the URL. Tools are declared to the model: by default it would have to search them."""
    key = "url" if server.transport == "sse" else "httpUrl"
    return {**(stdio_entry(server) if server.transport == "stdio" else url_entry(server, key)), "alwaysLoadTools": True}


def _variables(endpoint: Endpoint) -> dict[str, str]:
    if endpoint.dialect == "anthropic":
        return {"ANTHROPIC_BASE_URL": endpoint.root, "ANTHROPIC_API_KEY": endpoint.key, "ANTHROPIC_MODEL": endpoint.model}
    if endpoint.dialect == "google":
        return {"GOOGLE_GEMINI_BASE_URL": endpoint.root, "GEMINI_API_KEY": endpoint.key, "GEMINI_MODEL": endpoint.model}
    return {"OPENAI_BASE_URL": endpoint.v1, "OPENAI_API_KEY": endpoint.key, "OPENAI_MODEL": endpoint.model}
