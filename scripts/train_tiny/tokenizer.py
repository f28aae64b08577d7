"""Makes the tiny model's tokenizer: Qwen3's normaliser, pre-tokeniser, added tokens and chat template over a small vocabulary of its own.

The merges are learned from the harness prompts that the model will read and from dialogues over the task words, so that prompts
are short and every task word is one token. Needs Qwen3's own `tokenizer.json` and `tokenizer_config.json` as the model for all else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.trainers import BpeTrainer

CONTEXT = 32_768


def train_tokenizer(qwen3: Path, corpus: Iterable[str], vocabulary: int) -> Tokenizer:
    """`vocabulary` counts the added tokens too. The result is deterministic in its inputs."""
    source = json.loads((qwen3 / "tokenizer.json").read_text())
    empty = {**source, "added_tokens": [], "model": {**source["model"], "vocab": {}, "merges": []}}
    tokenizer = Tokenizer.from_str(json.dumps(empty))
    added = source["added_tokens"]
    trainer = BpeTrainer(
        vocab_size=vocabulary - len(added),
        min_frequency=1,
        show_progress=False,
        special_tokens=[],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    for token in added:
        flags = {name: token[name] for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
        tokenizer.add_tokens([AddedToken(token["content"], **flags)])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, qwen3: Path, target: Path) -> None:
    """Writes `tokenizer.json` and a `tokenizer_config.json` that differs from Qwen3's in ids and context only."""
    target.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(target / "tokenizer.json"))
    config = json.loads((qwen3 / "tokenizer_config.json").read_text())
    flags = {token["content"]: token for token in config["added_tokens_decoder"].values()}
    config["added_tokens_decoder"] = {
        str(index): flags[token.content] for index, token in sorted(tokenizer.get_added_tokens_decoder().items()) if token.content in flags
    }
    config["model_max_length"] = CONTEXT
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
