"""Which harness a session was run with, and what follows from not knowing it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trajectory_samples import SESSION, call

from polar.chat import Message
from polar.records import Completion, Session
from polar.trajectory import Forest, PrefixMerging, recipe


def with_headers(**headers: str) -> Completion:
    return call(0, [1], [2], hints={name.replace("_", "-"): value for name, value in headers.items()})


def session(**metadata: object) -> Session:
    return replace(SESSION, metadata=metadata)


def test_the_sessions_metadata_name_the_harness() -> None:
    known = recipe(session(harness="claude-code"))
    assert (known.harness, known.rules) == ("claude-code", True)
    tag = known.tag(call(0, [1], [2], hints={"x-claude-code-agent-id": "a1"}))
    assert (tag.role, tag.rule) == ("sub_agent", "claude-code: x-claude-code-agent-id")


@pytest.mark.parametrize(
    ("headers", "harness"),
    [
        ({"user_agent": "claude-cli/2.1.332 (external, sdk-cli)", "x_claude_code_session_id": "0b"}, "claude-code"),
        ({"user_agent": "claude-cli/0.24.4 (external, cli)"}, "qwen-code"),
        ({"user_agent": "QwenCode/0.24.4 (linux; x64)"}, "qwen-code"),
        ({"user_agent": "GeminiCLI-tui/0.61.0/model (linux; x64; terminal)"}, "gemini-cli"),
        ({"user_agent": "codex_exec/0.171.0 (Debian)"}, "codex"),
        ({"user_agent": "opencode/1.18.33 ai-sdk/provider"}, "opencode"),
        ({"user_agent": "pi/1.6.0 (linux; node/v22)"}, "pi"),
    ],
)
def test_otherwise_headers_give_it_away(headers: dict[str, str], harness: str) -> None:
    assert recipe(session(), [call(1, [1], [2]), with_headers(**headers)]).harness == harness


def test_headers_do_not_overrule_the_metadata() -> None:
    assert recipe(session(harness="pi"), [with_headers(user_agent="codex_exec/1")]).harness == "pi"
    assert not recipe(session(harness="my-agent"), [with_headers(user_agent="codex_exec/1")]).rules


def test_an_unknown_harness_trains_everything_and_warns_of_roots_without_tools() -> None:
    calls = [call(0, [1], [2], tools=()), call(1, [5], [6]), call(2, [7], [8], tools=())]
    made = PrefixMerging().build(Forest("s", calls), session(harness="my-agent"))
    assert (made.in_rows, made.builder["harness"]) == (3, "my-agent")
    (warning,) = made.warnings
    assert "2 of its 3 conversations have no tools" in warning
    assert "completions 0, 2" in warning


def test_it_does_not_warn_where_every_root_has_tools() -> None:
    assert PrefixMerging().build(Forest("s", [call(0, [1], [2])]), session()).warnings == ()


def test_a_known_harness_never_warns() -> None:
    made = PrefixMerging().build(Forest("s", [call(0, [1], [2], tools=())]), session(harness="pi"))
    assert made.warnings == ()


def test_rebuilding_with_another_recipe_changes_roles_without_touching_what_was_captured() -> None:
    title = call(1, [5], [6], tools=(), messages=(Message("system", "You are a title generator."), Message("user", "x")))
    forest = Forest("s", [call(0, [1], [2]), title])
    named = PrefixMerging().build(forest, session(harness="opencode"))
    assert [(line.reason, line.rule) for line in named.ledger] == [("title", "opencode: title generator's system prompt")]
    assert PrefixMerging().build(forest, session(harness="shell")).in_rows == 2
