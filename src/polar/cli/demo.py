"""`polar demo`: the loop closes, on the embedded default."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from polar.errors import ConfigError


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Some sessions and what was captured of them, then one step; under two minutes.")
    ] = False,
    sessions: Annotated[int, typer.Option(help="With --quick: how many sessions to show.")] = 8,
    steps: Annotated[int | None, typer.Option(min=1, help="GRPO steps; default: what the demo has.")] = None,
    shuffle_rewards: Annotated[
        bool, typer.Option("--shuffle-rewards", help="The control: rewards shuffled within each group, from which nothing can be learned.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where stores, logs and results go; default: a new folder in runs/.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the choice and order of tasks.")] = 0,
) -> None:
    """Watch the bundled model learn a harness's protocol by GRPO through the real CLI: pass@1 on held-out tasks before and after, under the
    harness it is trained with and under one it knows already. No GPU, no account."""
    try:
        from polar.demo import Choice, run
    except ImportError as error:
        raise ConfigError(f"polar demo needs torch and transformers: pip install -e '.[demo]' (in Polar's folder) ({error})") from error
    choice = Choice(quick, sessions, seed, steps, shuffle_rewards, output, own_name())
    raise typer.Exit(run(choice))


def own_name() -> str:
    """How this command can be called again from the user's shell: `polar` where that is on the path, else as it was started."""
    started = Path(sys.argv[0])
    found = shutil.which("polar")
    if found is not None and started.exists() and Path(found).samefile(started):
        return "polar"
    return f"{shlex.quote(sys.executable)} -m polar.cli" if started.name == "__main__.py" else shlex.quote(sys.argv[0])
