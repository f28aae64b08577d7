"""The manifest says whose ids the rows are, so that a trainer can refuse those of another tokenizer."""

from __future__ import annotations

from export_samples import Write, solved

RENDERED = {"template_hash": "tt", "renderer": "qwen3", "thinking_retention": "all"}


async def test_the_manifest_names_the_models_of_the_rows(write: Write) -> None:
    talks = [solved(f"s{i}", created=i, reward=1.0) for i in range(3)]
    talks.append(solved("unrewarded", created=9))
    for talk, tokenizer in zip(talks, ["aa", "aa", None, "bb"], strict=True):
        for completion in talk.completions:
            if tokenizer is not None:
                completion.provenance = {
                    "tokenizer_hash": tokenizer,
                    "template_hash": "tt",
                    "renderer": "qwen3",
                    "thinking_retention": "all",
                }
    manifest, _ = await write(talks, form="tokens")
    assert manifest["models"] == [
        {"model": "words", "tokenizer_hash": "aa", **RENDERED, "sessions": 2},
        {"model": "words", "tokenizer_hash": None, "template_hash": None, "renderer": None, "thinking_retention": None, "sessions": 1},
    ]
