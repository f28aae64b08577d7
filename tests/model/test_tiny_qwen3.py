"""The bundled tiny model: its size, its tokenizer and template, and that it is what it says it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from renderers import Qwen3RendererConfig
from renderers.qwen3 import Qwen3Renderer

import polar
from polar.tasks.files import SUFFIXES, WORDS
from polar.tokens.tokenizer import load_tokenizer

ASSET = Path(polar.__file__).parent / "assets" / "tiny-qwen3"
MEGABYTE = 1_000_000
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}, with “quotes” & <marks>",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read", "write")
]


@pytest.fixture(scope="module")
def jinja() -> Any:
    """The tokenizer as transformers loads it, with the template as Jinja."""
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(ASSET)


@pytest.fixture(scope="module")
def model() -> Any:
    return pytest.importorskip("transformers").Qwen3ForCausalLM.from_pretrained(ASSET, dtype="float32").eval()


def test_it_is_a_few_megabytes() -> None:
    sizes = {path.name: path.stat().st_size for path in ASSET.iterdir()}
    assert sizes["model.safetensors"] < 5 * MEGABYTE
    assert sum(sizes.values()) < 6 * MEGABYTE


def test_config_says_untied_qwen3_with_room_for_long_prompts() -> None:
    config = json.loads((ASSET / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] >= 16_384
    tokenizer = load_tokenizer(ASSET)
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_added_tokens_and_template_are_those_of_qwen3(qwen3_tokenizer_dir: Path) -> None:
    ours, theirs = load_tokenizer(ASSET), load_tokenizer(qwen3_tokenizer_dir)
    assert ours.chat_template == theirs.chat_template
    added = [json.loads((folder / "tokenizer.json").read_text())["added_tokens"] for folder in (ASSET, qwen3_tokenizer_dir)]
    mine, real = ([{key: value for key, value in token.items() if key != "id"} for token in tokens] for tokens in added)
    assert mine == real


def test_its_pre_tokeniser_is_that_of_qwen3(qwen3_tokenizer_dir: Path) -> None:
    ours, theirs = (json.loads((folder / "tokenizer.json").read_text()) for folder in (ASSET, qwen3_tokenizer_dir))
    for part in ("normalizer", "decoder", "post_processor"):
        assert ours[part] == theirs[part], part
    assert ours["pre_tokenizer"]["pretokenizers"][0]["pattern"] == theirs["pre_tokenizer"]["pretokenizers"][0]["pattern"]


@pytest.mark.parametrize("form", ["{}", " {}"])
def test_every_task_word_is_one_token(form: str) -> None:
    tokenizer = load_tokenizer(ASSET)
    split = [word for word in WORDS if len(tokenizer.encode(form.format(word))) != 1]
    assert not split
    assert all(len(tokenizer.encode(f".{suffix}")) == 1 for suffix in SUFFIXES)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200))
def test_text_survives_encoding_and_decoding(text: str) -> None:
    import unicodedata

    tokenizer = load_tokenizer(ASSET)
    expected = unicodedata.normalize("NFC", text.encode("utf-8", "replace").decode())
    assert tokenizer.decode(tokenizer.encode(expected)) == expected


def test_the_renderer_renders_what_the_template_renders(jinja: Any) -> None:
    call = {"type": "function", "function": {"name": "write", "arguments": {"path": "a.txt", "content": 'x "y"\n\\ é'}}}
    messages = [
        {"role": "system", "content": "Be brief.\n\n<rules>\n- one\n</rules>"},
        {"role": "user", "content": 'Create the file "river.txt" with the text "stone fern".'},
        {"role": "assistant", "content": "", "reasoning_content": "Use write.", "tool_calls": [call]},
        {"role": "tool", "content": "Successfully wrote to a.txt"},
        {"role": "assistant", "content": "", "reasoning_content": "Again.", "tool_calls": [call, call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    render = Qwen3Renderer(load_tokenizer(ASSET), Qwen3RendererConfig(thinking_retention="all"))
    for end in (2, 4, 7):
        ours = render.render_ids(messages[:end], tools=TOOLS, add_generation_prompt=True)
        theirs = jinja.apply_chat_template(messages[:end], tools=TOOLS, add_generation_prompt=True, tokenize=False)
        assert load_tokenizer(ASSET).decode(ours) == theirs
        assert ours == jinja.encode(theirs, add_special_tokens=False)


def test_it_loads_and_gives_finite_probabilities(model: Any) -> None:
    import torch

    ids = torch.tensor([load_tokenizer(ASSET).encode("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")])
    with torch.inference_mode():
        logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], model.config.vocab_size)
    assert bool(torch.isfinite(logits).all())


def test_even_without_a_harness_prompt_it_opens_with_a_thought_and_a_tool_call(model: Any) -> None:
    import torch

    render = Qwen3Renderer(load_tokenizer(ASSET), Qwen3RendererConfig(thinking_retention="all"))
    messages = [{"role": "user", "content": 'Create the file "river.txt" with the text "stone fern".'}]
    ids = render.render_ids(messages, add_generation_prompt=True)
    sampled: list[int] = []
    with torch.inference_mode():
        while len(sampled) < 64 and (not sampled or sampled[-1] != model.config.eos_token_id):
            sampled.append(int(model(torch.tensor([ids + sampled])).logits[0, -1].argmax()))
    text = load_tokenizer(ASSET).decode(sampled)
    assert text.startswith("<think>\nUse write.\n</think>\n\n<tool_call>\n")
