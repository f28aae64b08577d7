"""`polar rebuild`: trajectories again, from stored sessions, with another builder or credit. No inference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from polar.cli.export import BuilderOption, CreditOption, LabelsOption, OptionOption, builder_options, stored
from polar.cli.output import err, say, written
from polar.errors import ConfigError

if TYPE_CHECKING:
    from polar.export.summary import Summary
    from polar.records import Session
    from polar.store.base import Store


def rebuild(
    sessions: Annotated[list[str] | None, typer.Argument(help="Session ids; default: all of the store.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: standard output.")] = None,
    store: Annotated[str | None, typer.Option("--store", help="Path or URL of the store; default: the gateway's.")] = None,
    builder: BuilderOption = "prefix_merging",
    option: OptionOption = None,
    credit: CreditOption = "broadcast",
    rewards: LabelsOption = None,
) -> None:
    """Make trajectories of stored sessions, one JSON line each: rows, ledger, drift report. Needs no model."""
    from polar.export import Maker, facts_of, read_labels  # with all that they need: not for the other commands
    from polar.export.summary import Summary

    maker = Maker(builder, builder_options(option), credit)
    labels = dict(read_labels(rewards)) if rewards is not None else {}
    summary = Summary()

    async def run() -> None:
        opened, _ = stored(store)
        try:
            with written(output) as file:
                async for session in _chosen(opened, sessions):
                    trajectory = await maker.trajectory(opened, facts_of(session, labels.get(session.id)))
                    file.write(trajectory.dumps() + b"\n")
                    summary.add(trajectory)
        finally:
            await opened.aclose()

    asyncio.run(run())
    _print(summary)


async def _chosen(store: Store, ids: list[str] | None) -> AsyncIterator[Session]:
    """The sessions of these ids, or all, newest first. Raises `ConfigError` for an id that the store does not have."""
    from polar.export.plan import every_session

    if not ids:
        async for session in every_session(store):
            yield session
        return
    for session_id in ids:
        found = await store.session(session_id)
        if found is None:
            raise ConfigError(f"no session is called {session_id!r} in this store; see: polar session list")
        yield found


def _print(summary: Summary) -> None:
    table = Table("sessions", "rows", "breaks", "sampled", "in rows", "in the ledger")
    breaks = sum(total.breaks for total in summary.totals())
    numbers = (summary.sessions, summary.rows, breaks, summary.sampled, summary.in_rows, sum(summary.ledger.values()))
    table.add_row(*(f"{number:,}" for number in numbers))
    err.print(table)
    for reason, tokens in summary.ledger.most_common():
        say(f"  {tokens:,} tokens in the ledger: {reason}")
    for warning in summary.warnings:
        say(warning, style="yellow")
