"""The parts of the conformance check: it must be able to fail, or passing means nothing."""

from __future__ import annotations

import io
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.chat import Message, ToolCall
from polar.engine.text import FastTokenizer, JinjaTemplate, load_text
from polar.harness import named
from polar.harness.check.plan import PLANS, Plan
from polar.harness.check.prompt import read_prompt
from polar.harness.check.row import Row, render_table
from polar.harness.check.sampling import answer_text, sample_ids
from polar.harness.check.scenario import FILES, PART_ONE, PROMPT_ONE, PROMPT_TWO, Abilities, Call, Say, Turn, View, decide, progress
from polar.harness.check.verify import Broken, Findings, extends, judge
from polar.records import Break, Cause, Completion
from polar.testing import fake_logprob

SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=60).filter(lambda text: "<" not in text and "|" not in text)


@pytest.fixture(scope="module")
def qwen(qwen3_tokenizer_dir: Path) -> tuple[FastTokenizer, JinjaTemplate]:
    return load_text(qwen3_tokenizer_dir)


# --- scenario ------------------------------------------------------------------------------------------------------


def play(abilities: Abilities, tools: dict[str, dict[str, object]]) -> list[Say]:
    """A harness in three lines: it runs nothing, but answers each shell call with the step's marker."""
    turns, said = [Turn("user", PROMPT_ONE)], []
    for _ in range(20):
        say = decide(View("You are an agent.", tools, turns), abilities)
        said.append(say)
        if say.error is not None:
            turns.append(Turn("user", PROMPT_TWO))
            continue
        turns.append(Turn("assistant", say.text))
        if not say.calls:
            break
        done = progress(View("", tools, turns)) + 1
        turns += [Turn("tool", f"step-{done}-done") for _ in say.calls]
    return said


def test_the_exercise_takes_seven_steps_with_two_calls_in_parallel_and_one_cut() -> None:
    said = play(Abilities(), {"bash": SHELL})
    assert [len(say.calls) for say in said] == [1, 2, 1, 1, 1, 1, 0, 1, 0]
    assert [say.error is not None for say in said].index(True) == 6


def test_a_summary_carries_the_progress_over_a_compaction() -> None:
    turns = [Turn("user", PROMPT_ONE), Turn("tool", "step-3-done"), Turn("user", "You are performing a CONTEXT CHECKPOINT COMPACTION.")]
    summary = decide(View("", {}, turns))
    assert "step-3-done" in summary.text
    assert PART_ONE in summary.text
    after = View("", {"bash": SHELL}, [Turn("user", summary.text), Turn("user", PROMPT_ONE)])
    assert "step-%d-done\\n' 4" in after_command(decide(after))


def after_command(say: Say) -> str:
    return str(say.calls[0].arguments["command"])


def test_a_call_fills_what_the_tool_requires() -> None:
    schema = {
        "type": "object",
        "properties": {"command": {}, "is_background": {"type": "boolean"}},
        "required": ["command", "is_background"],
    }
    say = decide(View("", {"run_shell_command": schema}, [Turn("user", PROMPT_ONE)]))
    assert say.calls[0].arguments["is_background"] is False


def test_a_namespaced_tool_is_found() -> None:
    tools = {"bash": SHELL, "multi_agent_v1__spawn_agent": {"properties": {"message": {"type": "string"}}, "required": ["message"]}}
    say = decide(View("", tools, [Turn("user", PROMPT_ONE), Turn("tool", "step-2-done")]))
    assert say.calls[0].name == "multi_agent_v1__spawn_agent"


def test_every_harness_but_shell_has_a_plan() -> None:
    assert set(PLANS) == {"codex", "claude-code", "gemini-cli", "qwen-code", "opencode", "pi", "mini-swe-agent"}


# --- prompts and sampling --------------------------------------------------------------------------------------------


def test_a_rendered_prompt_is_read_back(qwen: tuple[FastTokenizer, JinjaTemplate]) -> None:
    _, template = qwen
    call = {"function": {"name": "bash", "arguments": {"command": "ls"}}}
    messages = [
        {"role": "system", "content": "You are <tools> an agent."},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "yes", "tool_calls": [call]},
        {"role": "tool", "content": "one\n</x>"},
        {"role": "tool", "content": ""},
        {"role": "user", "content": "more"},
    ]
    view = read_prompt(template.render(messages, [{"type": "function", "function": {"name": "bash", "parameters": SHELL}}]))
    assert view.tools == {"bash": SHELL}
    assert view.system.strip() == "You are <tools> an agent."
    assert [(turn.role, turn.text) for turn in view.turns if turn.role != "assistant"] == [
        ("user", "go"),
        ("tool", "one\n</x>"),
        ("tool", ""),
        ("user", "more"),
    ]


@settings(max_examples=100, deadline=None)
@given(thinking=TEXT, text=TEXT, command=TEXT)
def test_sampled_ids_decode_to_the_text_exactly(thinking: str, text: str, command: str, qwen: tuple[FastTokenizer, JinjaTemplate]) -> None:
    tokenizer, _ = qwen
    raw = answer_text(Say(thinking, text, (Call("bash", {"command": command}),)))
    assert tokenizer.decode(sample_ids(raw, tokenizer), skip_special=False) == raw + "<|im_end|>"


def test_sampled_ids_of_every_step_do_not_survive_a_re_encoding(qwen: tuple[FastTokenizer, JinjaTemplate]) -> None:
    tokenizer, _ = qwen
    for say in play(Abilities(), {"bash": SHELL}):
        if say.error is None:
            raw = answer_text(say)
            assert sample_ids(raw, tokenizer) != tokenizer.encode(raw + "<|im_end|>")


def test_the_exercise_samples_escapes_and_outer_whitespace() -> None:
    raw = [answer_text(say) for say in play(Abilities(cut=False), {"bash": SHELL})]
    assert any("\\u" in text for text in raw)
    assert any(text.endswith(("\n", " ")) for text in raw)


# --- verdicts ----------------------------------------------------------------------------------------------------------


def completion(
    number: int, messages: tuple[Message, ...], answer: Message, prompt: list[int], sampled: list[int], **more: object
) -> Completion:
    return Completion(
        session="s",
        number=number,
        status="complete",
        dialect="openai_chat",
        mode="tokens",
        messages=messages,
        answer=answer,
        finish="stop",
        prompt_ids=np.asarray(prompt, np.int32),
        sampled_ids=np.asarray(sampled, np.int32),
        logprobs=np.asarray([fake_logprob(token, at) for at, token in enumerate(sampled)], np.float32),
        root=b"r" * 32,
        started=float(number),
        ended=number + 0.5,
        **more,  # type: ignore[arg-type]
    )


USER, TOOL = Message("user", "go"), Message("tool", "result", tool_call_id="x")
ASKS = Message("assistant", " text ", tool_calls=(ToolCall("x", "bash", '{"a":1}'),))
ECHO = Message("assistant", "text", tool_calls=(ToolCall("y", "bash", '{ "a" : 1 }'),))
ENDS = Message("assistant", "done")
FIRST = completion(0, (USER,), ASKS, [1, 2], [3, 4])
SECOND = completion(1, (USER, ECHO, TOOL), ENDS, [1, 2, 3, 4, 9, 9], [5], parent=0)
ANYTHING = Plan((), compaction=False, sub_agent=False)


def verdict(*completions: Completion, bridging: bool = True) -> Findings:
    return judge(completions, named("shell"), ANYTHING, "tokens", bridging, lambda messages, thinking: [9, 9])


def problems(*completions: Completion) -> str:
    return "; ".join(verdict(*completions).problems)


def test_an_echo_with_other_spacing_is_the_same_turn_and_extends() -> None:
    found = verdict(FIRST, SECOND)
    assert found.extended == 1
    assert extends(SECOND, FIRST)
    assert "call 1" not in "; ".join(found.problems)


def test_a_prompt_that_differs_in_one_id_is_a_break() -> None:
    assert "no cause is named" in problems(FIRST, replace(SECOND, prompt_ids=np.asarray([1, 2, 3, 8, 9, 9], np.int32)))


def test_a_named_break_is_still_a_failure_where_bridging_is_on() -> None:
    broken = Break(Cause.BPE_SPLIT, 0, 3, 1, "other tokens")
    item = replace(SECOND, prompt_ids=np.asarray([1, 2, 3, 8, 9, 9], np.int32), broken=broken)
    assert "does not extend call 0: bpe_split" in problems(FIRST, item)
    off = verdict(FIRST, item, bridging=False)
    assert off.broken == [Broken(1, 0, "bpe_split", 3, 1, "other tokens")]
    assert not [problem for problem in off.problems if "extend call" in problem]


def test_a_suffix_that_is_not_the_template_s_is_found() -> None:
    item = replace(SECOND, prompt_ids=np.asarray([1, 2, 3, 4, 9, 8], np.int32))
    assert "not the template's rendering" in problems(FIRST, item)


def test_missing_log_probabilities_are_found() -> None:
    assert "no log-probabilities" in problems(replace(FIRST, logprobs=None))


def test_log_probabilities_of_other_tokens_are_found() -> None:
    assert FIRST.logprobs is not None
    assert "not those of the sampled tokens" in problems(replace(FIRST, logprobs=FIRST.logprobs[::-1].copy()))


def test_an_edited_history_that_is_joined_is_found() -> None:
    item = replace(SECOND, messages=(Message("user", "stop"), ECHO, TOOL))
    assert "joined to call 0, which it does not continue" in problems(FIRST, item)


def test_a_run_that_exercised_nothing_fails() -> None:
    found = problems(FIRST)
    for missing in ("parallel", "thinking", "five are wanted", "user message after a tool result"):
        assert missing in found


def test_missing_sub_agents_and_compactions_are_found() -> None:
    found = judge([FIRST], named("shell"), PLANS["codex"], "tokens", True, lambda messages, thinking: [])
    assert "0 calls are tagged as a sub-agent's; two are wanted" in found.problems
    assert "no call is tagged as a compaction" in found.problems


def test_the_table_has_a_row_for_each_and_says_where_prefixes_break() -> None:
    from rich.console import Console

    row = Row("pi", "1.6.0", "google", "messages", True, files=len(FILES), broken=[Broken(4, 3, "bpe_split", 17, 2, "[x] differs")])
    failed = Row("codex", "0.171.0", "openai_responses", "tokens", True, problems=["omega.txt is missing"])
    console = Console(width=220, record=True, file=io.StringIO())
    console.print(render_table([row, failed]))
    text = console.export_text()
    for word in ("pi 1.6.0", "1 bpe_split", "17", "[x] differs", "FAIL", "codex openai_responses tokens: omega.txt is missing"):
        assert word in text


def test_a_row_as_json_says_everything_and_whether_it_passed() -> None:
    row = Row("pi", "1.6.0", "google", "messages", True, broken=[Broken(4, 3, "bpe_split", 17, 2, "[x] differs")], breaks_off=Counter(a=1))
    row.built.rows["main"] = 2
    told = json.loads(json.dumps(row.to_json()))
    assert told["passed"] is True
    assert told["built"]["rows"] == {"main": 2}
    assert told["broken"] == [{"call": 4, "parent": 3, "cause": "bpe_split", "position": 17, "lost": 2, "why": "[x] differs"}]
    assert told["breaks_off"] == {"a": 1}


def test_a_forced_tool_may_run_in_mode_messages() -> None:
    assert "ran in mode messages" in problems(replace(FIRST, mode="messages"))
    assert "ran in mode messages" not in problems(replace(FIRST, mode="messages", asked={"tool_choice": "required"}))
