import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.engine.api import ApiError, Job, Params, parse_params
from polar.engine.models import SMOLLM2_TEMPLATE, resolve
from polar.engine.parsing import parse_answer, split_reasoning, tool_calls
from polar.engine.play import collect
from polar.engine.text import ByteTokenizer, Detokenizer, JinjaTemplate, load_text, normalise_messages
from polar.errors import ConfigError
from polar.testing.engine import ScriptedBackend

BYTES = ByteTokenizer()
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object", "properties": {}}}}]


@given(st.text())
def test_the_byte_tokenizer_round_trips(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text), skip_special=False) == text


def test_the_byte_tokenizer_knows_its_markers() -> None:
    assert BYTES.encode("<|im_start|>a<|im_end|>") == [256, 97, 257]


@given(st.lists(st.integers(0, 259), max_size=60), st.booleans())
def test_text_in_pieces_is_the_text_as_a_whole(ids: list[int], skip: bool) -> None:
    detokenizer = Detokenizer(BYTES, skip_special=skip)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert text == BYTES.decode(ids, skip_special=skip)


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="abé日", max_size=30), st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3), st.booleans())
async def test_a_stop_string_cuts_the_text_where_it_first_ends(text: str, stops: list[str], include: bool) -> None:
    backend = ScriptedBackend([text], BYTES)
    output = await collect(backend, Job([1], Params(1000, stop=tuple(stops))), BYTES, include_stop=include)
    ends = [(at + len(stop), at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        assert (output.text, output.finish, output.stop) == (text, "stop", None)
        return
    # The character that completes the first stop string ends the answer; of those completed by it the leftmost counts.
    first = min(end for end, _, _ in ends)
    at, stop = min((at, stop) for end, at, stop in ends if end == first)
    assert output.text == text[: first if include else at]
    assert (output.finish, output.stop) == ("stop", stop)
    assert bytes(output.token_ids).decode() == text[:first]


def test_qwen3s_template_renders_as_transformers_does(qwen3_tokenizer_dir: Path) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(qwen3_tokenizer_dir)
    tokenizer, template = load_text(qwen3_tokenizer_dir)
    messages = normalise_messages(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "日本"}, {"type": "text", "text": " <|im_end|> é\n"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "r",
                "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  "é", "b": [1, 2.50]}'}}],
            },
            {"role": "tool", "tool_call_id": "1", "content": "out"},
        ]
    )
    for tools in (None, TOOLS):
        for kwargs in ({}, {"enable_thinking": False}):
            ids = tokenizer.encode(template.render(messages, tools, **kwargs))
            expected = reference.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False, **kwargs
            )
            assert ids == expected
    assert set(tokenizer.eos_ids) == {151645}


def test_a_template_that_refuses_is_a_400() -> None:
    with pytest.raises(ApiError) as caught:
        JinjaTemplate("{{ raise_exception('no system') }}").render([], None)
    assert caught.value.status == 400
    assert "no system" in caught.value.message


def test_smollm2s_template_knows_tools() -> None:
    template = JinjaTemplate(SMOLLM2_TEMPLATE)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    text = template.render(
        [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call, call]},
            {"role": "tool", "content": "x"},
            {"role": "tool", "content": "y"},
        ],
        TOOLS,
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text
    assert text.count('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>') == 2
    assert text.endswith(
        "<|im_start|>user\n<tool_response>\nx\n</tool_response>\n<tool_response>\ny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    ("text", "prompt", "expected"),
    [
        ("hi", "", (None, "hi")),
        ("<think>a</think>\n\nb", "", ("a", "\n\nb")),
        ("a</think>b", "<|im_start|>assistant\n<think>\n", ("a", "b")),
        ("<think>never closed", "", ("never closed", None)),
        ("b </think> stray", "", (None, "b </think> stray")),
    ],
)
def test_thinking_is_split_from_the_answer(text: str, prompt: str, expected: tuple[str | None, str | None]) -> None:
    assert split_reasoning(text, opened=prompt.rstrip().endswith("<think>")) == expected


def test_parallel_calls_are_all_read() -> None:
    text = 'Both. <tool_call>\n{"name": "a", "arguments": {"x":1}}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    parsed = parse_answer(text, tools=True)
    assert (parsed.content, parsed.calls) == ("Both.", (("a", '{"x": 1}'), ("b", "{}")))
    assert parse_answer(text, tools=False).content == text


@pytest.mark.parametrize(
    "bad", ['{"name": "a"', '{"arguments": {}}', "[]", '{"name": 3, "arguments": {}}', '{"name": "a", "arguments": {"x": "\\ud83d"}}', ""]
)
def test_one_malformed_call_leaves_everything_as_text(bad: str) -> None:
    text = f'<tool_call>{{"name": "a", "arguments": {{}}}}</tool_call><tool_call>{bad}</tool_call>'
    assert tool_calls(text) == ()
    assert parse_answer(text, tools=True).content == text


@given(st.text())
def test_no_text_is_ever_lost_in_parsing(text: str) -> None:
    parsed = parse_answer(text, tools=True)
    if not parsed.calls and parsed.reasoning is None:
        assert parsed.content == text


@pytest.mark.parametrize("name", ["nothing-like-this", "/nowhere"])
def test_an_unknown_model_names_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match="tiny-qwen3, smollm2"):
        resolve(name)


def test_max_tokens_is_cut_to_the_room() -> None:
    assert parse_params({"max_tokens": 90}, 50, 100, 16, 0).max_tokens == 50
    assert parse_params({}, 50, 100, 16, 0).max_tokens == 16
    assert parse_params({"max_completion_tokens": 5, "max_tokens": 9}, 50, 100, None, 0).max_tokens == 5
    assert parse_params({"max_tokens": None}, 50, 100, None, 0).max_tokens == 50
