"""The `polar` command's parts, put together. Each group of subcommands is a file beside this one."""

from __future__ import annotations

import typer

from polar import __version__
from polar.cli.config import app as config_app
from polar.cli.demo import demo
from polar.cli.drift import drift
from polar.cli.engine import engine
from polar.cli.export import export
from polar.cli.gateway import gateway
from polar.cli.harness import app as harness_app
from polar.cli.rebuild import rebuild
from polar.cli.rollout import register as register_rollout
from polar.cli.run import run
from polar.cli.sandboxes import gc, ps
from polar.cli.serve import serve, serve_gateway, serve_rollout
from polar.cli.session import app as session_app
from polar.cli.sft import sft
from polar.cli.tasks import app as tasks_app
from polar.cli.trace import app as trace_app
from polar.cli.train import train

app = typer.Typer(
    name="polar",
    help="Trains language agents with reinforcement learning through the unmodified harness they run in.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(gateway)
app.command()(engine)
app.command()(demo)
app.command()(run)
app.command()(train)
app.command()(serve)
app.command("serve_rollout")(serve_rollout)
app.command("serve_gateway")(serve_gateway)
app.command()(ps)
app.command()(gc)
app.command()(drift)
app.command()(rebuild)
app.command()(export)
app.command()(sft)
register_rollout(app)
app.add_typer(session_app, name="session")
app.add_typer(harness_app, name="harness")
app.add_typer(trace_app, name="trace")
app.add_typer(tasks_app, name="tasks")
app.add_typer(config_app, name="config")


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and leave.")) -> None:
    if version:
        typer.echo(f"polar {__version__}")
        raise typer.Exit
