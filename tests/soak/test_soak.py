"""Everything at once: sessions of every kind while faults of every kind strike at the moments that a seed chose."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from soak_parts import may_mount
from soak_plan import CODES, EVERYWHERE, make
from soak_run import Report, carry_out

KINDS = tuple(CODES) if may_mount() else EVERYWHERE
SEED = int(os.environ.get("POLAR_SOAK_SEED", "1"))


async def soak(seed: int, sessions: int, faults: int, folder: Path, tokenizer_dir: Path, timeout_s: float) -> Report:
    plan = make(seed, sessions, faults=faults, kinds=KINDS)
    report = await carry_out(plan, folder, tokenizer_dir, timeout_s=timeout_s, say=print)
    print("\n".join(report.lines()))
    assert report.table == plan.table()
    return report


@pytest.mark.real
@pytest.mark.timeout(400)
async def test_24_sessions(tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    await soak(SEED, 24, 5, tmp_path, qwen3_tokenizer_dir, 300)


@pytest.mark.accept
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("again", range(2))
async def test_200_sessions_and_a_replay_of_the_seed(again: int, tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    await soak(SEED, 200, 2 * len(KINDS), tmp_path, qwen3_tokenizer_dir, 3000)
