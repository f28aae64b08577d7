"""What a run of the demo came to: a summary that is kept as JSON, and the same for people. Starts nothing.

The summary is all that `docs/results.md` is made of: what is not in it is not claimed there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from polar.demo import kinds
from polar.demo.learn import AGREE, LEARNED, Learned
from polar.demo.plot import Curve, Point, bar, svg, text
from polar.harness import registered
from polar.train.evaluation import Outcome
from polar.train.passk import Estimate, difference


@dataclass(frozen=True, slots=True)
class Side:
    """One harness, before and after. `change`: paired by task. `lost`: sessions that the infrastructure failed, in no number."""

    before: Estimate
    after: Estimate
    change: Estimate
    lost: int
    kinds_before: Mapping[str, int]
    kinds_after: Mapping[str, int]
    families_before: Mapping[str, tuple[int, int]]
    families_after: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Summary:
    """`curve`: what the training sessions under the learned harness earned, by step. `tokens`: sampled = in_rows + ledger, in_rows =
    stepped + stale + dropped. `gate_mean`, `gate_largest`: the largest of all steps, in nats."""

    seed: int
    shuffled: bool
    steps: int
    sessions: int
    sides: Mapping[str, Side]
    curve: Sequence[float]
    tokens: Mapping[str, int]
    gate_mean: float
    gate_largest: float
    mismatch: float
    seconds: float = 0.0
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def summarise(learned: Learned, *, seconds: float = 0.0) -> Summary:
    """Raises `ValueError` where an evaluation has no session that counts."""
    sides = {}
    if learned.before is not None and learned.after is not None:
        sides = {name: _side(learned.before, learned.after, name) for name in learned.harnesses}
    steps = learned.steps
    return Summary(
        seed=learned.config.seed,
        shuffled=learned.config.shuffle_rewards,
        steps=len(steps),
        sessions=int(_total(steps, "sessions")),
        sides=sides,
        curve=[values[f"reward/{LEARNED}"] for values in steps if f"reward/{LEARNED}" in values],
        tokens=_tokens(steps),
        gate_mean=max((values["gate/mean"] for values in steps if values.get("gate/tokens")), default=0.0),
        gate_largest=max((values["gate/largest"] for values in steps if values.get("gate/tokens")), default=0.0),
        mismatch=max((abs(values.get("step/mismatch", 0.0)) for values in steps), default=0.0),
        seconds=seconds,
        versions={name: registered()[name].version for name in learned.harnesses},
    )


def _side(before: Outcome, after: Outcome, name: str) -> Side:
    first, second = before.estimate(name), after.estimate(name)
    if first is None or second is None:
        raise ValueError(f"no session of the evaluation under {name} has an outcome: there is nothing to compare")
    results = [side.results[name] for side in (before, after)]
    return Side(
        first,
        second,
        difference(before.passes(name), after.passes(name)),
        sum(not result.usable for side in results for result in side),
        {str(name): sessions for name, sessions in kinds.count(results[0]).items()},
        {str(name): sessions for name, sessions in kinds.count(results[1]).items()},
        *(kinds.by_family(side) for side in results),
    )


def _total(steps: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(values.get(name, 0.0) for values in steps)


def _tokens(steps: Sequence[Mapping[str, float]]) -> dict[str, int]:
    found = {name: int(_total(steps, f"tokens/{name}")) for name in ("sampled", "in_rows", "stepped", "stale")}
    for group in ("dropped", "ledger"):
        names = {key for values in steps for key in values if key.startswith(f"tokens/{group}/")}
        found[group] = int(sum(_total(steps, name) for name in names))
    return found


# --- for people --------------------------------------------------------------------------------------------------------


def curves(summary: Summary) -> list[Curve]:
    """Held-out pass@1 of each harness, and the training sessions: those of step n were sampled by the policy of step n - 1, or before."""
    found = [
        Curve(
            f"{_title(name)}, held out",
            [
                Point(0, side.before.mean, side.before.low, side.before.high),
                Point(summary.steps, side.after.mean, side.after.low, side.after.high),
            ],
        )
        for name, side in summary.sides.items()
    ]
    return [*found, Curve(f"{_title(LEARNED)}, training", [Point(step, share) for step, share in enumerate(summary.curve)], dashed=True)]


def plot(summary: Summary) -> str:
    """An SVG document."""
    control = " (control: shuffled rewards)" if summary.shuffled else ""
    return svg(f"polar demo, seed {summary.seed}{control}: pass@1", curves(summary), summary.steps)


def show(console: Console, summary: Summary) -> None:
    if summary.sides:
        console.print(_results(summary))
        console.print(_where(summary))
        console.print(_kinds(summary))
        for line in text(curves(summary), summary.steps):
            console.print(Text(line), soft_wrap=True)
        console.print()
    console.print(Text("\n".join(facts(summary))), soft_wrap=True)


def facts(summary: Summary) -> list[str]:
    """What holds of the run besides its result."""
    tokens = summary.tokens
    sampled, in_rows = f"{tokens['sampled']:,} sampled", f"{tokens['in_rows']:,} in rows"
    parts = f"{tokens['stepped']:,} trained + {tokens['stale']:,} stale + {tokens['dropped']:,} dropped (groups whose rewards agree)"
    return [
        f"{summary.sessions:,} training sessions in {summary.steps} step{'' if summary.steps == 1 else 's'}.",
        f"Tokens: {sampled} = {in_rows} + {tokens['ledger']:,} in the ledger; {in_rows} = {parts}.",
        f"Recorded log-probabilities against the trainer's own, before each step: at most {summary.gate_mean:.1e} apart on the mean and "
        f"{summary.gate_largest:.1e} at the 99.9th percentile (allowed: {AGREE:g}).",
    ]


def _results(summary: Summary) -> Table:
    tasks = next(iter(summary.sides.values())).before.tasks
    table = Table(title=f"pass@1 on {tasks} held-out tasks, with 95% intervals")
    table.add_column("harness", min_width=13)
    for name in ("before", "after", "change, points"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, side in summary.sides.items():
        style = "bold green" if side.change.low > 0 else "red" if side.change.high < 0 else ""
        role = "to be learned" if name == LEARNED else "known already"
        table.add_row(f"{_title(name)}\n[dim]{role}[/]", str(side.before), str(side.after), Text(_signed(side.change), style))
    return table


def _where(summary: Summary) -> Table:
    table = Table(title="By family of tasks: passed of sessions")
    table.add_column("family")
    for name in summary.sides:
        table.add_column(f"{_title(name)}, before", justify="right")
        table.add_column("after", justify="right")
        table.add_column("", min_width=8)
    families = sorted({family for side in summary.sides.values() for family in (*side.families_before, *side.families_after)})
    for family in families:
        cells: list[str] = []
        for side in summary.sides.values():
            before, after = side.families_before.get(family, (0, 0)), side.families_after.get(family, (0, 0))
            cells += [f"{before[0]}/{before[1]}", f"{after[0]}/{after[1]}", bar(after[0] / max(1, after[1]), 8)]
        table.add_row(family, *cells)
    return table


def _kinds(summary: Summary) -> Table:
    table = Table(title="What became of the sessions")
    table.add_column("", no_wrap=True)
    for name in summary.sides:
        table.add_column(f"{_title(name)}, before", justify="right")
        table.add_column("after", justify="right")
    for name in kinds.KINDS:
        cells = [str(side.get(name, 0)) for one in summary.sides.values() for side in (one.kinds_before, one.kinds_after)]
        if any(cell != "0" for cell in cells):
            table.add_row(name, *cells)
    return table


def _title(name: str) -> str:
    return registered()[name].title.removesuffix(" CLI") if name in registered() else name


def _signed(change: Estimate) -> str:
    return f"{100 * change.mean:+.0f} [{100 * change.low:+.0f}, {100 * change.high:+.0f}]"
