"""What a run came to: its summary from what it left on disk, and the tables and the page that are made of it."""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from polar.demo import learn
from polar.demo.learn import Learned, Size
from polar.demo.report import Summary, facts, plot, show, summarise
from polar.rollout.models import SessionResult
from polar.train.evaluation import Outcome

SCRIPTS = Path(__file__).parents[2] / "scripts"


def session(harness: str, task: int, reward: float | None, said: str) -> SessionResult:
    return SessionResult.model_validate(
        {
            "session_id": f"{harness}-{task}",
            "task_id": f"t{task}",
            "status": "COMPLETED",
            "outcome": "infrastructure" if reward is None else "graded",
            "reward": reward,
            "metadata": {"task": f"t{task}", "harness": harness, "family": "copy" if task % 2 else "edit"},
            "trajectory": {"traces": [{"prompt_messages": [], "response_messages": [{"role": "tool", "content": said}]}]},
        }
    )


def outcome(step: int, codex: Sequence[float | None], pi: Sequence[float | None]) -> Outcome:
    results = {
        name: [session(name, task, reward, "unsupported call: write") for task, reward in enumerate(rewards)]
        for name, rewards in (("codex", codex), ("pi", pi))
    }
    return Outcome(step, results)


STEPS = [
    {"step": 1, "sessions": 16, "reward/codex": 0.2, "gate/mean": 1e-6, "gate/largest": 3e-6, "gate/tokens": 90, "step/mismatch": -1e-9},
    {"step": 2, "sessions": 16, "reward/codex": 0.6, "gate/mean": 2e-6, "gate/largest": 2e-6, "gate/tokens": 90, "step/mismatch": 1e-9},
]
TOKENS = {"tokens/sampled": 100, "tokens/in_rows": 90, "tokens/stepped": 60, "tokens/stale": 10, "tokens/dropped/zero_variance": 20}
STEPS = [{**values, **TOKENS, "tokens/ledger/title": 10} for values in STEPS]


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    config = learn.settings(tmp_path, Size(steps=2))
    before = outcome(0, [0, 0, 0, 1, 0, 0, 0, None], [1] * 8)
    after = outcome(2, [1, 1, 0, 1, 1, 0, 1, 1], [1] * 7 + [0])
    return summarise(Learned(config, tmp_path, before, after, STEPS), seconds=12.0)


def test_a_change_is_paired_by_task_and_what_the_infrastructure_failed_is_left_out(summary: Summary) -> None:
    codex = summary.sides["codex"]
    assert codex.before.mean == pytest.approx(1 / 7)
    assert codex.after.mean == pytest.approx(6 / 8)
    assert codex.change.mean == pytest.approx(4 / 7)
    assert codex.lost == 1
    assert codex.kinds_before == {"passed": 1, "wrong tool": 6, "wrong arguments": 0, "no tool call": 0, "wrong result": 0, "no outcome": 1}
    assert codex.families_after == {"copy": (3, 4), "edit": (3, 4)}


def test_tokens_are_conserved_and_the_gates_largest_is_kept(summary: Summary) -> None:
    tokens = summary.tokens
    assert tokens == {"sampled": 200, "in_rows": 180, "stepped": 120, "stale": 20, "dropped": 40, "ledger": 20}
    assert tokens["sampled"] == tokens["in_rows"] + tokens["ledger"]
    assert tokens["in_rows"] == tokens["stepped"] + tokens["stale"] + tokens["dropped"]
    assert (summary.gate_mean, summary.gate_largest) == (2e-6, 3e-6)
    assert summary.sessions == 32
    assert "200 sampled = 180 in rows + 20 in the ledger" in "\n".join(facts(summary))


def test_everything_is_shown(summary: Summary) -> None:
    console = Console(width=140, record=True, file=io.StringIO())
    show(console, summary)
    text = console.export_text()
    for wanted in ("Codex", "Pi", "+57 [", "wrong tool", "copy", "2 steps", "ledger"):
        assert wanted in text, wanted


def test_the_plot_tells_a_control(summary: Summary, tmp_path: Path) -> None:
    assert "control" not in plot(summary)
    config = learn.settings(tmp_path, Size(steps=2), shuffled=True)
    assert "control: shuffled rewards" in plot(summarise(Learned(config, tmp_path, outcome(0, [0], [1]), outcome(2, [0], [1]), STEPS)))


def test_without_evaluations_there_are_no_sides(tmp_path: Path) -> None:
    config = learn.settings(tmp_path, learn.QUICK)
    found = summarise(Learned(config, tmp_path, None, None, STEPS))
    assert found.sides == {}
    console = Console(width=140, record=True, file=io.StringIO())
    show(console, found)
    assert "32 training sessions" in console.export_text()


def test_the_runs_tasks_are_those_of_its_seed_and_never_on_both_sides(tmp_path: Path) -> None:
    configs = [learn.settings(tmp_path / str(seed), Size(evaluated=21, trained_tasks=21), seed=seed) for seed in (0, 1)]
    names = []
    for config in configs:
        assert config.tasks is not None
        assert config.tasks.held_out is not None
        train, held_out = (
            {json.loads(one)["id"] for one in Path(path).read_text().splitlines()} for path in (config.tasks.train, config.tasks.held_out)
        )
        assert len(train) == len(held_out) == 21
        assert not train & held_out
        names.append(train)
    assert names[0] != names[1]


def test_numbers_of_one_step_are_joined_and_steps_without_training_left_out(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "eval/pi/pass@1": 1.0}, {"step": 1, "tokens/sampled": 5}, {"step": 1, "time/sync_s": 2.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert learn.steps_of(tmp_path / "metrics.jsonl") == [{"step": 1, "tokens/sampled": 5, "time/sync_s": 2.0}]


@pytest.fixture
def results() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield importlib.import_module("demo_results")
    sys.modules.pop("demo_results", None)


def test_the_page_is_made_of_the_summaries_and_what_stands_around_it_is_left(summary: Summary, results: ModuleType) -> None:
    kept = json.loads(json.dumps(summary.to_json()))
    part = results.page([(results.Run(0, False), kept), (results.Run(0, True), kept)])
    assert "| 0 | Codex | 14.3%" in part
    assert "| 0, shuffled rewards | Pi |" in part
    assert "6 → 2" in part
    once = results.written("# Results\n\nAbove.\n", part)
    assert once.startswith("# Results\n\nAbove.\n\n<!-- polar demo: begin -->")
    again = results.written(once + "\n## Below\n", part)
    assert again.count("<!-- polar demo: begin -->") == 1
    assert again.endswith("## Below\n")
