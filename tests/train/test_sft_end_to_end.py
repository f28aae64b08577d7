"""Capture, export, SFT: sessions of the bundled model behind a real gateway lower its loss on its own answers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from sft_samples import BUNDLED, VOCABULARY
from typer.testing import CliRunner

from polar.cli.commands import app
from polar.engine.child import running_engine
from polar.export.facts import label_line
from polar.gateway.config import EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import serving
from polar.tokens.tokenizer import load_tokenizer
from polar.train.metrics import read_metrics
from polar.train.sft_data import read_rows

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
SESSIONS = 4
EPOCHS = 10


async def session(gateway: Gateway, client: aiohttp.ClientSession, number: int) -> str:
    """Three turns, with tool results where the model calls a tool."""
    record, key = await gateway.sessions.create(metadata={"task": f"task-{number % 2}", "harness": "test"})
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are an agent with a shell."},
        {"role": "user", "content": f"List the files of folder {number}."},
    ]
    for _ in range(3):
        body = {"model": "tiny-qwen3", "messages": messages, "tools": TOOLS, "max_tokens": 48, "seed": number}
        async with client.post(f"{gateway.base_url(key)}/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            message = (await answer.json())["choices"][0]["message"]
        messages.append(message)
        calls = message.get("tool_calls") or []
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "a.py\nb.py"} for call in calls]
        if not calls:
            messages.append({"role": "user", "content": "Go on."})
    await gateway.sessions.close(record.id)
    return str(record.id)


async def captured(folder: Path) -> None:
    """Sessions of the bundled model in `folder/polar.db`, all rewarded."""
    async with running_engine("tiny-qwen3", folder) as url:
        config = GatewayConfig(
            engines={"default": EngineConfig(urls=[url], mode="tokens", renderer="qwen3")},
            port=0,
            admin_port=0,
            store=str(folder / "polar.db"),
        )
        async with serving(Gateway(config), progress=lambda line: None) as gateway, aiohttp.ClientSession() as client:
            names = await asyncio.gather(*(session(gateway, client, number) for number in range(SESSIONS)))
    (folder / "rewards.jsonl").write_bytes(b"".join(label_line(name, reward=1.0) for name in names))


@pytest.mark.real
@pytest.mark.parametrize("form", ["tokens", "rl", "chat"])
def test_a_models_own_sessions_become_likelier(tmp_path: Path, form: str) -> None:
    asyncio.run(captured(tmp_path))
    common = ["--store", str(tmp_path / "polar.db"), "--rewards", str(tmp_path / "rewards.jsonl"), "--keep-duplicates"]
    for one in {form, "tokens"}:
        result = CliRunner().invoke(app, ["export", str(tmp_path / one), "--as", one, *common])
        assert result.exit_code == 0, result.output
    manifest = json.loads((tmp_path / form / "manifest.json").read_text())
    tokenizer = load_tokenizer(BUNDLED)
    assert [model["tokenizer_hash"] for model in manifest["models"]] == [tokenizer.hash]
    rows = {one: read_rows(tmp_path / one, "train", tokenizer, vocabulary=VOCABULARY, max_tokens=10_000) for one in {form, "tokens"}}
    assert rows["tokens"].trained == manifest["tokens"]["exported"]
    pairs = list(zip(rows[form].samples, rows["tokens"].samples, strict=True))
    equal = [np.array_equal(ours.ids, theirs.ids) and np.array_equal(ours.mask, theirs.mask) for ours, theirs in pairs]
    assert all(equal) or form == "chat"
    flags = ["--epochs", str(EPOCHS), "--lr", "5e-4", "--batch-tokens", "4000", "--schedule", "constant"]
    result = CliRunner().invoke(app, ["sft", "tiny-qwen3", str(tmp_path / form), "-o", str(tmp_path / "out"), *flags])
    assert result.exit_code == 0, result.output
    losses = [line["loss"] for line in read_metrics(tmp_path / "out") if "loss" in line]
    epochs = np.array(losses, dtype=float).reshape(EPOCHS, -1).mean(axis=1)  # batches differ too much to be compared one by one
    assert epochs[-1] < 0.8 * epochs[0], epochs


@pytest.mark.real
def test_conversations_are_rendered_as_the_gateway_rendered_them(tmp_path: Path) -> None:
    """Down to the last character of every prompt and answer, thinking of earlier turns included."""
    asyncio.run(captured(tmp_path))
    tokenizer = load_tokenizer(BUNDLED)
    found = {}
    for form in ("chat", "tokens"):
        common = ["--store", str(tmp_path / "polar.db"), "--rewards", str(tmp_path / "rewards.jsonl"), "--keep-duplicates"]
        assert CliRunner().invoke(app, ["export", str(tmp_path / form), "--as", form, *common]).exit_code == 0
        found[form] = read_rows(tmp_path / form, "train", tokenizer, vocabulary=VOCABULARY, max_tokens=10_000).samples
    for ours, theirs in zip(found["chat"], found["tokens"], strict=True):
        assert tokenizer.decode(ours.ids[ours.mask]) == tokenizer.decode(theirs.ids[theirs.mask])
        assert tokenizer.decode(ours.ids) == tokenizer.decode(theirs.ids)
