"""`polar serve`, and its parts for several machines: `polar serve_rollout`, `polar serve_gateway --node-id X`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from polar.cli.config import File
from polar.cli.gateway import EngineWait, given, run_loop, waiting
from polar.cli.output import configure_logging, out, say
from polar.errors import ConfigError

if TYPE_CHECKING:
    from polar.rollout.config import PolarConfig
    from polar.rollout.stack import Stack

LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(case_sensitive=False, help="debug, info, warning or error.")
]
progress = partial(say, style="dim")


def serve(
    config: File = None,
    engine: Annotated[str | None, typer.Option(help="URL of the inference server, for a node that names none.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the rollout API. Default: 8080.")] = None,
    engine_wait: EngineWait = None,
    log_level: LogLevel = "warning",
) -> None:
    """Run everything on this machine: the rollout service, and a process for each node with its gateway."""
    configure_logging(log_level)
    settings = _settings(config, engine=engine, port=port, engine_wait=engine_wait)
    run_loop(_serve(settings))


def serve_rollout(
    config: File = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port of the rollout API. Default: 8080.")] = None,
    log_level: LogLevel = "warning",
) -> None:
    """Run the rollout service alone; nodes on other machines register with it."""
    configure_logging(log_level)
    run_loop(_serve_rollout(_settings(config, port=port)))


def serve_gateway(
    config: File = None,
    node_id: Annotated[
        str | None, typer.Option("--node-id", envvar="POLAR_GATEWAY_NODE_ID", help="Which node of the file; default: the only one.")
    ] = None,
    engine_wait: EngineWait = None,
    log_level: LogLevel = "warning",
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
) -> None:
    """Run one node: a gateway before its engine, and the sandboxes of the sessions that the service sends."""
    from polar.rollout.node.serve import run_node

    configure_logging(log_level)
    settings = _settings(config, engine_wait=engine_wait)
    try:
        node = settings.node(node_id)
    except KeyError as error:
        raise ConfigError(f"--node-id: {error.args[0]}") from None
    if not child and settings.rollout.token is None:
        from polar.rollout.stack import service_token

        settings.rollout.token = service_token(settings)
    run_loop(run_node(settings, node.id, ready=lambda line: progress(line), watch_parent=child))


async def _serve(settings: PolarConfig) -> None:
    from polar.folders import state_dir
    from polar.rollout.stack import serving

    stop = _until_signal()
    async with serving(settings, state_dir() / "serve", progress=progress, stop=stop) as stack:
        if not stop.is_set():
            _say_where(settings, stack)
        await stop.wait()
        progress("shutting down: sessions that run are ended and run again at the next start")


async def _serve_rollout(settings: PolarConfig) -> None:
    from polar.rollout.stack import serving_rollout

    stop = _until_signal()
    async with serving_rollout(settings, progress=progress) as stack:
        _say_where(settings, stack)
        await stop.wait()


def _say_where(settings: PolarConfig, stack: Stack) -> None:
    from polar.rollout.stack import token_file

    token = "as configured" if settings.rollout.token else f"in {token_file()}"
    rows = [("rollout API", stack.url), ("token", token), ("API page", f"{stack.url}/docs")]
    if settings.rollout.compat_open:
        rows.append(("without token", f"http://127.0.0.1:{settings.rollout.compat_port} (compat_open)"))
    rows += [(f"node {node['node_id']}", str(node["gateway_url"])) for node in stack.service.nodes()]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        out.print(f"{name:<{width}}  {value}", markup=False, highlight=False, soft_wrap=True)
    out.print("\nCtrl-C stops it; what was submitted goes on at the next start. Submit with: polar submit TASK.yaml", highlight=False)


def _settings(path: Path | None, *, engine: str | None = None, port: int | None = None, engine_wait: float | None = None) -> PolarConfig:
    import os

    from polar.rollout import settings

    place = settings.find(path)
    found = settings.overlaid(settings.read(place), os.environ)
    if port is not None:
        found["rollout"] = {**(found.get("rollout") or {}), **given(port=port)}
    parsed = settings.parse(found, str(place) if place else "the settings")
    if engine is not None:
        for node in parsed.gateway.nodes:
            node.inference.base_url = engine
    for node in parsed.gateway.nodes:
        node.gateway = waiting(node.gateway, engine_wait)
    return parsed


def _until_signal() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    return stop
