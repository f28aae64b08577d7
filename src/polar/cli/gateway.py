"""`polar gateway`: the gateway alone, with a ready session."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.table import Table

from polar.cli.guide import guide
from polar.cli.output import configure_logging, err, out
from polar.cli.state import announce
from polar.errors import ConfigError
from polar.gateway.config import GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import run_until_signal


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
    host: Annotated[str | None, typer.Option(help="Address of the model API. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the model API; the control API takes the next. [default: 8100]")] = None,
    store: Annotated[str | None, typer.Option(help="Path of the SQLite file, or a database URL.")] = None,
    stream: Annotated[str | None, typer.Option(help="replay (for rollouts) or live (for people). [default: replay]")] = None,
    kind_of_session: Annotated[
        str, typer.Option("--session", help="The ready session: train (sampling forced), eval (the harness's own) or none.")
    ] = "train",
    max_turns: Annotated[int | None, typer.Option(help="Model calls per session.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Sampled tokens per session.")] = None,
    check: Annotated[bool, typer.Option(help="Check the engine at start.")] = True,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Stand between a harness and a model: every call is recorded as exact token ids and log-probabilities."""
    configure_logging(log_level)
    if kind_of_session not in ("train", "eval", "none"):
        raise ConfigError("--session must be train, eval or none")
    settings = load_config(config)
    if engine:
        settings["engines"] = {
            "default": {"urls": engine, "kind": kind, "model": model, "tokenizer": tokenizer, "renderer": renderer, "mode": mode}
        }
    overrides = {"host": host, "port": port, "store": store, "stream": stream}
    settings.update({name: value for name, value in overrides.items() if value is not None})
    budgets = {"max_turns": max_turns, "max_tokens": max_tokens}
    if any(value is not None for value in budgets.values()):
        settings["budgets"] = {**settings.get("budgets", {}), **{name: value for name, value in budgets.items() if value is not None}}
    settings["check"] = settings.get("check", True) and check
    if not settings.get("engines"):
        raise ConfigError("name the inference server: polar gateway --engine http://127.0.0.1:8000 (none at hand? polar engine tiny-qwen3)")
    parsed = parse_config(settings)

    async def ready(gateway: Gateway) -> None:
        announce(gateway)
        show(gateway)
        if kind_of_session != "none":
            record, key = await gateway.sessions.create(kind="eval" if kind_of_session == "eval" else "train")
            out.print(f"\nSession [bold]{record.id}[/] ({record.kind}). Point a harness at it:\n")
            out.print(guide(gateway.base_url(key), key), highlight=False, markup=False, soft_wrap=True)
        out.print("\nCtrl-C stops the gateway. Look at what was recorded with: polar session list", highlight=False)

    asyncio.run(run_until_signal(parsed, ready, lambda line: err.print(line, style="dim", highlight=False)))


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


def show(gateway: Gateway) -> None:
    """What the gateway is, in a table."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    config = gateway.config
    table.add_row("model API", config.public_url or f"http://{config.host}:{config.port}")
    table.add_row("control API", f"http://127.0.0.1:{config.admin_port}   token {gateway.admin_token}")
    table.add_row("store", config.store_url)
    for served in gateway.models.all:
        report = served.health()
        trainable = "[green]trainable[/]" if report["trainable"] else f"[red]not trainable[/]: {'; '.join(report['problems'])}"
        table.add_row(f"engine {served.name}", f"{served.model}, mode {served.mode} ({served.mode_reason}), {trainable}")
    out.print(table, highlight=False)
