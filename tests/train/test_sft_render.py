"""A conversation becomes the ids that its rollout would have had, and only the model's own are trained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sft_samples import BUNDLED

from polar.chat import Message, Thinking, Tool, ToolCall
from polar.errors import ConfigError
from polar.tokens.rendering import Rendering
from polar.tokens.tokenizer import load_tokenizer
from polar.train.sft_render import Conversations

TOKENIZER = load_tokenizer(BUNDLED)
SHELL = Tool("shell", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
CALL = ToolCall("c1", "shell", '{"command": "ls"}')
TALK = (
    Message("system", "You are an agent."),
    Message("user", "Hi there."),
    Message("assistant", "", (Thinking("I look."),), (CALL,)),
    Message("tool", "a.py", tool_call_id="c1"),
    Message("assistant", "Done."),
    Message("user", "More."),
    Message("assistant", "Bye.", (Thinking("Hm."),)),
)


@lru_cache
def conversations(renderer: str = "qwen3") -> Conversations:
    return Conversations(TOKENIZER, renderer)


def shown(messages: Sequence[Message], tools: Sequence[Tool] = (), renderer: str = "qwen3", trained: Sequence[bool] | None = None) -> str:
    """The text, what is trained in square brackets."""
    wanted = [message.role == "assistant" for message in messages] if trained is None else trained
    ids, mask = conversations(renderer).render(messages, tools, wanted)
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(ids)]
    parts = [(TOKENIZER.decode(ids[a:b]), bool(mask[a])) for a, b in pairwise(edges)]
    return "".join(f"[{text}]" if own else text for text, own in parts)


def test_a_conversation_is_the_templates_with_all_thinking_in_its_place() -> None:
    call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
    assert shown(TALK) == (
        "<|im_start|>system\nYou are an agent.<|im_end|>\n<|im_start|>user\nHi there.<|im_end|>\n<|im_start|>assistant\n"
        f"[<think>\nI look.\n</think>\n\n{call}<|im_end|>]\n"
        "<|im_start|>user\n<tool_response>\na.py\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "[Done.<|im_end|>]\n"
        "<|im_start|>user\nMore.<|im_end|>\n<|im_start|>assistant\n"
        "[<think>\nHm.\n</think>\n\nBye.<|im_end|>]"
    )


def test_a_prompt_that_opens_thinking_is_not_answered_with_another_opening() -> None:
    """Qwen3.5's prompts end with `<think>`."""
    text = shown((*TALK[1:3], Message("user", "Go on."), Message("assistant", "Done.")), renderer="qwen3.5")
    assert "<|im_start|>assistant\n<think>\n[I look.\n</think>\n\n<tool_call>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n[\n</think>\n\nDone.<|im_end|>]")
    assert text.count("<think>") == 2


def test_tools_stand_in_the_first_prompt() -> None:
    assert '"name": "shell"' in shown(TALK, [SHELL]).partition("[")[0]


def test_answers_that_are_not_trained_stand_as_context() -> None:
    only_last = shown(TALK, trained=[False] * 6 + [True])
    assert only_last.count("[") == 1
    assert only_last.replace("[", "").replace("]", "") == shown(TALK).replace("[", "").replace("]", "")


def test_what_comes_after_the_last_answer_is_of_no_use() -> None:
    assert shown([*TALK, Message("user", "Still there?")]) == shown(TALK)


def test_what_cannot_be_bridged_is_rendered_as_a_whole() -> None:
    twice = shown([Message("user", "Hi."), Message("assistant", "One."), Message("assistant", "Two.")])
    assert "One.<|im_end|>]" in twice
    assert twice.endswith("Two.<|im_end|>]\n")
    assert shown([Message("assistant", "I begin."), Message("user", "Hi."), Message("assistant", "So.")]).endswith("So.<|im_end|>]\n")


def test_a_conversation_that_the_template_refuses_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        conversations().render([], [], [])


def test_a_renderer_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit"):
        Conversations(TOKENIZER, "llama-3")


WORDS = st.text("ab c.\n", max_size=12).map(str.strip)
ANSWERS = st.builds(
    lambda text, thinking, calls: Message(
        "assistant",
        text,
        (Thinking(thinking),) if thinking else (),
        tuple(ToolCall(f"c{i}", "shell", '{"command": "' + "x" * i + '"}') for i in range(calls)),
    ),
    WORDS,
    WORDS,
    st.integers(0, 2),
)


@given(st.lists(st.tuples(WORDS, ANSWERS), min_size=1, max_size=4), st.data())
def test_every_prompt_in_a_row_is_the_gateways(turns: list[tuple[str, Message]], data: st.DataObject) -> None:
    """Prompt by prompt, what `Rendering` makes of the ids before it; the mask is true on the chosen answers' ids and nowhere else."""
    rendering = Rendering(TOKENIZER, "qwen3", thinking_retention="all", arguments={})
    messages = [message for text, answer in turns for message in (Message("user", text), answer)]
    trained = [message.role == "assistant" and data.draw(st.booleans()) for message in messages]
    ids, mask = conversations().render(messages, [SHELL], trained)
    whole, _ = conversations().render(messages, [SHELL], [message.role == "assistant" for message in messages])
    assert ids.tolist() == whole.tolist()
    prompt = rendering.render(messages[:1], [SHELL])
    for place in range(1, len(messages), 2):
        assert ids[: len(prompt)].tolist() == prompt.tolist()
        end = len(prompt) + ids[len(prompt) :].tolist().index(rendering.stop_token_ids[0]) + 1
        assert mask[len(prompt) : end].tolist() == [trained[place]] * (end - len(prompt))
        if place + 1 < len(messages):
            bridged, _ = rendering.bridge(prompt, ids[len(prompt) : end], messages[place + 1 : place + 2], [SHELL], messages[place])
            assert bridged is not None
            assert not mask[end : len(bridged)].any()
            prompt = bridged
    assert end == len(ids)
