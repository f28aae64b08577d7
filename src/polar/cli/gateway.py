"""`polar gateway`: the gateway alone, with a ready session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
import uvloop
import yaml
from rich.table import Table

from polar.cli.control import Admin, announce, call
from polar.cli.guide import guide
from polar.cli.output import configure_logging, err, out
from polar.cli.supervisor import supervise
from polar.errors import ConfigError
from polar.gateway.config import GatewayConfig


def gateway(
    engine: Annotated[list[str] | None, typer.Option(help="URL of the inference server; repeat it for several of the same model.")] = None,
    kind: Annotated[str, typer.Option(help="vllm, sglang or openai.")] = "vllm",
    model: Annotated[str | None, typer.Option(help="The model's name at the engine; default: the first that it serves.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory with tokenizer.json; default: where the engine loaded the model.")
    ] = None,
    renderer: Annotated[str | None, typer.Option(help="Renderer, where the model's name is not known.")] = None,
    mode: Annotated[str, typer.Option(help="auto, tokens or messages.")] = "auto",
    config: Annotated[Path | None, typer.Option(help="A YAML file of settings; the other options override it.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the model API. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the model API; the control API takes the next. Default: 8100.")] = None,
    store: Annotated[str | None, typer.Option(help="Path of the SQLite file, or a database URL.")] = None,
    stream: Annotated[str | None, typer.Option(help="replay (for rollouts) or live (for people). Default: replay.")] = None,
    kind_of_session: Annotated[
        str, typer.Option("--session", help="The ready session: train (sampling forced), eval (the harness's own) or none.")
    ] = "train",
    max_turns: Annotated[int | None, typer.Option(help="Model calls per session.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Sampled tokens per session.")] = None,
    check: Annotated[bool, typer.Option(help="Check the engine at start.")] = True,
    workers: Annotated[int | None, typer.Option(help="Processes; each session lives in one of them. Default: 1.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    worker: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Stand between a harness and a model: every call is recorded as exact token ids and log-probabilities."""
    from polar.gateway.serve import run_until_signal  # with all that it needs, a second of imports: not for `polar session`
    from polar.gateway.shards import Shards, Worker

    configure_logging(log_level)
    if kind_of_session not in ("train", "eval", "none"):
        raise ConfigError("--session must be train, eval or none")
    settings = load_config(config)
    if engine:
        settings["engines"] = {
            "default": {"urls": engine, "kind": kind, "model": model, "tokenizer": tokenizer, "renderer": renderer, "mode": mode}
        }
    overrides = {"host": host, "port": port, "store": store, "stream": stream, "workers": workers}
    settings.update({name: value for name, value in overrides.items() if value is not None})
    budgets = {"max_turns": max_turns, "max_tokens": max_tokens}
    if any(value is not None for value in budgets.values()):
        settings["budgets"] = {**settings.get("budgets", {}), **{name: value for name, value in budgets.items() if value is not None}}
    settings["check"] = settings.get("check", True) and check
    if not settings.get("engines"):
        raise ConfigError("name the inference server: polar gateway --engine http://127.0.0.1:8000 (none at hand? polar engine tiny-qwen3)")
    parsed = parse_config(settings)
    progress = partial(err.print, style="dim", highlight=False)
    if worker is not None:
        shards = Shards(worker, [Worker(*urls) for urls in orjson.loads(os.environ["POLAR_WORKERS"])], str(parsed.admin_token))
        run_loop(run_until_signal(parsed, lambda gateway: None, lambda line: None, shards))
    elif parsed.workers > 1:
        run_loop(supervise(parsed, lambda admin: ready(admin, parsed, kind_of_session), progress))
    else:
        run_loop(run_until_signal(parsed, lambda gateway: ready(Admin.of(gateway), parsed, kind_of_session), progress))


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def ready(admin: Admin, config: GatewayConfig, kind: str) -> None:
    """Says where everything is, and makes the ready session."""
    announce(admin, config.store_url)
    health = await asyncio.to_thread(call, admin, "GET", "/health")
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("model API", config.public_url or f"http://{config.host}:{config.port}")
    table.add_row("control API", f"{admin.url}   token {admin.token}")
    table.add_row("store", config.store_url)
    for name, report in health["engines"].items():
        trainable = "[green]trainable[/]" if report["trainable"] else f"[red]not trainable[/]: {'; '.join(report['problems'])}"
        table.add_row(f"engine {name}", f"{report['model']}, mode {report['mode']} ({report['mode_reason']}), {trainable}")
    out.print(table, highlight=False)
    if kind != "none":
        made = await asyncio.to_thread(call, admin, "POST", "/sessions", {"kind": kind})
        out.print(f"\nSession [bold]{made['session_id']}[/] ({made['kind']}). Point a harness at it:\n")
        out.print(guide(made["base_url"], made["key"]), highlight=False, markup=False, soft_wrap=True)
    out.print("\nCtrl-C stops the gateway. Look at what was recorded with: polar session list", highlight=False)


def load_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} must hold a mapping of settings")
    return loaded


def parse_config(settings: dict[str, Any]) -> GatewayConfig:
    try:
        return GatewayConfig.model_validate(settings)
    except ValueError as error:
        raise ConfigError(f"settings are wrong:\n{error}") from error
