"""MCP servers in each CLI's own form. The forms are those that the CLIs' own `mcp add` writes, at the pinned versions."""

from __future__ import annotations

import json
import tomllib
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ConfigError
from polar.harness import Endpoint, Options, named, registered
from polar.harness.home import Home
from polar.harness.spec import McpServer
from polar.harness.toml import dumps

KEY = "key-1"
BASE = "http://127.0.0.1:1/s/" + KEY
LOCAL = McpServer(name="files", command="serve", args=["--x", "a b"], env={"A": "b"})
HTTP = McpServer(name="web", transport="streamable-http", url="http://h/mcp", headers={"X": "y"})
SSE = McpServer(name="old", transport="sse", url="http://h/sse")

STDIO = {"command": "serve", "args": ["--x", "a b"], "env": {"A": "b"}}
WEB = {"url": "http://h/mcp", "headers": {"X": "y"}}
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "claude-code": (
        ".claude.json",
        "mcpServers",
        {"files": {"type": "stdio", **STDIO}, "web": {"type": "http", **WEB}, "old": {"type": "sse", "url": "http://h/sse"}},
    ),
    "gemini-cli": (
        ".gemini/settings.json",
        "mcpServers",
        {"files": {"type": "stdio", **STDIO}, "web": {"type": "http", **WEB}, "old": {"type": "sse", "url": "http://h/sse"}},
    ),
    "qwen-code": (
        ".qwen/settings.json",
        "mcpServers",
        {
            "files": {**STDIO, "alwaysLoadTools": True},
            "web": {"httpUrl": "http://h/mcp", "headers": {"X": "y"}, "alwaysLoadTools": True},
            "old": {"url": "http://h/sse", "alwaysLoadTools": True},
        },
    ),
    "opencode": (
        ".config/opencode/opencode.json",
        "mcp",
        {
            "files": {"type": "local", "command": ["serve", "--x", "a b"], "environment": {"A": "b"}, "enabled": True},
            "web": {"type": "remote", **WEB, "enabled": True, "oauth": False},
            "old": {"type": "remote", "url": "http://h/sse", "enabled": True, "oauth": False},
        },
    ),
    "pi": (".pi/agent/mcp.json", "mcpServers", {"files": {**STDIO, "exposure": "direct"}, "web": {**WEB, "exposure": "direct"}}),
    "codex": (".codex/config.toml", "mcp_servers", {"files": STDIO, "web": {"url": "http://h/mcp", "http_headers": {"X": "y"}}}),
}


def written(name: str, servers: list[McpServer], **settings: Any) -> dict[str, Any]:
    harness = named(name)
    home = Home("/home/agent")
    harness.configure(home, Endpoint(BASE, KEY, harness.dialects[0], "m"), Options(mcp_servers=tuple(servers), settings=settings))
    text = home.files[PurePosixPath(FORMS[name][0])].decode()
    return tomllib.loads(text) if name == "codex" else json.loads(text)


@pytest.mark.parametrize("name", list(FORMS))
def test_servers_are_written_as_the_cli_itself_does(name: str) -> None:
    _, key, wanted = FORMS[name]
    servers = [server for server in (LOCAL, HTTP, SSE) if server.transport in named(name).mcp_transports]
    assert written(name, servers)[key] == wanted


def test_codex_keeps_its_base_url_whatever_servers_and_settings_there_are() -> None:
    config = written("codex", [LOCAL, HTTP], features={"goals": False}, **{"tools.web_search": False})
    assert config["model_provider"] == "polar"
    assert config["model_providers"]["polar"]["base_url"] == BASE + "/v1"
    assert set(config["mcp_servers"]) == {"files", "web"}
    assert config["features"] == {"plugins": False, "apps": False, "goals": False}
    assert config["tools"] == {"web_search": False}


@pytest.mark.parametrize("name", [name for name, harness in registered().items() if not harness.mcp_transports])
def test_a_harness_without_mcp_refuses_servers(name: str) -> None:
    harness = named(name)
    with pytest.raises(ConfigError, match="has no MCP"):
        harness.configure(Home("/h"), Endpoint(BASE, KEY, harness.dialects[0], "m"), Options(mcp_servers=(LOCAL,)))


@pytest.mark.parametrize("name", ["codex", "pi"])
def test_a_transport_that_a_cli_lacks_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="stdio, streamable-http, not sse"):
        written(name, [SSE])


def test_two_servers_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two MCP servers"):
        written("pi", [LOCAL, LOCAL])


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[A-Za-z0-9_-]+", fullmatch=True), VALUES, max_size=4))
def test_what_is_written_as_toml_is_read_back_the_same(settings: dict[str, Any]) -> None:
    assert tomllib.loads(dumps(settings)) == settings
