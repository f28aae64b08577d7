"""OpenAI Codex CLI: Responses only, a native binary.

Measured on 0.171.0. The environment variable OPENAI_BASE_URL is ignored; a provider of its own in `config.toml` is not. The model's
name picks the tool set: an unknown one gets plain function tools, which is what an open model can use. A 429 without Retry-After ends
the run at once; `stream_max_retries` and `request_max_retries` multiply.
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
    json_lines,
    last_user_text,
    register,
)
from polar.harness.home import Home
from polar.harness.mcp import stdio_entry
from polar.harness.spec import McpServer
from polar.harness.toml import dotted, dumps
from polar.records import Completion

_QUIET: dict[str, Any] = {
    "analytics.enabled": False,
    "features.plugins": False,
    "features.apps": False,
    "check_for_update_on_startup": False,
    "web_search": "disabled",
}


@register
class Codex(Harness):
    name = "codex"
    title = "Codex CLI"
    version = "0.171.0"
    package = "@openai/codex"
    program_path = "@openai/codex-{platform}/vendor/{target}/bin/codex"
    dialects = ("openai_responses",)
    executable = "codex"
    has_sub_agents = True
    mcp_transports = frozenset({"stdio", "streamable-http"})
    skills_folder = ".codex/skills"
    transcripts = (".codex/sessions",)
    rules = (
        Rule("compaction", "compact endpoint", lambda c: hint(c, "path").endswith("/responses/compact")),
        Rule("compaction", "x-openai-subagent: compact", lambda c: hint(c, "x-openai-subagent") == "compact"),
        Rule(
            "compaction",
            "asks for a context checkpoint",
            lambda c: last_user_text(c).startswith("You are performing a CONTEXT CHECKPOINT COMPACTION"),
        ),
        Rule("sub_agent", "x-openai-subagent", lambda c: hint(c, "x-openai-subagent") != ""),
        Rule("sub_agent", "x-codex-parent-thread-id", lambda c: hint(c, "x-codex-parent-thread-id") != ""),
    )

    def configure(self, home: Home, endpoint: Endpoint, options: Options) -> dict[str, str]:
        self.check(endpoint, options)
        settings: dict[str, Any] = {
            "model": endpoint.model,
            "model_provider": "polar",
            "model_context_window": options.context,
            **_QUIET,
            **_provider(endpoint),
            "model_providers.polar.request_max_retries": options.retries,
            "model_providers.polar.stream_max_retries": options.retries,
        }
        if options.compact_at is not None:
            settings["model_auto_compact_token_limit"] = options.compact_at
        home.write(".codex/config.toml", dumps(settings | dotted({"mcp_servers": _servers(options)} | dict(options.settings))))
        return {"POLAR_API_KEY": endpoint.key}

    def command(self, program: tuple[str, ...], prompt: str, endpoint: Endpoint, options: Options, *, resume: bool = False) -> Command:
        flags = ("--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", *options.extra_args)
        middle = ("resume", "--last") if resume else ()
        return Command((*program, "exec", *middle, *flags, "-"), stdin=prompt)

    def lines(self, endpoint: Endpoint, options: Options = DEFAULTS) -> list[str]:
        self.check_dialect(endpoint)
        settings = {
            "model": endpoint.model,
            "model_provider": "polar",
            "model_context_window": options.context,
            **_provider(endpoint),
        }
        flags = " ".join("-c " + shlex.quote(f"{key}={json.dumps(value)}") for key, value in settings.items())
        return [*export(POLAR_API_KEY=endpoint.key), f"codex {flags}"]

    def explains(self, completion: Completion) -> bool:
        return hint(completion, "user-agent").startswith("codex_") and hint(completion, "originator").startswith("codex_")

    def answer(self, stdout: str) -> str | None:
        text = None
        for event in json_lines(stdout):
            item = event.get("item")
            if event.get("type") == "item.completed" and isinstance(item, dict) and item.get("type") == "agent_message":
                text = item.get("text")
        return text if isinstance(text, str) else None

    def problem(self, exit_code: int, stdout: str, stderr: str) -> str | None:
        failed = next((event for event in json_lines(stdout) if event.get("type") == "turn.failed"), None)
        if failed is not None:
            return f"turn failed: {failed.get('error')}"[:400]
        return super().problem(exit_code, stdout, stderr)


def _servers(options: Options) -> dict[str, Any]:
    """By server, in the words of `codex mcp add`."""
    return {server.name: stdio_entry(server) if server.transport == "stdio" else _remote(server) for server in options.mcp_servers}


def _remote(server: McpServer) -> dict[str, Any]:
    return {"url": server.url, **({"http_headers": server.headers} if server.headers else {})}


def _provider(endpoint: Endpoint) -> dict[str, Any]:
    prefix = "model_providers.polar."
    return {
        prefix + "name": "Polar",
        prefix + "base_url": endpoint.v1,
        prefix + "env_key": "POLAR_API_KEY",
        prefix + "wire_api": "responses",
    }
