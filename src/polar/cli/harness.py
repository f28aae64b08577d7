"""`polar harness`: install, look at, run and check the harness CLIs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from polar.cli.output import err, out
from polar.errors import ConfigError
from polar.harness import Endpoint, Options, install, installed, named, registered, run

app = typer.Typer(help="Install, look at, run and check the harness CLIs.", no_args_is_help=True)


@app.command("list")
def list_harnesses() -> None:
    """List the harnesses: pinned version, dialects, whether installed."""
    table = Table("harness", "version", "package", "dialects", "installed")
    for harness in registered().values():
        state = "" if harness.package is None else "yes" if installed(harness.name) else "no"
        table.add_row(harness.name, harness.version, harness.package or "", ", ".join(harness.dialects), state)
    out.print(table)


@app.command("install")
def install_harness(names: Annotated[list[str], typer.Argument(help="Names, or `all`.")]) -> None:
    """Install harnesses at their pinned versions into Polar's cache."""
    chosen = [name for name, harness in registered().items() if harness.package] if names == ["all"] else names
    for name in chosen:
        found = install(name, progress=lambda line: err.print(line, style="dim", highlight=False))
        out.print(f"{name}: {' '.join(found.program)}", highlight=False)


@app.command()
def show(name: str) -> None:
    """Show a harness: version, dialects, and the recipe by which its calls are told apart."""
    harness = named(name)
    out.print(f"[bold]{harness.title}[/] {harness.version}  {harness.package or ''}", highlight=False)
    out.print(f"speaks {', '.join(harness.dialects)}", highlight=False)
    for rule in harness.rules:
        out.print(f"  {rule.role:12} {rule.name}", highlight=False)
    out.print("  main         whatever no rule matches", highlight=False)


@app.command("run")
def run_harness(
    name: str,
    prompt: Annotated[str, typer.Argument(help="The instruction, or - for standard input.")],
    base_url: Annotated[str, typer.Option(help="The session's base URL (http://.../s/KEY).")],
    dialect: Annotated[str | None, typer.Option(help="Default: the first that it speaks.")] = None,
    cwd: Annotated[Path, typer.Option(help="Where it works.")] = Path(),
    timeout_s: Annotated[float, typer.Option(help="Wall time in seconds.")] = 600.0,
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: more arguments for the harness; the command of `shell`.")] = None,
) -> None:
    """Run a harness once against a session; the exit code is true."""
    harness = named(name)
    chosen = next((known for known in harness.dialects if dialect in (None, known)), None)
    if chosen is None:
        raise ConfigError(f"{name} speaks {', '.join(harness.dialects)}, not {dialect}")
    key = base_url.rstrip("/").rpartition("/s/")[2]
    endpoint = Endpoint(base_url, key, chosen, "polar")
    text = sys.stdin.read() if prompt == "-" else prompt
    home = Path(tempfile.mkdtemp(prefix=f"polar-{name}-"))
    result = run(name, text, endpoint, cwd, timeout_s, home=home, options=Options(extra_args=tuple(arguments or ())))
    out.print(result.answer or "(no answer)", markup=False, highlight=False)
    if result.problem:
        err.print(f"{name}: {result.problem}; its output is in {home}", style="red", highlight=False)
        raise typer.Exit(1)


@app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Harnesses to check.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    mode: Annotated[str, typer.Option(help="tokens, messages or both.")] = "both",
    bridging: Annotated[bool, typer.Option(help="Switch off to see the breaks that bridging avoids.")] = True,
) -> None:
    """Run the real CLIs through the gateway against a scripted engine, and check what was captured."""
    from polar.harness.check import check as check_harnesses
    from polar.harness.check import render_table

    if not names and not all_:
        raise ConfigError("name harnesses, or say --all")
    if mode not in ("tokens", "messages", "both"):
        raise ConfigError("--mode must be tokens, messages or both")
    modes: tuple[Literal["tokens", "messages"], ...] = ("tokens", "messages") if mode == "both" else (mode,)  # type: ignore[assignment]
    rows = check_harnesses(
        names or None, modes=modes, bridging=bridging, progress=lambda line: err.print(line, style="dim", highlight=False)
    )
    out.print(render_table(rows))
    raise typer.Exit(0 if all(row.passed for row in rows) else 1)
