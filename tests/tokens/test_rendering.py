"""Fresh renders equal the model's own Jinja template, run by transformers; bridges equal full renders of what is new."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.chat import ChatRequest, Message, Thinking, ToolCall
from polar.errors import ConfigError, InvalidRequest
from polar.tokens import rendering
from polar.tokens.path import TokenPath
from polar.tokens.rendering import Rendering, to_renderer
from polar.tokens.tokenizer import FoldingTokenizer, Tokenizer, unfolded
from tokens.session import TOOLS, result, system, user

WORDS = [
    "alpha",
    "beta ",
    " gamma",
    "\n",
    "\n\n",
    "é漢🙂",
    "<tool_response>",
    "</tool_response>",
    "{}",
    '"q"',
    "\\",
    "  ",
    "<|im_end|>",
    "end.",
]


def random_conversation(dice: random.Random, *, reasoning: bool = True) -> list[Message]:
    def text(low: int = 0) -> str:
        return "".join(dice.choice(WORDS) for _ in range(dice.randint(low, 6)))

    def said() -> str:
        # the library strips a user's text before it looks for <tool_response> around it, the template does not: one or the other, exactly
        return f"<tool_response>{text()}</tool_response>" if dice.random() < 0.1 else "u" + text()

    messages = [Message("system", text())] if dice.random() < 0.6 else []
    messages.append(Message("user", said()))
    for _ in range(dice.randint(0, 4)):
        thinking = (Thinking(text(1)),) if reasoning and dice.random() < 0.5 else ()
        value = {text(1): dice.choice([1, 1.5, None, True, text(), [1, text()], {"k": text()}]) for _ in range(dice.randint(0, 2))}
        calls = tuple(
            ToolCall(f"c{dice.random()}", dice.choice(["bash", "read"]), json.dumps(value, separators=(",", ":")))
            for _ in range(dice.choice([0, 0, 1, 2]))
        )
        messages.append(Message("assistant", text(), thinking=thinking, tool_calls=calls))
        messages += [Message("tool", text(), tool_call_id=call.id) for call in calls]
        if not calls or dice.random() < 0.3:
            messages.append(Message("user", said()))
    return messages


@pytest.fixture(scope="module")
def jinja(qwen3_tokenizer_dir: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="the template is run by transformers")
    return transformers.PreTrainedTokenizerFast.from_pretrained(qwen3_tokenizer_dir)


def by_template(jinja: Any, messages: list[Message], tools: bool, **arguments: Any) -> list[int]:
    schemas = [tool.schema() for tool in TOOLS] if tools else None
    text = jinja.apply_chat_template(to_renderer(messages), tools=schemas, add_generation_prompt=True, tokenize=False, **arguments)
    return list(jinja.encode(text, add_special_tokens=False))


def test_five_hundred_random_conversations_render_as_the_template_does(qwen3_path: TokenPath, jinja: Any) -> None:
    dice = random.Random(7)
    for _ in range(500):
        messages = random_conversation(dice)
        tools = dice.random() < 0.7
        request = ChatRequest("m", tuple(messages), tools=TOOLS if tools else ())
        assert qwen3_path.render(request).tolist() == by_template(jinja, messages, tools)


def test_thinking_switched_off_renders_as_the_template_does(qwen3_path: TokenPath, jinja: Any) -> None:
    messages = [Message("system", "s"), Message("user", "u")]
    request = ChatRequest("m", tuple(messages), tools=TOOLS, thinking=False)
    assert qwen3_path.render(request).tolist() == by_template(jinja, messages, True, enable_thinking=False)


def test_a_bridges_suffix_is_the_templates_rendering_of_the_new_messages(qwen3: Tokenizer, jinja: Any) -> None:
    rendering = Rendering(qwen3, "qwen3", thinking_retention="all", arguments={})
    dice = random.Random(11)
    for _ in range(200):
        messages = random_conversation(dice, reasoning=False)
        while messages[-1].role == "assistant":
            messages.pop()
        last = max((place for place, message in enumerate(messages) if message.role == "assistant"), default=-1)
        if last < 0:
            continue
        new = messages[last + 1 :]
        prompt = rendering.render(messages[:last], TOOLS)
        sampled = np.array(qwen3.encode("an answer<|im_end|>"), dtype=np.int32)
        bridged, why = rendering.bridge(prompt, sampled, new, TOOLS, messages[last])
        assert bridged is not None, why
        known = len(prompt) + len(sampled)
        assert bridged[:known].tolist() == [*prompt.tolist(), *sampled.tolist()]
        text = jinja.apply_chat_template(
            to_renderer([Message("user", "u"), Message("assistant", "an answer"), *new]), add_generation_prompt=True, tokenize=False
        )
        suffix = text.split("an answer<|im_end|>", 1)[1]
        assert bridged[known:].tolist() == jinja.encode(suffix, add_special_tokens=False)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "qwen3.6", "qwen3.8"])
def test_a_bridge_from_the_last_turn_alone_is_the_whole_bridge(qwen3: Tokenizer, name: str) -> None:
    rendering = Rendering(qwen3, name, thinking_retention="all", arguments={})
    whole = rendering._renderer.bridge_to_next_turn
    dice = random.Random(3)
    for _ in range(40):
        messages = random_conversation(dice)
        while messages[-1].role == "assistant":
            messages.pop()
        messages.append(Message("user", "go on"))
        prompt = rendering.render(messages, TOOLS)
        answer = dice.choice(["hi<|im_end|>", "<think>\nx\n</think>\n\nhi", "cut short", "<think>open", "x</think>y<|endoftext|>"])
        sampled = qwen3.encode(answer)
        new = [Message("user", "more"), Message("tool", "r", tool_call_id="c")]
        bridged, _ = rendering.bridge(prompt, np.array(sampled, dtype=np.int32), new, TOOLS)
        expected = whole(prompt.tolist(), sampled, to_renderer(new), tools=[tool.schema() for tool in TOOLS])
        assert (None if bridged is None else bridged.tolist()) == (None if expected is None else expected.token_ids)


@pytest.mark.parametrize("with_system", [True, False])
def test_the_cached_system_block_changes_nothing(qwen3: Tokenizer, with_system: bool) -> None:
    rendering = Rendering(qwen3, "qwen3", thinking_retention="all", arguments={})
    messages = [Message("user", "u"), Message("assistant", "a"), Message("user", "v")]
    if with_system:
        messages.insert(0, Message("system", "s"))
    expected = rendering._render(to_renderer(messages), [tool.schema() for tool in TOOLS])
    for _ in range(2):
        assert rendering.render(messages, TOOLS).tolist() == expected


def test_what_the_template_refuses_is_an_invalid_request(qwen3_path: TokenPath) -> None:
    with pytest.raises(InvalidRequest, match="refuses this conversation"):
        qwen3_path.render(ChatRequest("m", ()))


def test_an_unknown_renderer_is_refused_with_what_to_do(qwen3: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        TokenPath(qwen3, model="m", renderer="nonsense", mode="tokens")
    with pytest.raises(ConfigError, match="default"):
        TokenPath(qwen3, model="m", renderer="default", mode="tokens")


def test_the_renderer_is_told_by_name_or_by_template(qwen3: Tokenizer) -> None:
    assert TokenPath(qwen3, model="my-finetune", renderer=None, mode="tokens").renderer == "qwen3"
    assert TokenPath(qwen3, model="Qwen/Qwen3.5-9B", renderer=None, mode="tokens").renderer == "qwen3.5"


@pytest.fixture(scope="module")
def folded_and_not(qwen3: Tokenizer) -> tuple[Rendering, Rendering]:
    folding = Rendering(qwen3, "qwen3", thinking_retention="all", arguments={})
    assert isinstance(folding._tokenizer, FoldingTokenizer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "_FOLDABLE", frozenset())
        plain = Rendering(qwen3, "qwen3", thinking_retention="all", arguments={})
    assert not isinstance(plain._tokenizer, FoldingTokenizer)
    return folding, plain


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(max_size=60), min_size=1, max_size=4), st.lists(st.text(max_size=60), min_size=1, max_size=3), st.booleans())
def test_folding_texts_changes_no_id(
    qwen3: Tokenizer, folded_and_not: tuple[Rendering, Rendering], old: list[str], new: list[str], tools: bool
) -> None:
    folding, plain = folded_and_not
    call = ToolCall("c1", "bash", '{"command": "echo a rather long command line, with more than sixteen ids in it"}')
    turns: list[Message] = []
    for text in old:
        turns += [user(text), Message("assistant", text[::-1], tool_calls=(call,)), result(call, text * 9)]
    history = (system("You are " + "a coding agent. " * 9), *turns)
    chosen = TOOLS if tools else ()
    prompt = folding.render(history, chosen)
    assert prompt.tolist() == plain.render(history, chosen).tolist()
    sampled = np.array([*qwen3.encode(new[0]), folding.stop_token_ids[0]], np.int32)
    more = [message for text in new for message in (result(call, text * 5), user(text))]
    bridged, why = folding.bridge(prompt, sampled, more, chosen)
    other, _ = plain.bridge(prompt, sampled, more, chosen)
    assert bridged is not None, why
    assert other is not None
    assert bridged.tolist() == other.tolist()
    assert bridged.min() >= 0


def test_threads_do_not_see_each_others_folding(qwen3: Tokenizer) -> None:
    tokenizer = FoldingTokenizer(qwen3)
    long = "a text of more than sixteen tokens, as messages and the results of tools nearly always are, in each and every turn"
    with tokenizer.folding() as texts, ThreadPoolExecutor(1) as pool:
        assert pool.submit(tokenizer.encode, long).result() == qwen3.encode(long)
        assert tokenizer.encode("short") == qwen3.encode("short")
        assert tokenizer.encode(long) == [-1]
        assert unfolded([5, -1, 6], texts) == [5, *qwen3.encode(long), 6]
    assert tokenizer.encode(long) == qwen3.encode(long)
