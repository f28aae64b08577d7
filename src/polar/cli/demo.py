"""`polar demo`: the main job on the embedded default."""

from __future__ import annotations

import shlex
import shutil
import sys
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
        raise ConfigError(f"polar demo needs torch and transformers: pip install -e '.[demo]' (in Polar's folder) ({error})") from error
    raise typer.Exit(run(sessions=sessions, output=output, seed=seed, program=own_name()))


def own_name() -> str:
    """How this command can be called again from the user's shell: `polar` where that is on the path, else as it was started."""
    started = Path(sys.argv[0])
    found = shutil.which("polar")
    if found is not None and started.exists() and Path(found).samefile(started):
        return "polar"
    return f"{shlex.quote(sys.executable)} -m polar.cli" if started.name == "__main__.py" else shlex.quote(sys.argv[0])
