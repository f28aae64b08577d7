"""`polar harness`: install, look at, run and check the harness CLIs."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import orjson
import typer
from rich.table import Table

from polar.cli.guide import context_of, session_url
from polar.cli.output import out, say
from polar.errors import ConfigError, PolarError
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
        found = install(name, progress=lambda line: say(line, "dim"))
        out.print(f"{name}: {' '.join(found.program)}", highlight=False, soft_wrap=True)


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
    timeout_s: Annotated[float, typer.Option(min=0, help="Wall time in seconds.")] = 600.0,
    context: Annotated[int | None, typer.Option(min=1, help="The model's length in tokens. Default: as the gateway says.")] = None,
    compact_at: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens beyond which it compacts its conversation. Default: as it decides from the length."),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep its home folder after success, too; after a failure it is kept anyway.")
    ] = False,
    arguments: Annotated[list[str] | None, typer.Argument(help="After --: more arguments for the harness; the command of `shell`.")] = None,
) -> None:
    """Run a harness once against a session; the exit code is true."""
    harness = named(name)
    chosen = next((known for known in harness.dialects if dialect in (None, known)), None)
    if chosen is None:
        raise ConfigError(f"{name} speaks {', '.join(harness.dialects)}, not {dialect}")
    root, key = session_url(base_url)
    endpoint = Endpoint(root, key, chosen, "polar")
    if not cwd.is_dir():
        raise ConfigError(f"--cwd {cwd}: there is no such folder")
    text = sys.stdin.read() if prompt == "-" else prompt
    home = Path(tempfile.mkdtemp(prefix=f"polar-{name}-"))
    options = Options.within(context or context_of(root, key), compact_at=compact_at, extra_args=tuple(arguments or ()))
    try:
        result = run(name, text, endpoint, cwd, timeout_s, home=home, options=options)
    except PolarError:
        shutil.rmtree(home, ignore_errors=True)  # it did not start
        raise
    out.print(result.answer or "(no answer)", markup=False, highlight=False, soft_wrap=True)
    if result.problem:
        say(f"{name}: {result.problem}; its output is in {home / 'polar-run'}", "red")
        raise typer.Exit(1)
    if keep:
        say(f"its home is {home}", "dim")
    else:
        shutil.rmtree(home, ignore_errors=True)  # it holds the session's key


@app.command()
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Harnesses to check.")] = None,
    all_: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    mode: Annotated[str, typer.Option(help="tokens, messages or both.")] = "both",
    bridging: Annotated[bool, typer.Option(help="Switch off to see the breaks that bridging avoids.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="How many of them run at a time.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Run the real CLIs through the gateway against a scripted engine, and check what was captured and the rows built of it."""
    from polar.harness.check import check as check_harnesses
    from polar.harness.check import render_table

    if not names and not all_:
        raise ConfigError("name harnesses, or say --all")
    if mode not in ("tokens", "messages", "both"):
        raise ConfigError("--mode must be tokens, messages or both")
    modes: tuple[Literal["tokens", "messages"], ...] = ("tokens", "messages") if mode == "both" else (mode,)  # type: ignore[assignment]
    rows = check_harnesses(
        names or None,
        modes=modes,
        bridging=bridging,
        jobs=jobs,
        progress=lambda line: say(line, "dim"),
    )
    if as_json:
        typer.echo(orjson.dumps([row.to_json() for row in rows], option=orjson.OPT_INDENT_2).decode())
    else:
        out.print(render_table(rows))
    raise typer.Exit(0 if all(row.passed for row in rows) else 1)
