"""`polar demo`: the main job on the embedded default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polar.errors import ConfigError


def demo(
    sessions: Annotated[int, typer.Option(help="How many sessions to run.")] = 8,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where the store and the logs go; default: a new folder in runs/.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice of tasks.")] = 0,
) -> None:
    """Run a real harness on bundled tasks with the bundled model, and show what was captured. No GPU, no account."""
    try:
        from polar.demo import run
    except ImportError as error:
        raise ConfigError(f"polar demo needs torch and transformers: pip install 'polar-rl[demo]' ({error})") from error
    raise typer.Exit(run(sessions=sessions, output=output, seed=seed))
