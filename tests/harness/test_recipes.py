"""Recipes: what a call was for, from its record alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polar.chat import Message, Tool
from polar.harness import named
from polar.records import Completion

SHELL = Tool("bash")


def call(system: str = "You are an agent.", user: str = "do it", tools: tuple[Tool, ...] = (SHELL,), **hints: str) -> Completion:
    return Completion(
        session="s",
        number=0,
        status="complete",
        dialect="openai_chat",
        mode="tokens",
        messages=(Message("system", system), Message("user", user)),
        answer=Message("assistant", "ok"),
        finish="stop",
        tools=tools,
        hints={name.replace("_", "-"): value for name, value in hints.items()},
    )


TABLE = [
    ("codex", call(x_openai_subagent="collab_spawn"), "sub_agent"),
    ("codex", call(x_codex_parent_thread_id="t"), "sub_agent"),
    ("codex", call(user="You are performing a CONTEXT CHECKPOINT COMPACTION. Create", tools=()), "compaction"),
    ("codex", call(path="/v1/responses/compact"), "compaction"),
    ("codex", call(), "main"),
    ("claude-code", call(x_claude_code_agent_id="a1"), "sub_agent"),
    ("claude-code", call(user="CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."), "compaction"),
    ("claude-code", call(system="Generate a concise title", tools=()), "title"),
    ("claude-code", replace(call(tools=()), asked={"sampling": {"max_tokens": 1}}), "probe"),
    ("claude-code", call(), "main"),
    ("gemini-cli", call(tools=(Tool("complete_task"), SHELL)), "sub_agent"),
    ("gemini-cli", call(system="... write a <state_snapshot>", tools=()), "compaction"),
    ("gemini-cli", replace(call(tools=()), asked={"response_format": {"json_schema": {"complexity_score": 1}}}), "router"),
    ("gemini-cli", call(user="... determine who should logically speak next ...", tools=()), "probe"),
    ("gemini-cli", call(), "main"),
    ("qwen-code", call(system="You are a general-purpose subagent working for a parent agent."), "sub_agent"),
    ("qwen-code", call(system="You are the component that summarizes a conversation when", tools=()), "compaction"),
    ("qwen-code", call(tools=(Tool("respond_in_schema"),)), "probe"),
    ("qwen-code", call(), "main"),
    ("opencode", call(system="You are a title generator. You output", tools=()), "title"),
    ("opencode", call(system="You are a context summarization agent.", tools=()), "compaction"),
    ("opencode", call(x_parent_session_id="ses_1", tools=(SHELL, Tool("task"))), "sub_agent"),
    ("opencode", call(), "sub_agent"),
    ("opencode", call(tools=(SHELL, Tool("task"))), "main"),
    ("pi", call(system="You are a context summarization assistant.", tools=()), "compaction"),
    ("pi", call(), "main"),
    ("shell", call(tools=()), "main"),
]


@pytest.mark.parametrize(("name", "completion", "role"), TABLE, ids=[f"{name}-{role}-{at}" for at, (name, _, role) in enumerate(TABLE)])
def test_a_recipe_tells_what_a_call_was_for(name: str, completion: Completion, role: str) -> None:
    tag = named(name).tag(completion)
    assert tag.role == role
    assert tag.rule.startswith(name + ": ")


def test_a_tag_is_the_same_whenever_it_is_computed() -> None:
    completion = call(x_openai_subagent="review")
    assert named("codex").tag(completion) == named("codex").tag(replace(completion))
