"""`polar trace`: look at training rows, ours or anyone's."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from polar.cli.output import out
from polar.errors import ConfigError

app = typer.Typer(help="Look at training rows.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """A group, also while it has one command."""


@app.command("validate")
def validate_file(
    file: Annotated[
        Path, typer.Argument(help="JSON lines of rows or of trajectories, Parquet or a folder of `polar export --as rl`, or - for stdin.")
    ],
    tokenizer: Annotated[
        Path | None, typer.Option(help="Directory with tokenizer.json: ids must be in its vocabulary and decode to the messages.")
    ] = None,
    vocabulary: Annotated[int | None, typer.Option(help="Number of ids of the model, where there is no tokenizer.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    show: Annotated[int, typer.Option(help="How many problems to print; all are counted.")] = 50,
) -> None:
    """Check rows from anywhere: lengths, ids, masks, log-probabilities, spans, and that the ids decode to the messages.

    The exit code is 0 for good rows, 1 where a row has an error, 2 where the file could not be read.
    """
    from polar.export.read import Unreadable, rows_in  # with all that they need: not for the other commands
    from polar.tokens.tokenizer import load_tokenizer
    from polar.trajectory.validate import Problem, validate

    codec = None if tokenizer is None else load_tokenizer(tokenizer)
    size = vocabulary if vocabulary is not None or codec is None else len(codec)
    found: Counter[tuple[str, str]] = Counter()
    rows = bad = printed = 0
    for place, row in rows_in(file):
        rows += 1
        problems = [Problem("json", str(row))] if isinstance(row, Unreadable) else validate(row, vocabulary=size, tokenizer=codec)
        found.update((problem.severity, problem.code) for problem in problems)
        bad += any(strict or problem.severity == "error" for problem in problems)
        for problem in problems[: max(0, show - printed)]:
            style = "red" if problem.severity == "error" else "yellow"
            out.print(f"[{style}]{problem.severity}[/] {place}: ", end="", highlight=False)
            out.print(f"{problem.code}: {problem.message}", markup=False, highlight=False, soft_wrap=True)
            printed += 1
    if not rows:
        raise ConfigError(f"{file} holds no row")
    if sum(found.values()) > printed:
        out.print(f"{sum(found.values()) - printed:,} more problems are not shown; see --show", highlight=False)
    for (severity, code), count in sorted(found.items()):
        out.print(f"  {count:,} x {code} ({severity})", highlight=False)
    out.print(f"{rows:,} rows, {rows - bad:,} good, {bad:,} not" if bad else f"{rows:,} rows, all good", highlight=False)
    if bad:
        raise typer.Exit(1)
