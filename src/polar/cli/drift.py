"""`polar drift`: where prompts did not extend what came before them, why, what it cost, and what would avoid it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.table import Table
from rich.text import Text

from polar.cli.control import store_url
from polar.cli.export import BuilderOption, OptionOption, builder_options
from polar.cli.output import out
from polar.errors import ConfigError
from polar.export.facts import facts_of
from polar.export.plan import every_session
from polar.export.trajectories import Maker
from polar.records import Session
from polar.store import open_store
from polar.store.base import Store
from polar.tokens.tokenizer import load_tokenizer
from polar.trajectory.drift import DriftLine, DriftTotal, aggregate
from polar.trajectory.row import Trajectory


@dataclass(slots=True)
class Summary:
    """What became of the sessions' tokens."""

    sessions: int = 0
    rows: int = 0
    roots: int = 0
    sampled: int = 0
    in_rows: int = 0
    ledger: Counter[str] = field(default_factory=Counter)
    rules: dict[str, str] = field(default_factory=dict)
    """For each ledger reason, a rule that decided it."""
    warnings: list[str] = field(default_factory=list)

    def add(self, trajectory: Trajectory) -> None:
        self.sessions += 1
        self.rows += len(trajectory.traces)
        self.roots += trajectory.roots
        self.sampled += trajectory.sampled
        self.in_rows += trajectory.in_rows
        self.ledger.update(trajectory.ledger.by_reason())
        for line in trajectory.ledger:
            self.rules.setdefault(line.reason, line.rule)
        if self.sessions <= 10:
            self.warnings += [f"{trajectory.session}: {warning}" for warning in trajectory.warnings]


def drift(
    what: Annotated[str, typer.Argument(metavar="SESSION|TASK|all", help="A session's id, a task's name, or all.")],
    store: Annotated[str | None, typer.Option("--store", help="Path or URL of the store; default: the gateway's.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Directory with tokenizer.json, to show the text around each break.")] = None,
    builder: BuilderOption = "prefix_merging",
    option: OptionOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print breaks and totals as JSON.")] = False,
) -> None:
    """Show where prefixes broke: by harness, dialect and cause, and one by one for a single session."""
    maker = Maker(builder, builder_options(option), "broadcast", None if tokenizer is None else load_tokenizer(tokenizer))
    summary = Summary()
    kept: list[DriftLine] = []

    async def run() -> list[DriftTotal]:
        opened = open_store(store_url(store))
        totals: list[DriftTotal] = []
        try:
            async for session in _named(opened, what):
                trajectory = await maker.trajectory(opened, facts_of(session))
                summary.add(trajectory)
                totals = _merged(totals, aggregate(trajectory.drift))
                if summary.sessions == 1:
                    kept.extend(trajectory.drift)
        finally:
            await opened.aclose()
        return totals

    totals = asyncio.run(run())
    lines = kept if summary.sessions == 1 else []
    if as_json:
        typer.echo(orjson.dumps(_as_json(summary, totals, lines)).decode())
        return
    if lines:
        _print_lines(lines)
    _print_totals(summary, totals)


async def _named(store: Store, what: str) -> AsyncIterator[Session]:
    """Raises `ConfigError` if nothing has that name."""
    one = None if what == "all" else await store.session(what)
    if one is not None:
        yield one
        return
    found = False
    async for session in every_session(store):
        if what in ("all", session.metadata.get("task"), session.metadata.get("task_id")):
            found = True
            yield session
    if not found:
        raise ConfigError(
            "the store holds no session"
            if what == "all"
            else f"no session and no task is called {what!r} in this store; see: polar session list"
        )


def _merged(totals: list[DriftTotal], more: Iterable[DriftTotal]) -> list[DriftTotal]:
    by_key = {(total.harness, total.dialect, total.cause): total for total in totals}
    for total in more:
        known = by_key.setdefault((total.harness, total.dialect, total.cause), DriftTotal(total.harness, total.dialect, total.cause))
        for name in ("breaks", "dropped", "repeated", "lost"):
            setattr(known, name, getattr(known, name) + getattr(total, name))
    return sorted(by_key.values(), key=lambda total: (-(total.repeated + total.lost), total.harness, total.dialect, total.cause))


def _print_lines(lines: list[DriftLine]) -> None:
    for line in lines:
        title = Text(f"call {line.completion} does not extend call {line.parent}: ", "bold").append(line.cause, "bold yellow")
        out.print(title)
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


def _print_totals(summary: Summary, totals: list[DriftTotal]) -> None:
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
    out.print(
        f"{summary.sessions:,} sessions: {summary.rows:,} rows of {summary.roots:,} conversations and {breaks:,} breaks", highlight=False
    )
    outside = sum(summary.ledger.values())
    out.print(f"{summary.in_rows:,} sampled tokens in rows + {outside:,} in the ledger = {summary.sampled:,} sampled", highlight=False)
    for reason, tokens in summary.ledger.most_common():
        out.print(f"  {tokens:,} {reason} ({summary.rules[reason]})", highlight=False, markup=False, soft_wrap=True)
    for warning in summary.warnings:
        out.print(warning, style="yellow", highlight=False, markup=False, soft_wrap=True)


def _as_json(summary: Summary, totals: list[DriftTotal], lines: list[DriftLine]) -> dict[str, Any]:
    return {
        "sessions": summary.sessions,
        "rows": summary.rows,
        "conversations": summary.roots,
        "tokens": {"sampled": summary.sampled, "in_rows": summary.in_rows, "ledger": dict(summary.ledger)},
        "totals": [asdict(total) | {"fix": total.fix} for total in totals],
        "breaks": [asdict(line) | {"fix": line.fix} for line in lines],
        "warnings": summary.warnings,
    }
