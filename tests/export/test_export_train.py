"""What trainers read: `datasets` loads an export with the same types from both formats, and TRL takes a step on it."""

from __future__ import annotations

import asyncio
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from export_samples import Write, solved
from rich.console import Console
from typer.testing import CliRunner

from polar.cli.commands import app
from polar.export.columns import schema
from polar.records import Completion
from polar.store import open_store
from polar.tokens.tokenizer import load_tokenizer

MODEL = Path(__file__).parents[2] / "src" / "polar" / "assets" / "tiny-qwen3"
IGNORE = -100


def load(folder: Path, cache: Path) -> Any:
    import datasets

    return datasets.load_dataset(str(folder), cache_dir=str(cache))


@pytest.mark.parametrize("form", ["chat", "tokens", "rl"])
async def test_datasets_loads_both_formats_alike(write: Write, tmp_path: Path, form: str) -> None:
    import datasets

    talks = [solved(f"s{i}", created=i, repository=f"r{i}", reward=1.0, turns=1 + i) for i in range(4)]
    talks[0].completions[0].tools = ()
    options = {"form": form, "splits": {"test": 0.25}}
    _, parquet = await write(talks, file_format="parquet", **options)
    _, jsonl = await write(talks, **options)
    table = load(parquet, tmp_path / "cache")
    assert {name: split.num_rows for name, split in table.items()} == {"train": 3, "test": 1}
    assert table["train"].features == datasets.Features.from_arrow_schema(schema(form))  # type: ignore[arg-type]
    lines = load(jsonl, tmp_path / "cache")
    if form == "rl":  # lines in the reference system's form
        assert [list(row["prompt_ids"]) for row in lines["train"]] == [row["prompt_ids"] for row in table["train"]]
    else:
        assert lines["train"].features == table["train"].features
        assert lines["train"].to_list() == table["train"].to_list()


# --- the demo's sessions, as acceptance wants it ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo tasks, exported for SFT in both forms, without a threshold: the tiny model may fail all."""
    from polar.demo.capture import capture

    folder = tmp_path_factory.mktemp("demo")
    assert capture(Console(), 4, folder, 3, "polar") == 0
    for form in ("chat", "tokens"):
        common = ["--store", str(folder / "polar.db"), "--rewards", str(folder / "rewards.jsonl"), "--keep-duplicates"]
        result = CliRunner().invoke(app, ["export", str(folder / form), "--as", form, *common])
        assert result.exit_code == 0, result.output
    return folder


def answers(folder: Path) -> list[Completion]:
    async def read() -> list[Completion]:
        store = open_store(folder / "polar.db")
        try:
            sessions = await store.sessions()
            return [completion for session in sessions async for completion in store.completions(session.id)]
        finally:
            await store.aclose()

    return asyncio.run(read())


def trained_texts(row: dict[str, Any]) -> list[str]:
    """The decoded runs of trained labels."""
    tokenizer = load_tokenizer(MODEL)
    runs = groupby(row["labels"], lambda label: label != IGNORE)
    return [tokenizer.decode(list(run)) for trained, run in runs if trained]


@pytest.mark.real
def test_masks_decode_to_the_assistants_own_tokens_and_nothing_else(demo: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(MODEL)
    rows = load(demo / "tokens", tmp_path)["train"]
    completions = answers(demo)
    found = sorted(text for row in rows for text in trained_texts(row))
    assert found == sorted(tokenizer.decode(completion.sampled_ids) for completion in completions)
    manifest = json.loads((demo / "tokens" / "manifest.json").read_text())
    assert manifest["tokens"]["exported"] == sum(len(completion.sampled_ids) for completion in completions)


@pytest.mark.real
def test_weights_mark_the_assistants_own_messages_and_nothing_else(demo: Path, tmp_path: Path) -> None:
    rows = load(demo / "chat", tmp_path)["train"]
    weighted = [message for row in rows for message in row["messages"] if message["weight"]]
    assert {message["role"] for message in weighted} == {"assistant"}
    said = sorted((message["content"] or "") for message in weighted)
    assert said == sorted(completion.answer.text for completion in answers(demo))
    assert all(json.loads(row["tools"])[0]["type"] == "function" for row in rows)


@pytest.mark.real
@pytest.mark.parametrize("form", ["tokens", "chat"])
def test_trl_takes_a_step(demo: Path, tmp_path: Path, form: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    from trl.chat_template_utils import qwen3_chat_template

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    if form == "chat":
        tokenizer.chat_template = qwen3_chat_template  # one that TRL can mask: it knows where answers begin and end in it
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(tmp_path / "trl"),
            max_steps=1,
            max_length=4096,
            per_device_train_batch_size=1,
            assistant_only_loss=form == "chat",
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=load(demo / form, tmp_path)["train"],
        processing_class=tokenizer,
    )
    sampled = [load_tokenizer(MODEL).decode(completion.sampled_ids) for completion in answers(demo)]
    after_turn = "\n" if form == "chat" else ""  # which TRL's template for Qwen3 trains, too
    assert sorted(text for row in trainer.train_dataset for text in trained_texts(row)) == sorted(text + after_turn for text in sampled)
    result = trainer.train()
    assert result.global_step == 1
    assert 0 < result.training_loss < 20
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
