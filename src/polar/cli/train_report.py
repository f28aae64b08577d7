"""What `polar train` prints beside its progress: the price of a run, and what its evaluations came to. Knows the console only."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from polar.cli.output import out, say
from polar.train.config import TrainConfig
from polar.train.evaluation import read_outcome
from polar.train.passk import difference
from polar.train.price import Figure, Price

_COLOURS = {"exact": "green", "measured": "green", "stated": "yellow", "assumed": "red", "unknown": "red"}


def show_evaluations(folder: Path, config: TrainConfig) -> None:
    """The first and the last evaluation of a run, and what lies between them; nothing where there are not two."""
    files = sorted(folder.glob("step-*.jsonl"))
    if len(files) < 2:
        return
    before, after = (read_outcome(file, passed=config.evaluation.passed) for file in (files[0], files[-1]))
    table = Table(
        title=f"pass@1 on held-out tasks, with 95% intervals over {max(len(before.passes(name)) for name in before.results)} tasks"
    )
    for name in ("harness", f"after step {before.step}", f"after step {after.step}", "change"):
        table.add_column(name, justify="left" if name == "harness" else "right")
    for harness in before.results:
        first, last = before.passes(harness), after.passes(harness)
        change = difference(first, last) if first.keys() & last.keys() else None
        shown = [str(outcome.estimate(harness) or "") for outcome in (before, after)]
        table.add_row(harness, *shown, "" if change is None else f"{change.mean:+.1%} [{change.low:+.1%}, {change.high:+.1%}]")
    out.print(table)


def show_price(price: Price) -> None:
    table = Table(title="What this run will take")
    table.add_column("", no_wrap=True)
    table.add_column("figure", justify="right")
    table.add_column("from")
    table.add_column("", overflow="fold")
    for figure in price.figures:
        table.add_row(figure.name.replace("_", " "), amount(figure), Text(figure.origin, _COLOURS[figure.origin]), figure.why)
    out.print(table)
    assumed = [figure.name for figure in price.figures if figure.origin == "assumed"]
    if assumed:
        say(
            "some figures are assumed: measure a few sessions (polar run, then --measured results.jsonl), or state them (price:)",
            style="yellow",
        )


def amount(figure: Figure) -> str:
    """The value for people, with its unit."""
    value = figure.value
    if value is None:
        return "not known"
    if figure.unit == "bytes":
        return f"{value / 2**30:,.1f} GiB" if value >= 2**29 else f"{value / 2**20:,.1f} MiB"
    if figure.unit == "FLOP":
        return f"{value:.2e} FLOP"
    if figure.unit == "of the groups":
        return f"{value:.0%} {figure.unit}"
    if figure.unit == "h":
        return f"{value:,.1f} h" if value >= 1 else f"{value * 60:,.1f} min"
    return f"{value:,.1f} {figure.unit}".replace(".0 ", " ").strip() if value < 1e6 else f"{value / 1e6:,.1f} million {figure.unit}".strip()
