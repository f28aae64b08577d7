"""Pi: all four protocols, JavaScript; the smallest and quickest.

Measured on 1.6.0. It really needs Node.js 22.19. A run that ends in a provider's error exits with 0 in text mode, so the events of
JSON mode are read instead.
"""

from __future__ import annotations

import json
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
    hint,
    json_lines,
    merge,
    register,
    system_text,
)
from polar.harness.home import Home
from polar.harness.mcp import stdio_entry, url_entry
from polar.records import Completion

_APIS: dict[Dialect, str] = {
    "openai_chat": "openai-completions",
    "openai_responses": "openai-responses",
    "anthropic": "anthropic-messages",
    "google": "google-generative-ai",
}


@register
class Pi(Harness):
    name = "pi"
    title = "Pi"
    version = "1.6.0"
    package = "@earendil-works/pi-coding-agent"
    program_path = "@earendil-works/pi-coding-agent/dist/bundle/cli.js"
    needs_node = (22, 19)
    dialects = ("openai_chat", "openai_responses", "anthropic", "google")
    executable = "pi"
    mcp_transports = frozenset({"stdio", "streamable-http"})
    skills_folder = ".pi/agent/skills"
    transcripts = (".pi/agent/sessions",)
    rules = (Rule("compaction", "summariser's system prompt", lambda c: not c.tools and "summariz" in system_text(c).lower()),)

    def configure(self, home: Home, endpoint: Endpoint, options: Options) -> dict[str, str]:
        self.check(endpoint, options)
        home.write_json(".pi/agent/models.json", _models(endpoint, options))
        if options.mcp_servers:
            home.write_json(".pi/agent/mcp.json", {"mcpServers": _servers(options)})
        settings: dict[str, Any] = {"retry": {"enabled": options.retries > 0, "maxRetries": options.retries, "baseDelayMs": 500}}
        if options.compact_at is not None:
            settings["compaction"] = {
                "enabled": True,
                "reserveTokens": max(0, options.context - options.compact_at),
                "keepRecentTokens": min(20_000, options.compact_at // 8),
            }
        home.write_json(".pi/agent/settings.json", merge(settings, options.settings))
        return {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}

    def command(self, program: tuple[str, ...], prompt: str, endpoint: Endpoint, options: Options, *, resume: bool = False) -> Command:
        more = ("--continue",) if resume else ()
        flags = ("--print", "--mode", "json", "--model", f"polar/{endpoint.model}")
        return Command((*program, *flags, *more, *options.extra_args), stdin=prompt)

    def lines(self, endpoint: Endpoint, options: Options = DEFAULTS) -> list[str]:
        self.check_dialect(endpoint)
        models = json.dumps(_models(endpoint, options), separators=(",", ":"))
        return [
            'export PI_CODING_AGENT_DIR="$(mktemp -d)"',
            f"cat > \"$PI_CODING_AGENT_DIR/models.json\" <<'POLAR'\n{models}\nPOLAR",
            f"pi --model {shlex.quote('polar/' + endpoint.model)}",
        ]

    def explains(self, completion: Completion) -> bool:
        return hint(completion, "user-agent").startswith("pi/")

    def answer(self, stdout: str) -> str | None:
        message = _last_answer(stdout)
        content = message.get("content") if message else None
        if not isinstance(content, list):
            return None
        texts = [part.get("text", "") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        return "".join(texts) or None

    def problem(self, exit_code: int, stdout: str, stderr: str) -> str | None:
        message = _last_answer(stdout)
        if message is not None and message.get("stopReason") in ("error", "aborted"):
            return f"{message.get('stopReason')}: {message.get('errorMessage')}"[:400]
        if exit_code == 0 and message is None:
            return "it ended without an answer"
        return super().problem(exit_code, stdout, stderr)


def _models(endpoint: Endpoint, options: Options) -> dict[str, Any]:
    base_url = {"anthropic": endpoint.root, "google": endpoint.v1beta}.get(endpoint.dialect, endpoint.v1)
    model = {"id": endpoint.model, "reasoning": True, "contextWindow": options.context, "maxTokens": options.max_output}
    return {"providers": {"polar": {"baseUrl": base_url, "api": _APIS[endpoint.dialect], "apiKey": endpoint.key, "models": [model]}}}


def _servers(options: Options) -> dict[str, Any]:
    """Every tool is declared to the model (`direct`): by default it could be reached by a search or a script only."""
    servers = options.mcp_servers
    return {one.name: {**(stdio_entry(one) if one.transport == "stdio" else url_entry(one)), "exposure": "direct"} for one in servers}


def _last_answer(stdout: str) -> dict[str, Any] | None:
    last = None
    for event in json_lines(stdout):
        message = event.get("message")
        if event.get("type") == "message_end" and isinstance(message, dict) and message.get("role") == "assistant":
            last = message
    return last
