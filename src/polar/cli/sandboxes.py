"""`polar ps` and `polar gc`: the sandboxes of this machine, and what dead ones left behind."""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from polar.cli.output import out, say
from polar.errors import SandboxError

if TYPE_CHECKING:
    from polar.runtime.base import Left

Roots = Annotated[
    list[Path] | None, typer.Option("--root", help="Look only below this folder of sandboxes; default: wherever nodes of this user ran.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Found:
    """Something of a sandbox, and whether its owner lives."""

    root: str
    sandbox: str
    kind: str
    name: str
    owner: str
    alive: bool
    detail: str


def ps(root: Roots = None, as_json: AsJson = False) -> None:
    """List the processes, containers, images and folders of sandboxes, and whether the node they belong to is alive."""
    found = asyncio.run(_listed(_roots(root)))
    if as_json:
        typer.echo(orjson.dumps([asdict(one) for one in found]).decode())
        return
    table = Table("sandbox", "what", "which", "owner", "detail")
    for one in sorted(found, key=lambda one: (one.root, one.owner, one.sandbox, one.kind)):
        state = "[green]alive[/]" if one.alive else "[red]dead[/]"
        table.add_row(one.sandbox or "-", one.kind, escape(one.name), f"{one.owner} {state}", escape(one.detail[:60]))
    out.print(table)
    dead = sum(not one.alive for one in found)
    if dead:
        say(f"{dead} of dead owners; remove them with: polar gc")


def gc(
    root: Roots = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what sandboxes of dead nodes left: after kill -9, after a reboot. Nothing of a living node is touched."""
    removed, problems = asyncio.run(_reaped(_roots(root), dry_run))
    if as_json:
        typer.echo(orjson.dumps([asdict(one) for one in removed]).decode())
    else:
        for one in removed:
            out.print(f"{'would remove' if dry_run else 'removed'} {one.kind} {one.name}", markup=False, highlight=False, soft_wrap=True)
        say(f"{len(removed)} {'to be removed' if dry_run else 'removed'}")
    if problems:
        raise SandboxError("\n".join(problems))


def _roots(given: list[Path] | None) -> list[Path]:
    from polar.rollout import roots

    return given or roots.known()


async def _listed(roots: list[Path]) -> list[Found]:
    from polar.runtime.owner import owner_alive
    from polar.runtime.reaper import listing

    return [
        Found(str(root), one.sandbox, one.kind, one.name, one.owner, owner_alive(root, one.owner), one.detail)
        for root in roots
        for one in await listing(root)
    ]


async def _reaped(roots: list[Path], dry_run: bool) -> tuple[list[Left], list[str]]:
    """What was removed, and what is wrong with the roots where not all could be: none keeps the others from being looked at."""
    from polar.rollout import roots as notes
    from polar.runtime.reaper import listing, reap

    removed: list[Left] = []
    problems: list[str] = []
    for root in roots:
        try:
            removed += await reap(root, dry_run=dry_run)
        except SandboxError as error:
            problems.append(f"{root}: {error}")
            continue
        if not dry_run and not root.exists() and not await listing(root):
            notes.forget(root)
    return removed, problems
