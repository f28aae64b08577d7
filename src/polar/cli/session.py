"""`polar session`: make, look at and end sessions. Making and ending go through the running gateway; looking reads the store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import orjson
import typer
from rich.table import Column, Table

from polar.cli.control import call, running
from polar.cli.export import stored
from polar.cli.guide import context_of, guide, session_url
from polar.cli.output import out, say, written
from polar.errors import ConfigError
from polar.records import Completion, Session
from polar.store.base import Store
from polar.store.export import completion_to_json

app = typer.Typer(help="Make, look at and end sessions.", no_args_is_help=True)
T = TypeVar("T")
StoreOption = Annotated[str | None, typer.Option("--store", help="Path or URL of the store; default: the gateway's.")]


@app.command()
def new(
    kind: Annotated[str, typer.Option(help="train (sampling forced) or eval (the harness's own).")] = "train",
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Make a session and print the lines that point each CLI at it. The key is shown this once."""
    made = call(running(), "POST", "/sessions", {"kind": kind})
    if as_json:
        typer.echo(orjson.dumps(made).decode())
        return
    out.print(f"Session [bold]{made['session_id']}[/] ({made['kind']})\n")
    out.print(guide(made["base_url"], made["key"], context=made["context"]), highlight=False, markup=False, soft_wrap=True)


@app.command()
def env(
    base_url: Annotated[str, typer.Argument(help="The session's base URL (http://.../s/KEY).")],
    harness: Annotated[str | None, typer.Option(help="Only this harness.")] = None,
) -> None:
    """Print the lines that point each CLI at a session."""
    root, key = session_url(base_url)
    out.print(guide(root, key, harness, context=context_of(root, key)), highlight=False, markup=False, soft_wrap=True)


@app.command("list")
def list_sessions(store: StoreOption = None, limit: Annotated[int, typer.Option(help="How many.")] = 30) -> None:
    """List sessions, newest first."""

    async def read(opened: Store) -> list[tuple[Session, int, int]]:
        rows = []
        for record in await opened.sessions(limit=limit):
            heads = await opened.heads(record.id)
            rows.append((record, len(heads), sum(head.sampled for head in heads)))
        return rows

    table = Table(Column("session", no_wrap=True), "kind", "state", "age", "calls", "sampled tokens")
    for record, calls, tokens in with_store(store, read):
        state = "open" if record.closed is None else "closed"
        table.add_row(record.id, record.kind, state, age(time.time() - record.created), str(calls), str(tokens))
    out.print(table)


@app.command()
def show(session_id: str, store: StoreOption = None) -> None:
    """Show a session's calls: what each continued, how many tokens, and where prefixes broke and why."""
    table = Table("call", "dialect", "mode", "prompt", "sampled", "continues", "finish", "notes")
    for completion in with_store(store, lambda opened: all_of(opened, session_id)):
        continues = "root" if completion.parent is None else f"#{completion.parent}"
        notes = sorted(completion.tags)
        if completion.broken is not None:
            notes.insert(0, f"broken: {completion.broken.cause} ({completion.broken.lost} ids)")
        if completion.untrainable is not None:
            notes.append(completion.untrainable)
        table.add_row(
            f"#{completion.number}",
            completion.dialect,
            completion.mode,
            length(completion.prompt_ids),
            length(completion.sampled_ids),
            continues,
            completion.finish,
            "; ".join(notes),
        )
    out.print(table)


@app.command()
def export(
    session_id: str,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: stdout.")] = None,
    store: StoreOption = None,
) -> None:
    """Write a session's completions as JSON lines, with ids and log-probabilities."""
    lines = [completion_to_json(completion) + b"\n" for completion in with_store(store, lambda opened: all_of(opened, session_id))]
    with written(output) as file:
        file.writelines(lines)
    if output is not None:
        say(f"{len(lines)} completions written to {output}")


@app.command()
def close(session_id: str) -> None:
    """End a session: its key stops working, its calls in flight are cancelled."""
    answer = call(running(), "DELETE", f"/sessions/{session_id}")
    out.print(f"{session_id} {'closed' if answer['closed'] else 'was closed already'}")


async def all_of(store: Store, session_id: str) -> list[Completion]:
    if await store.session(session_id) is None:
        raise ConfigError(f"no session is called {session_id!r} in this store; see: polar session list")
    return [completion async for completion in store.completions(session_id)]


def with_store(url: str | None, read: Any) -> Any:
    """Runs `read(store)` on the store, which is opened and closed around it. Raises `ConfigError` where there is none."""

    async def run() -> Any:
        store, _ = stored(url)
        try:
            outcome: Coroutine[Any, Any, Any] = read(store)
            return await outcome
        finally:
            await store.aclose()

    return asyncio.run(run())


def age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def length(ids: np.ndarray[Any, Any] | None) -> str:
    return "missing" if ids is None else str(len(ids))
