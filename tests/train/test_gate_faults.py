"""The gate before rows of real sessions: a real engine sampled them through a real gateway, and one thing is wrong at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_rig import Rig, changed_model, gate, rig

from polar.engine.models import known_models
from polar.engines.vllm import VllmEngine
from polar.errors import NotTrainable
from polar.tokens.tokenizer import load_tokenizer
from polar.train.gate import Facts
from polar.train.policy import Policy
from polar.train.sync import Syncer
from polar.trajectory import Trace


@pytest.fixture(scope="module")
def base() -> Path:
    """The bundled model, whose prompts are the gateway's own (mode `tokens`)."""
    return known_models()["tiny-qwen3"]()


@pytest.fixture(scope="module")
def policy(base: Path) -> Policy:
    return Policy.load(str(base))


def facts(folder: Path, version: int | None = None) -> Facts:
    """The trainer's own, of the model that it trains."""
    tokenizer = load_tokenizer(folder)
    return Facts(None if version is None else str(version), tokenizer.hash, tokenizer.template_hash)


def opened(folder: Path, model: Path, **more: Any) -> AbstractAsyncContextManager[Rig]:
    engine = {"mode": "tokens", "renderer": "qwen3", **more.pop("engine", {})}
    return rig(folder, model, engine=engine, **more)


async def sessions(one: Rig) -> tuple[list[Trace], list[dict[str, Any]]]:
    """Rows of three sessions, and what the gateway says of each row's engine."""
    rows = [row for _ in range(3) for row in await one.rows(await one.conversation())]
    assert sum(int(row.mask.sum()) for row in rows) > 100
    return rows, [one.gateway.default.provenance] * len(rows)


async def test_rows_of_the_very_policy_pass(base: Path, policy: Policy, tmp_path: Path) -> None:
    async with opened(tmp_path, base) as one:
        await Syncer([one.control])(base, 3)
        rows, provenance = await sessions(one)
        report = gate(policy, rows, facts(base, 3), provenance)
        report.check()
        assert report.whole.largest < 1e-3
        assert {"harness pi", "turn 0", "turn 1", "turn 2"} <= set(report.by)


async def test_weights_that_nobody_told_of(base: Path, policy: Policy, tmp_path: Path) -> None:
    other = changed_model(base, tmp_path / "other")
    async with opened(tmp_path, base) as one:
        syncer = Syncer([one.control])
        await syncer(base, 1)
        engine = VllmEngine(one.urls[0])
        await engine.update_weights(str(other), "1")
        await engine.aclose()
        rows, provenance = await sessions(one)
        report = gate(policy, rows, facts(base, 1), provenance)
        assert [name for name, _ in report.suspects] == ["weights"]
        with pytest.raises(NotTrainable, match="the engine's weights are not the trainer's"):
            report.check()
        await syncer(base, 2)
        rows, provenance = await sessions(one)
        assert gate(policy, rows, facts(base, 2), provenance).open


async def test_a_stale_policy(base: Path, policy: Policy, tmp_path: Path) -> None:
    async with opened(tmp_path, base) as one:
        await Syncer([one.control])(base, 4)
        rows, provenance = await sessions(one)
        report = gate(policy, rows, facts(base, 6), provenance)
        assert report.suspects[0] == ("stale_policy", "rows were sampled by policy version 4, and the trainer is at 6")


async def test_another_temperature(base: Path, policy: Policy, tmp_path: Path) -> None:
    async with opened(tmp_path, base, train_sampling={"temperature": 0.6}) as one:
        rows, provenance = await sessions(one)
        report = gate(policy, rows, facts(base), provenance)
        assert report.differs
        assert report.suspects[0] == ("temperature", "rows were sampled at 0.6, the trainer computes for 1")
        cooler = Policy(policy.model, temperature=0.6)
        gate(cooler, rows, replace(facts(base), temperature=0.6), provenance).check()


async def test_another_chat_template(base: Path, policy: Policy, tmp_path: Path) -> None:
    """The gateway renders by its own copy of the tokenizer, whose template says something else."""
    copy = tmp_path / "tokenizer"
    copy.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (base / name).is_file():
            shutil.copy(base / name, copy / name)
    template = load_tokenizer(base).chat_template
    assert template is not None
    (copy / "chat_template.jinja").write_text("{# house style #}" + template)
    config = json.loads((copy / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (copy / "tokenizer_config.json").write_text(json.dumps(config))
    async with opened(tmp_path, base, engine={"tokenizer": str(copy)}) as one:
        rows, provenance = await sessions(one)
        report = gate(policy, rows, facts(base), provenance)
        assert not report.open
        assert [name for name, _ in report.suspects] == ["chat_template"]


async def test_prompts_rendered_anew_by_another_template(base: Path, policy: Policy, tmp_path: Path) -> None:
    """Rows as a trainer would make them that renders the conversation itself, with a template that adds a system message."""
    async with opened(tmp_path, base) as one:
        rows, provenance = await sessions(one)
    added = np.array(load_tokenizer(base).encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"), np.int32)
    report = gate(policy, [_shifted(row, added) for row in rows], facts(base), provenance)
    assert not report.open
    assert report.suspects[0][0] == "weights"  # the numbers differ, and nothing that the rows say of themselves


async def test_another_tokenizer(base: Path, policy: Policy, tmp_path: Path) -> None:
    """Gateway and engine read and write by a vocabulary in which two words have changed places: the ids agree, what they mean does not."""
    other = tmp_path / "other"
    shutil.copytree(base, other)
    vocabulary = json.loads((other / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    first, second = [word for word in words if word.isalpha() and len(word) == 1][:2]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    async with opened(tmp_path, other) as one:
        rows, provenance = await sessions(one)
        report = gate(policy, rows, facts(base), provenance)
        assert not report.open
        assert [name for name, _ in report.suspects] == ["tokenizer"]


@pytest.mark.parametrize("places", [-1, 1])
async def test_log_probabilities_of_the_neighbouring_ids(places: int, base: Path, policy: Policy, tmp_path: Path) -> None:
    async with opened(tmp_path, base) as one:
        rows, provenance = await sessions(one)
    rolled = []
    for row in rows:
        logprobs = row.logprobs.copy()
        for span in row.spans:
            logprobs[span.start : span.end] = np.roll(row.logprobs[span.start : span.end], places)
        rolled.append(replace(row, logprobs=logprobs))
    report = gate(policy, rolled, facts(base), provenance)
    assert report.suspects[0][0] == "shifted"


async def test_a_row_whose_first_id_was_lost(base: Path, policy: Policy, tmp_path: Path) -> None:
    """Mask and log-probabilities stand where they stood, and every id one place before."""
    async with opened(tmp_path, base) as one:
        rows, provenance = await sessions(one)
    lost = [replace(row, ids=np.append(row.ids[1:], row.ids[-1])) for row in rows]
    report = gate(policy, lost, facts(base), provenance)
    assert report.suspects[0][0] == "shifted"


def _shifted(row: Trace, added: Sequence[int] | np.ndarray) -> Trace:
    """The row with other ids before its first."""
    by = len(added)
    return replace(
        row,
        ids=np.concatenate([np.asarray(added, np.int32), row.ids]),
        mask=np.concatenate([np.zeros(by, np.bool_), row.mask]),
        logprobs=np.concatenate([np.zeros(by, np.float32), row.logprobs]),
        spans=tuple(replace(span, start=span.start + by, end=span.end + by) for span in row.spans),
    )
