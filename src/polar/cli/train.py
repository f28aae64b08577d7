"""`polar train`: GRPO through a harness, from a file of settings; started again, it goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from polar.cli.output import INTERRUPTED, configure_logging, err, say
from polar.errors import ConfigError

if TYPE_CHECKING:
    from polar.train.config import TrainConfig
    from polar.train.evaluation import Outcome


def train(
    config: Annotated[Path | None, typer.Argument(help="The settings (train.yaml). Not needed with --resume.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder, with the settings it was begun with.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of the whole run, in place of the file's.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The run's folder; one that holds a run is gone on with.")] = None,
    override: Annotated[
        list[str] | None, typer.Option("--set", help="A setting over the file's: optimisation.lr=1e-5. Repeatable.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything and say what the run will take: tokens, steps, hours.")
    ] = False,
    measured: Annotated[
        Path | None, typer.Option(help="With --dry-run: results of sessions like these (results.jsonl of polar run) to reckon with.")
    ] = None,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Train a model by GRPO through real harnesses. Started again with the same --output, it goes on where it was.

    Ctrl-C finishes the step and writes a checkpoint. Exits with 0 when the run is done, with 130 when it was stopped
    before (SIGTERM, too), with 2 where it could not go on.
    """
    configure_logging(log_level)
    settings = _settings(config, resume, [*(override or []), *([] if steps is None else [f"steps={steps}"])], output)
    from polar.cli.train_report import show_evaluations, show_price

    if dry_run:
        from polar.train.price import price

        show_price(price(settings, measured))  # which needs no torch: what it takes is also told where it cannot run
    try:
        from polar.train.run import check_loads, quiet_transformers
        from polar.train.run import train as run
    except ImportError as error:
        raise ConfigError(
            f"polar train needs torch, transformers and peft: pip install -e '.[train]' (in Polar's folder) ({error})"
        ) from error
    if dry_run:
        quiet_transformers()
        check_loads(settings)
        return
    from polar.train.progress import Screen

    if os.environ.get("RANK", "0") != "0":  # of several processes one leads, and has the screen
        run(settings)
        return
    with Screen(err, settings.steps) as screen:
        summary = run(settings, progress=screen, tell=lambda outcome: _tell(screen.say, outcome))
    assert summary is not None
    show_evaluations(summary.folder / "evaluations", settings)
    ended = {"done": "done", "stopped": "stopped", "no_more_groups": "the recorded groups are used up"}
    where = f"; checkpoint: {summary.checkpoint}" if summary.checkpoint else ""
    say(f"{ended[summary.ended]} after step {summary.steps} of {settings.steps}, policy version {summary.policy_version}{where}")
    if summary.ended == "stopped":
        say("the same command goes on" if settings.output else f"polar train --resume {summary.folder} goes on")
        raise typer.Exit(INTERRUPTED)


def _settings(config: Path | None, resume: Path | None, overrides: list[str], output: Path | None) -> TrainConfig:
    from polar.rollout.settings import read
    from polar.train import settings
    from polar.train.folder import read_run

    if (config is None) == (resume is None):
        raise ConfigError("name either a file of settings, or --resume and a run's folder")
    if config is not None:
        given = settings.overlaid(read(config), overrides)
        where = str(config)
    else:
        assert resume is not None
        _, begun_with = read_run(resume)
        given, where = settings.overlaid({**begun_with, "output": str(resume)}, overrides), str(resume)
    if output is not None:
        given["output"] = str(output)
    return settings.parse(given, where, over=settings.names(overrides))


def _tell(say_line: Callable[[str], None], outcome: Outcome) -> None:
    for harness in outcome.results:
        estimate = outcome.estimate(harness)
        sessions = sum(map(len, outcome.passes(harness).values()))
        say_line(
            f"evaluation after step {outcome.step}, {harness}: "
            + (f"pass@1 {estimate} of {sessions} sessions" if estimate else "no session counts")
        )
