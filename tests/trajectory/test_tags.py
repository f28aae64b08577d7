"""Which harness a session was run with, and what follows from not knowing it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trajectory_samples import SESSION, call

from polar.chat import Message
from polar.records import Completion, Session
from polar.trajectory import Forest, PrefixMerging, recipe
from polar.trajectory.tags import MIXED


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


def test_a_session_of_several_harnesses_is_mixed_and_each_call_is_tagged_by_its_own_recipe() -> None:
    title = (Message("system", "You are a title generator."), Message("user", "x"))
    calls = [
        call(0, [1], [2], hints={"user-agent": "pi/1.6.0 (linux)"}),
        call(1, [5], [6], tools=(), messages=title, hints={"user-agent": "opencode/1.18.33"}),
        call(2, [7], [8], tools=(), messages=title, hints={"user-agent": "codex_exec/0.171.0"}),
        call(3, [9], [10]),
    ]
    known = recipe(session(), calls)
    assert (known.harness, known.guessed) == (MIXED, True)
    assert [known.harness_of(each) for each in calls] == ["pi", "opencode", "codex", ""]
    assert [known.tag(each).role for each in calls] == ["main", "title", "main", "main"]
    made = PrefixMerging().build(Forest("s", calls), session())
    assert (made.builder["harness"], made.builder["harness_guessed"]) == ("mixed", True)
    assert [(row.metadata.get("harness"), row.metadata.get("harness_guessed")) for row in made.traces] == [
        ("pi", True),
        ("codex", True),
        (None, None),
    ]


def test_a_guess_is_called_one_and_a_name_in_the_metadata_is_not() -> None:
    calls = [call(0, [1], [2]), call(1, [5], [6], hints={"user-agent": "codex_exec/0.171.0"})]
    guessed, named = recipe(session(), calls), recipe(session(harness="codex"), calls)
    assert (guessed.harness, guessed.guessed, guessed.harness_of(calls[0])) == ("codex", True, "codex")
    assert (named.harness, named.guessed) == ("codex", False)


def test_a_session_that_calls_its_harness_mixed_is_of_an_unknown_one() -> None:
    known = recipe(session(harness=MIXED), [call(0, [1], [2], hints={"user-agent": "pi/1.6.0"})])
    assert (known.rules, known.harness_of(call(0, [1], [2]))) == (False, MIXED)
