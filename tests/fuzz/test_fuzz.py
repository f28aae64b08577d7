"""Issue 2, acceptance 6: no 5xx of ours, no hang, no leak, and the same prompt for everything that says the same."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fuzz_anthropic import AnthropicWire
from fuzz_chat import ChatWire
from fuzz_google import GoogleWire
from fuzz_responses import ResponsesWire
from fuzz_run import Family, Field, Tally, fuzz_field, run_families
from fuzz_wire import Wire
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

WIRES: dict[str, Wire] = {wire.name: wire for wire in (AnthropicWire(), ChatWire(), ResponsesWire(), GoogleWire())}
SEED = 2
sizes = [pytest.param(400, id="400"), pytest.param(20_000, id="20000", marks=[pytest.mark.accept, pytest.mark.timeout(1800)])]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def world(runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory, qwen3_tokenizer_dir: Path) -> Iterator[Field]:
    manager = fuzz_field(tmp_path_factory.mktemp("fuzz"), qwen3_tokenizer_dir)
    yield runner.run(manager.__aenter__())
    runner.run(manager.__aexit__(None, None, None))


@pytest.mark.parametrize("mutations", sizes)
@pytest.mark.parametrize("name", WIRES)
def test_mutated_requests(name: str, mutations: int, runner: asyncio.Runner, world: Field, capsys: pytest.CaptureFixture[str]) -> None:
    tally = runner.run(run_families(world, WIRES[name], mutations=mutations, seed=SEED))
    with capsys.disabled():
        print(f"\n{name}: {tally}")
    assert tally.mutations >= mutations
    assert tally.harmless >= tally.mutations // 2
    assert tally.bridged > 0


@pytest.mark.parametrize("name", WIRES)
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False))
def test_a_family_found_by_hypothesis(name: str, rng: random.Random, runner: asyncio.Runner, world: Field) -> None:
    # references that never change: Hypothesis must be able to make the same requests again
    alone = replace(world, foreign=[f"{prefix}{digit * 26}" for prefix in ("msg_", "call_", "resp_", "enc_") for digit in "0af"])
    runner.run(Family(alone, WIRES[name], rng, Tally()).run(3))
