"""MCP servers as most CLIs write them: a map from a server's name to its command or its URL. Knows no preset.

What differs between the CLIs (how they call a transport, which of them they have) is in their own files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from polar.errors import ConfigError
from polar.harness.spec import McpServer

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""What all CLIs take: the name becomes a part of the tools' names, which providers restrict to these characters."""


def check_servers(harness: str, servers: Sequence[McpServer], transports: frozenset[str]) -> None:
    """Raises `ConfigError` for a server that the harness could not use."""
    if servers and not transports:
        raise ConfigError(f"{harness} has no MCP: remove mcp_servers, or choose another harness")
    seen: set[str] = set()
    for server in servers:
        if not _NAME.fullmatch(server.name):
            raise ConfigError(f"MCP server {server.name!r}: a name is 1 to 64 letters, digits, '_' and '-'")
        if server.name in seen:
            raise ConfigError(f"two MCP servers are called {server.name!r}")
        seen.add(server.name)
        if server.transport not in transports:
            raise ConfigError(f"MCP server {server.name!r}: {harness} speaks {', '.join(sorted(transports))}, not {server.transport}")


def stdio_entry(server: McpServer) -> dict[str, Any]:
    entry: dict[str, Any] = {"command": server.command, "args": server.args}
    return {**entry, "env": server.env} if server.env else entry


def url_entry(server: McpServer, key: str = "url") -> dict[str, Any]:
    entry: dict[str, Any] = {key: server.url}
    return {**entry, "headers": server.headers} if server.headers else entry


def typed(servers: Sequence[McpServer], types: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Entries that say their transport in `type`, by these names for it."""
    return {
        server.name: {"type": types[server.transport], **(stdio_entry(server) if server.transport == "stdio" else url_entry(server))}
        for server in servers
    }
