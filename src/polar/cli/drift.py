"""`polar drift`: where prompts did not extend what came before them, why, what it cost, and what would avoid it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.table import Table
from rich.text import Text

from polar.cli.export import BuilderOption, OptionOption, builder_options, stored
from polar.cli.output import out
from polar.errors import ConfigError

if TYPE_CHECKING:
    from polar.export.summary import Summary
    from polar.records import Session
    from polar.store.base import Store
    from polar.trajectory.drift import DriftLine


def drift(
    what: Annotated[str, typer.Argument(metavar="SESSION|TASK|all", help="A session's id, a task's name, or all.")],
    store: Annotated[str | None, typer.Option("--store", help="Path or URL of the store; default: the gateway's.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory with tokenizer.json, to show the text around each break.")] = None,
    builder: BuilderOption = "prefix_merging",
    option: OptionOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print breaks and totals as JSON.")] = False,
) -> None:
    """Show where prefixes broke: by harness, dialect and cause, and one by one for a single session."""
    from polar.export import Maker, facts_of  # with all that they need: not for the other commands
    from polar.export.summary import Summary
    from polar.tokens.tokenizer import load_tokenizer

    maker = Maker(builder, builder_options(option), tokenizer=None if tokenizer is None else load_tokenizer(tokenizer))
    summary = Summary()

    async def run() -> None:
        opened, _ = stored(store)
        try:
            async for session in _named(opened, what):
                summary.add(await maker.trajectory(opened, facts_of(session)))
        finally:
            await opened.aclose()

    asyncio.run(run())
    if as_json:
        typer.echo(orjson.dumps(summary.as_json()).decode())
        return
    _print_breaks(summary.breaks)
    _print_totals(summary)


async def _named(store: Store, what: str) -> AsyncIterator[Session]:
    """Raises `ConfigError` if nothing has that name."""
    from polar.export.plan import every_session

    one = None if what == "all" else await store.session(what)
    if one is not None:
        yield one
        return
    found = False
    async for session in every_session(store):
        if what in ("all", session.metadata.get("task"), session.metadata.get("task_id")):
            found = True
            yield session
    if not found and what == "all":
        raise ConfigError("the store holds no session")
    if not found:
        raise ConfigError(f"no session and no task is called {what!r} in this store; see: polar session list")


def _print_breaks(lines: Iterable[DriftLine]) -> None:
    for line in lines:
        out.print(Text(f"call {line.completion} does not extend call {line.parent}: ", "bold").append(line.cause, "bold yellow"))
        where = f"  first difference at id {line.position}: {_id(line.before_id)} before, {_id(line.after_id)} after"
        cost = f"  {line.dropped:,} ids of call {line.parent} left out, {line.repeated:,} ids stand in rows twice, {line.lost:,} lost"
        for text in (where, cost, f"  {line.detail}" if line.detail else ""):
            if text:
                out.print(text, highlight=False, markup=False, soft_wrap=True)
        if line.before or line.after:
            out.print(Text("  before: ").append(repr(line.before), "red"), soft_wrap=True)
            out.print(Text("  after:  ").append(repr(line.after), "green"), soft_wrap=True)
        out.print(f"  would avoid it: {line.fix}\n", highlight=False, markup=False, soft_wrap=True)


def _id(value: int | None) -> str:
    return "the end" if value is None else str(value)


def _print_totals(summary: Summary) -> None:
    totals = summary.totals()
    if totals:
        table = Table("harness", "dialect", "cause", title="Breaks")
        for name in ("breaks", "ids repeated", "tokens lost"):
            table.add_column(name, justify="right")
        table.add_column("would avoid it")
        for total in totals:
            numbers = (total.breaks, total.repeated, total.lost)
            table.add_row(total.harness or "?", total.dialect, total.cause, *(f"{number:,}" for number in numbers), total.fix)
        out.print(table)
    else:
        out.print("No prefix broke: every prompt extended its predecessor, id by id.")
    breaks = sum(total.breaks for total in totals)
    rows = f"{summary.rows:,} rows of {summary.roots:,} conversations and {breaks:,} breaks"
    out.print(f"{summary.sessions:,} sessions: {rows}", highlight=False)
    outside = sum(summary.ledger.values())
    out.print(f"{summary.in_rows:,} sampled tokens in rows + {outside:,} in the ledger = {summary.sampled:,} sampled", highlight=False)
    for reason, tokens in summary.ledger.most_common():
        out.print(f"  {tokens:,} {reason} ({summary.rules[reason]})", highlight=False, markup=False, soft_wrap=True)
    for warning in summary.warnings:
        out.print(warning, style="yellow", highlight=False, markup=False, soft_wrap=True)
