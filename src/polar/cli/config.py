"""`polar config`: what the settings are, and whether they are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from polar.cli.output import out, say

app = typer.Typer(help="The settings in polar.yaml (the reference's topology.yaml is read, too).", no_args_is_help=True)

File = Annotated[
    Path | None, typer.Option("--config", "-c", help="Default: $POLAR_CONFIG, $POLAR_TOPOLOGY, polar.yaml or topology.yaml here.")
]


@app.command()
def check(config: File = None) -> None:
    """Say whether the settings are right; with an exit code of 2 and a line for each that is not."""
    from polar.rollout import settings

    parsed = settings.load(config)
    place = settings.find(config)
    nodes = ", ".join(f"{node.id} ({node.max_run_workers} sessions at once)" for node in parsed.gateway.nodes)
    say(f"{place or 'no file: the defaults'}: all right; rollout service at {parsed.rollout_url}, nodes: {nodes}", style="green")


@app.command()
def show(config: File = None) -> None:
    """Print all settings as they are in force: defaults, file and environment together. Secrets are masked."""
    from polar.rollout import settings

    out.print(
        yaml.safe_dump(settings.shown(settings.load(config)), sort_keys=False, allow_unicode=True),
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


@app.command()
def schema() -> None:
    """Print the JSON schema of the file, for editors."""
    from polar.rollout.config import PolarConfig

    typer.echo(json.dumps(PolarConfig.model_json_schema(), indent=2))
