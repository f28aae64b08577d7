"""Which calls a harness would deny. The headers are those that the pinned CLIs sent; the real ones are in the harness check."""

from __future__ import annotations

import pytest

from polar.chat import JsonObject, Message, Tool
from polar.harness import named, registered
from polar.records import Completion

OWN: list[tuple[str, JsonObject]] = [
    ("claude-code", {"user-agent": "claude-cli/2.1.332 (external, sdk-cli)", "x-claude-code-session-id": "s"}),
    ("codex", {"user-agent": "codex_exec/0.171.0 (Debian 12.0.0; x86_64) dumb", "originator": "codex_exec"}),
    ("gemini-cli", {"user-agent": "GeminiCLI-tui/0.61.0/some-model (linux; x64; terminal)"}),
    ("qwen-code", {"user-agent": "QwenCode/0.24.4 (linux; x64)"}),
    ("qwen-code", {"user-agent": "claude-cli/0.24.4 (external, cli)"}),
    ("opencode", {"user-agent": "opencode/1.18.33 ai-sdk/provider-utils/4", "x-session-id": "ses_1"}),
    ("pi", {"user-agent": "pi/1.6.0 (linux; node/v24.1.0)"}),
    ("mini-swe-agent", {"user-agent": "OpenAI/Python 2.30.0"}),
    ("mini-swe-agent", {"user-agent": "litellm/1.110.2"}),
]
FOREIGN: list[JsonObject] = [
    {},
    {"user-agent": "curl/7.88.1"},
    {"user-agent": "python-requests/2.32"},
    {"user-agent": "Python-urllib/3.11"},
    {"user-agent": "Anthropic/Python 0.84.0"},
    {"user-agent": "node"},
]


def call(hints: JsonObject, tools: tuple[Tool, ...] = (Tool("bash"),)) -> Completion:
    message = Message("user", "do it")
    return Completion("s", 0, "complete", "openai_chat", "tokens", (message,), Message("assistant", "ok"), "stop", tools=tools, hints=hints)


@pytest.mark.parametrize(("name", "hints"), OWN)
def test_a_cli_explains_its_own_calls(name: str, hints: JsonObject) -> None:
    assert named(name).explains(call(hints))


@pytest.mark.parametrize("hints", FOREIGN)
@pytest.mark.parametrize("name", [name for name in registered() if name != "shell"])
def test_a_cli_denies_the_calls_of_other_clients(name: str, hints: JsonObject) -> None:
    assert not named(name).explains(call(hints))


def test_a_shell_command_may_call_as_it_likes() -> None:
    assert all(named("shell").explains(call(hints)) for hints in FOREIGN)


def test_the_openai_client_without_mini_s_tool_is_not_mini() -> None:
    assert not named("mini-swe-agent").explains(call({"user-agent": "OpenAI/Python 2.30.0"}, tools=()))
