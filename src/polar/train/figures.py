"""A step's numbers, by the names under which the metrics keep them. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from statistics import fmean, pstdev

from polar.train.batch import Batch
from polar.train.gate import Report
from polar.train.learner import StepReport


def step_values(batch: Batch, step: StepReport | None, gate: Report | None, policy_version: int) -> dict[str, float]:
    """`policy_version`: after the step. `step` of `None`: there was nothing to train."""
    values: dict[str, float] = {"policy_version": policy_version, **_rewards(batch), **_sessions(batch), **_tokens(batch)}
    if gate is not None:
        values |= gate_values(gate)
    if step is not None:
        values |= {f"step/{name}": float(value) for name, value in asdict(step).items() if name != "tokens"}
    return values


def gate_values(report: Report) -> dict[str, float]:
    """`gate/mean`, `gate/largest`, `gate/tokens`, and the means by harness and by turn."""
    values = {"gate/mean": report.whole.mean, "gate/largest": report.whole.largest, "gate/tokens": float(report.whole.tokens)}
    return values | {f"gate/{key}": part.mean for key, part in report.by.items()} | {"gate/open": float(report.open)}


def _rewards(batch: Batch) -> dict[str, float]:
    by_harness: dict[str, list[float]] = {}
    for group in batch.groups:
        for result in group.results:
            if result.usable and result.reward is not None:
                by_harness.setdefault(group.harness or "unknown", []).append(result.reward)
    everything = [reward for rewards in by_harness.values() for reward in rewards]
    if not everything:
        return {}
    values = {"reward/mean": fmean(everything), "reward/std": pstdev(everything)}
    return values | {f"reward/{harness}": fmean(rewards) for harness, rewards in by_harness.items()}


def _sessions(batch: Batch) -> dict[str, float]:
    results = batch.results
    outcomes = Counter(result.outcome or "unknown" for result in results)
    values: dict[str, float] = {f"sessions/{name}": count for name, count in sorted(outcomes.items())}
    values |= {"sessions": len(results), "groups": len(batch.groups), "groups/taught": batch.taught, "rows": len(batch.rows)}
    if results:
        values["sessions/turns"] = fmean(result.turns for result in results)
        values["sessions/retries"] = sum(result.attempt for result in results)
    return values


def _tokens(batch: Batch) -> dict[str, float]:
    counts = batch.counts
    values: dict[str, float] = {"tokens/sampled": counts.sampled, "tokens/in_rows": counts.in_rows, "tokens/stepped": counts.stepped}
    values |= {"tokens/stale": counts.stale, "tokens/rows": sum(len(row) for row in batch.rows)}
    values |= {f"tokens/dropped/{name}": tokens for name, tokens in sorted(counts.dropped.items())}
    values |= {f"tokens/ledger/{name}": tokens for name, tokens in sorted(counts.ledger.items())}
    if counts.stepped and batch.ages:
        values["staleness/mean"] = sum(age * tokens for age, tokens in batch.ages.items()) / sum(batch.ages.values())
        values["staleness/max"] = max(batch.ages)
    return values
