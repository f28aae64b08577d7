"""Issue 2, acceptance 7, in short: memory stays flat, open sessions are small, a long session is small on disk. `bench/memory.py` has the
figures."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from polar.store import open_store
from polar.testing.gateway import scripted_gateway

BENCH = Path(__file__).parents[2] / "bench" / "memory.py"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("polar_bench_memory", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.real
async def test_memory_is_flat_over_many_calls(bench: ModuleType, tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with scripted_gateway(lambda call: "Fine.", tmp_path, tokenizer_dir=qwen3_tokenizer_dir, check=False, cache_mb=4) as gateway:
        points = await bench.flat(gateway, bench.Writer(1), 2_400, samples=12)
    assert bench.slope(points) < 4096  # bytes a call; one leaked prompt of 700 ids would be more
    assert points[-1][1] - points[len(points) // 2][1] < 16 * bench.MIB


@pytest.mark.real
async def test_an_open_session_is_small_and_many_answer_at_once(bench: ModuleType, tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    async with scripted_gateway(lambda call: "Fine.", tmp_path, tokenizer_dir=qwen3_tokenizer_dir, check=False, cache_mb=1) as gateway:
        grown, talks = await bench.open_sessions(gateway, bench.Writer(1), 160)
        own = grown - bench.held_by_client(talks) - bench.MIB
        await bench.all_at_once(gateway, talks)
    assert own / len(talks) < 64 * 1024
    assert all(talk.messages[-1]["role"] == "assistant" for talk in talks)


@pytest.mark.real
async def test_a_long_session_is_small_on_disk(bench: ModuleType, tmp_path: Path, qwen3_tokenizer_dir: Path) -> None:
    writer = bench.Writer(1)
    answers = iter([writer.text(bench.LONG_ANSWER) for _ in range(100)])
    await open_store(tmp_path / "polar.db").aclose()
    empty = bench.disk(tmp_path)
    async with scripted_gateway(lambda call: next(answers), tmp_path, tokenizer_dir=qwen3_tokenizer_dir, check=False) as gateway:
        talk = await bench.long_session(gateway, writer)
        engine_side = await bench.engine_json(gateway)
    stored = bench.disk(tmp_path) - empty
    assert talk.prompt_tokens > 50_000
    assert stored * 50 <= talk.json_bytes + engine_side
    assert stored * 25 <= talk.json_bytes
