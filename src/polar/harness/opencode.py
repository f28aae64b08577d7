"""OpenCode: all four protocols, a native binary.

Measured on 1.18.33. The SDK packages behind its providers are built in. A small model makes a title first, in a call of its own; it is
pointed at the same model here, so that no unknown name is asked for. Conversations are in an SQLite file; beside it lie copies of the work
folder, which are not fetched.
"""

from __future__ import annotations

import json
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
    merge,
    register,
    system_text,
    tool_names,
)
from polar.harness.home import Home
from polar.harness.spec import McpServer
from polar.records import Completion

_SDKS: dict[Dialect, str] = {
    "openai_chat": "@ai-sdk/openai-compatible",
    "anthropic": "@ai-sdk/anthropic",
    "openai_responses": "@ai-sdk/openai",
    "google": "@ai-sdk/google",
}


@register
class OpenCode(Harness):
    name = "opencode"
    title = "OpenCode"
    version = "1.18.33"
    package = "opencode-ai"
    program_path = "opencode-ai/bin/opencode.exe"
    dialects = ("openai_chat", "anthropic", "openai_responses", "google")
    executable = "opencode"
    has_sub_agents = True
    mcp_transports = frozenset({"stdio", "sse", "streamable-http"})
    skills_folder = ".config/opencode/skills"
    transcripts = (".local/share/opencode/opencode.db", ".local/share/opencode/opencode.db-wal", ".local/share/opencode/log")
    rules = (
        Rule("title", "title generator's system prompt", lambda c: not c.tools and "title generator" in system_text(c).lower()),
        Rule("compaction", "summariser's system prompt", lambda c: not c.tools and "summariz" in system_text(c)[:300].lower()),
        Rule("sub_agent", "x-parent-session-id", lambda c: hint(c, "x-parent-session-id") != ""),
        Rule("sub_agent", "has tools, but not the tool task", lambda c: bool(c.tools) and "task" not in tool_names(c)),
    )

    def configure(self, home: Home, endpoint: Endpoint, options: Options) -> dict[str, str]:
        self.check(endpoint, options)
        config = _config(endpoint, options)
        if options.mcp_servers:
            config["mcp"] = {server.name: _server(server) for server in options.mcp_servers}
        home.write_json(".config/opencode/opencode.json", merge(config, options.settings))
        return {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}

    def command(self, program: tuple[str, ...], prompt: str, endpoint: Endpoint, options: Options, *, resume: bool = False) -> Command:
        more = ("--continue",) if resume else ()
        flags = ("--model", f"polar/{endpoint.model}", "--format", "json")
        return Command((*program, "run", *flags, *more, *options.extra_args), stdin=prompt)

    def lines(self, endpoint: Endpoint, options: Options = DEFAULTS) -> list[str]:
        self.check_dialect(endpoint)
        config = json.dumps(_config(endpoint, options), separators=(",", ":"))
        return [*export(OPENCODE_CONFIG_CONTENT=config, OPENCODE_DISABLE_MODELS_FETCH="1"), "opencode"]

    def explains(self, completion: Completion) -> bool:
        return hint(completion, "user-agent").startswith("opencode/") and hint(completion, "x-session-id") != ""

    def answer(self, stdout: str) -> str | None:
        text = None
        for event in json_lines(stdout):
            part = event.get("part")
            if event.get("type") == "text" and isinstance(part, dict):
                text = part.get("text")
        return text if isinstance(text, str) else None

    def problem(self, exit_code: int, stdout: str, stderr: str) -> str | None:
        for event in json_lines(stdout):
            if event.get("type") == "error":
                return json.dumps(event.get("error"))[:400]
        return super().problem(exit_code, stdout, stderr)


def _server(server: McpServer) -> dict[str, Any]:
    """A remote server's transport is found out by OpenCode itself."""
    if server.transport == "stdio":
        local = {"type": "local", "command": [server.command, *server.args], "enabled": True}
        return {**local, "environment": server.env} if server.env else local
    remote = {"type": "remote", "url": server.url, "enabled": True, "oauth": False}
    return {**remote, "headers": server.headers} if server.headers else remote


def _config(endpoint: Endpoint, options: Options) -> dict[str, Any]:
    base_url = {"anthropic": endpoint.v1, "google": endpoint.v1beta}.get(endpoint.dialect, endpoint.v1)
    context = options.context if options.compact_at is None else options.compact_at + options.max_output
    model = {
        "name": endpoint.model,
        "reasoning": True,
        "tool_call": True,
        "limit": {"context": context, "output": options.max_output},
    }
    return {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": f"polar/{endpoint.model}",
        "small_model": f"polar/{endpoint.model}",
        "provider": {
            "polar": {
                "npm": _SDKS[endpoint.dialect],
                "name": "Polar",
                "options": {"baseURL": base_url, "apiKey": endpoint.key},
                "models": {endpoint.model: model},
            }
        },
    }
