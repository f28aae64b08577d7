"""What `polar train` prints beside its progress: the price of a run. Knows the console only."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from polar.cli.output import out, say
from polar.train.price import Figure, Price

_COLOURS = {"exact": "green", "measured": "green", "stated": "yellow", "assumed": "red", "unknown": "red"}


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
        say("some figures are assumed: measure a few sessions (polar run, then --measured results.jsonl), or state them (price:)", style="yellow")


def amount(figure: Figure) -> str:
    """The value for people, with its unit."""
    value = figure.value
    if value is None:
        return "not known"
    if figure.unit == "bytes":
        return f"{value / 2**30:,.1f} GiB"
    if figure.unit == "FLOP":
        return f"{value:.2e} FLOP"
    if figure.unit == "of the groups":
        return f"{value:.0%} {figure.unit}"
    if figure.unit == "h":
        return f"{value:,.1f} h" if value >= 1 else f"{value * 60:,.1f} min"
    return f"{value:,.1f} {figure.unit}".replace(".0 ", " ").strip() if value < 1e6 else f"{value / 1e6:,.1f} million {figure.unit}".strip()
