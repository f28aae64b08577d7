"""The whole loop with a real inference server: three steps, each sampled by the weights that the step before made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gateway_rig  # noqa: F401 - for the path to vllm_server
import pytest
import torch
from vllm_server import vllm  # type: ignore[import-not-found,unused-ignore]

from polar.engine import build
from polar.engine.models import known_models
from polar.engines.vllm import VllmEngine
from polar.rollout.models import SessionResult
from polar.testing import serve_app
from polar.train.config import TrainConfig
from polar.train.metrics import read_metrics
from polar.train.run import train
from polar.trajectory import Trajectory

torch.set_num_threads(1)
STEPS = 3
PROCESSED = ("--logprobs-mode", "processed_logprobs")

AGENT = """\
python3 - <<'END'
import json, os, urllib.request

messages = []
for text in (open(os.environ["POLAR_INSTRUCTION_FILE"]).read(), "And now?"):
    messages.append({"role": "user", "content": text})
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "max_tokens": 40}
    headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"] or "."
    messages.append({"role": "assistant", "content": said})
    with open("answer.txt", "a") as file:
        file.write(said)
END
"""
LENGTH = 'printf "0.%04d" "$(wc -c < answer.txt)" > "$VERIFIER_LOGS/reward.txt"'
"""Rewards that hardly ever agree."""


@contextmanager
def served(kind: str, model: Path, name: str) -> Iterator[str]:
    if kind == "vllm":
        with vllm(model, name, *PROCESSED, context=4096) as url:
            yield url
    else:
        with serve_app(build(str(model), served_name=name, device="cpu", max_sequences=8).app) as running:
            yield running.url


@pytest.mark.real
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["polar", "vllm"])
async def test_three_steps_with_weights_synced_and_every_row_of_the_right_version(kind: str, tmp_path: Path) -> None:
    model = known_models()["tiny-qwen3"]()
    tasks = [
        {"id": f"task-{number}", "instruction": f"Say something about the number {number}.", "evaluator": evaluator}
        for number, evaluator in enumerate([{"strategy": "command", "config": {"command": LENGTH, "in_place": True}}] * STEPS)
    ]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    with served(kind, model, "tiny-qwen3") as url:
        config = TrainConfig.model_validate(
            {
                "model": str(model),
                "tasks": str(tmp_path / "tasks.jsonl"),
                "harnesses": ["shell"],
                "engine": {"urls": [url], "mode": "tokens", "renderer": "qwen3"},
                "rollout": {"agents": {"shell": {"custom_shell": AGENT}}},
                "batch": {"groups": 1, "samples": 4},
                "steps": STEPS,
                "max_staleness": 0,
                "optimisation": {"lr": 1e-3},
                "gate": {"mean": 1e-3, "largest": 1e-2},
                "evaluation": {"before": False, "after": False},
                "output": str(tmp_path / "run"),
            }
        )
        summary = await asyncio.to_thread(train, config)
        engine = VllmEngine(url)
        assert await engine.weight_version() == str(STEPS)
        await engine.aclose()
    assert summary is not None
    assert (summary.ended, summary.steps, summary.policy_version) == ("done", STEPS, STEPS)

    metrics: dict[int, dict[str, Any]] = {int(line["step"] or 0): dict(line) for line in read_metrics(tmp_path / "run")}
    for step in range(1, STEPS + 1):
        assert metrics[step]["gate/open"] == 1
        assert metrics[step]["gate/tokens"] > 20
        assert metrics[step]["gate/largest"] < 1e-3
        assert metrics[step]["sync/paused_s"] > 0

    seen = 0
    for file in (tmp_path / "run").rglob("results/**/*.json"):
        result = SessionResult.model_validate_json(file.read_bytes())
        assert result.outcome == "graded", result.error
        assert result.trajectory is not None
        for trace in Trajectory.from_json(result.trajectory).traces:
            # group n was asked for when n steps had been made
            assert trace.policy_versions == (str(result.metadata["group"]),)
            seen += 1
    assert seen >= 4 * STEPS
