"""Data and models for supervised runs: rows that have something to learn in them, and a Qwen3 of a few thousand random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiny_qwen3 import tiny_qwen3

from polar.engine.models import resolve
from polar.tokens.tokenizer import load_tokenizer
from polar.train.sft_config import SftConfig

BUNDLED = resolve("tiny-qwen3")
VOCABULARY = 4096


def model(folder: Path, seed: int = 0) -> Path:
    """A random Qwen3 with the bundled model's tokenizer and template."""
    tiny_qwen3(VOCABULARY, seed, max_position_embeddings=256).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((BUNDLED / name).read_bytes())
    return folder


def tokens(number: int, length: int = 20) -> dict[str, Any]:
    """A row of the form `tokens`: after three ids of context, the same eight ids over and over."""
    ids = [50 + number % 7, 60, 61] + [100 + place % 8 for place in range(length - 3)]
    return {"input_ids": ids, "attention_mask": [1] * length, "labels": [-100] * 3 + ids[3:]}


def exported(folder: Path, splits: Mapping[str, Sequence[dict[str, Any]]], models: Sequence[dict[str, Any]] | None = None) -> Path:
    """A folder as `polar export --format jsonl` leaves it; with the bundled tokenizer's hashes where `models` says nothing."""
    (folder / "data").mkdir(parents=True)
    for split, rows in splits.items():
        (folder / "data" / f"{split}-00000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(BUNDLED)
    ours = {"model": "tiny", "tokenizer_hash": tokenizer.hash, "template_hash": tokenizer.template_hash}
    (folder / "manifest.json").write_text(json.dumps({"models": [ours] if models is None else list(models)}))
    return folder


def config(tmp_path: Path, **changes: Any) -> SftConfig:
    """Three epochs of twelve rows in steps of about four."""
    if not (tmp_path / "model").exists():
        model(tmp_path / "model")
        exported(tmp_path / "data", {"train": [tokens(i, 16 + i % 5) for i in range(12)], "validation": [tokens(i, 18) for i in range(3)]})
    given = {
        "model": str(tmp_path / "model"),
        "data": str(tmp_path / "data"),
        "output": str(tmp_path / "out"),
        "epochs": 3,
        "batch_tokens": 80,
        "token_budget": 60,
        "lr": 1e-2,
        **changes,
    }
    return SftConfig.model_validate(given)
