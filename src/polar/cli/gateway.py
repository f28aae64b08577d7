"""`polar gateway`: the gateway alone, with a ready session."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import orjson
import typer
import uvloop
import yaml
from pydantic import ValidationError
from rich.text import Text

from polar.cli.control import Admin, announced, call, store_place
from polar.cli.guide import guide
from polar.cli.output import configure_logging, out, say
from polar.cli.supervisor import supervise
from polar.errors import ConfigError
from polar.gateway.config import GatewayConfig, problems
from polar.harness.base import merge

EngineWait = Annotated[
    float | None, typer.Option(min=0, help="Seconds to wait for an engine that is still loading its model. Default: 600.")
]
ENGINE_WAIT_S = 600.0


def gateway(
    engine: Annotated[list[str] | None, typer.Option(help="URL of the inference server; repeat it for several of the same model.")] = None,
    kind: Annotated[str | None, typer.Option(help="vllm, sglang or openai. Default: vllm.")] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the engine; default: the first that it serves.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Directory with tokenizer.json; default: where the engine loaded the model.")
    ] = None,
    renderer: Annotated[str | None, typer.Option(help="Renderer, where the model's name is not known.")] = None,
    mode: Annotated[str | None, typer.Option(help="auto, tokens or messages. Default: auto.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A YAML file of settings; the other options override it, those of the engine in its default engine.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address of the model API. Default: 127.0.0.1.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the model API; the control API takes the next. Default: 8100.")
    ] = None,
    store: Annotated[str | None, typer.Option(help="Path of the SQLite file, or a database URL.")] = None,
    stream: Annotated[str | None, typer.Option(help="replay (for rollouts) or live (for people). Default: replay.")] = None,
    kind_of_session: Annotated[
        Literal["train", "eval", "none"],
        typer.Option("--session", help="The ready session: train (sampling forced), eval (the harness's own) or none."),
    ] = "train",
    max_turns: Annotated[int | None, typer.Option(help="Model calls per session.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Sampled tokens per session.")] = None,
    check: Annotated[bool | None, typer.Option("--check/--no-check", help="Check the engine at start. Default: yes.")] = None,
    engine_wait: EngineWait = None,
    workers: Annotated[int | None, typer.Option(help="Processes; each session lives in one of them. Default: 1.")] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], typer.Option(case_sensitive=False, help="debug, info, warning or error.")
    ] = "warning",
    worker: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Stand between a harness and a model: every call is recorded as exact token ids and log-probabilities."""
    from polar.gateway.serve import run_until_signal  # with all that it needs, a second of imports: not for `polar session`
    from polar.gateway.shards import Shards, Worker

    configure_logging(log_level)
    settings = load_config(config)
    of_engine = given(urls=engine, kind=kind, model=model, tokenizer=tokenizer, renderer=renderer, mode=mode)
    name = default_engine(settings)
    if of_engine and (engine or name in (settings.get("engines") or ())):
        override(settings, "engines", {name: of_engine})
    override(settings, "budgets", given(max_turns=max_turns, max_tokens=max_tokens))
    settings.update(given(host=host, port=port, store=store, stream=stream, workers=workers, check=check))
    settings = waiting(settings, engine_wait)
    settings.setdefault("render_process", True)
    parsed = parse_config(settings)
    progress = partial(say, style="dim")
    if worker is not None:
        shards = Shards(worker, [Worker(*urls) for urls in orjson.loads(os.environ["POLAR_WORKERS"])], str(parsed.admin_token))
        run_loop(run_until_signal(parsed, lambda gateway: None, lambda line: None, shards))
        return
    with ExitStack() as ending:
        if parsed.workers > 1:
            run_loop(supervise(parsed, lambda admin: ready(admin, parsed, kind_of_session, ending), progress))
        else:
            run_loop(run_until_signal(parsed, lambda gateway: ready(Admin.of(gateway), parsed, kind_of_session, ending), progress))


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """asyncio.run on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def ready(admin: Admin, config: GatewayConfig, kind: str, ending: ExitStack) -> None:
    """Says where everything is, and makes the ready session. What has to go when the gateway ends is put on `ending`."""
    ending.enter_context(announced(admin, config.store_url))
    health = await asyncio.to_thread(call, admin, "GET", "/health")
    everywhere = f"   (listens on {config.host}: every address)" if config.host in ("0.0.0.0", "::") else ""
    facts = [
        ("model API", Text(config.model_url + everywhere)),
        ("control API", Text(f"{admin.url}   token {admin.token}")),
        ("store", Text(store_place(config.store_url))),
    ]
    for name, report in health["engines"].items():
        said = Text(f"{report['model']}, mode {report['mode']} ({report['mode_reason']}), ")
        said.append("trainable", "green") if report["trainable"] else said.append(f"not trainable: {'; '.join(report['problems'])}", "red")
        facts.append((f"engine {name}", said))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        out.print(Text(f"{name:<{width}}  ").append(value), soft_wrap=True)
    if kind != "none":
        made = await asyncio.to_thread(call, admin, "POST", "/sessions", {"kind": kind})
        out.print(f"\nSession [bold]{made['session_id']}[/] ({made['kind']}). Point a harness at it:\n")
        out.print(guide(made["base_url"], made["key"], context=made["context"]), highlight=False, markup=False, soft_wrap=True)
    out.print("\nCtrl-C stops the gateway. Look at what was recorded with: polar session list", highlight=False)


def load_config(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not text") from error
    except (ValueError, yaml.YAMLError) as error:  # ValueError: no date, or a number of thousands of digits
        raise ConfigError(f"--config {path} is not YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path} must hold a mapping of settings")
    return {name: value for name, value in loaded.items() if value is not None}  # a section with nothing in it sets nothing


def given(**options: Any) -> dict[str, Any]:
    """The options that stand on the command line."""
    return {name: value for name, value in options.items() if value is not None}


def waiting(settings: dict[str, Any], engine_wait: float | None) -> dict[str, Any]:
    """A gateway's settings for a command that people start beside their engine: as given, else as they say, else it waits for it."""
    return {"engine_wait_s": ENGINE_WAIT_S, **settings, **given(engine_wait_s=engine_wait)}


def default_engine(settings: dict[str, Any]) -> str:
    """The engine that the command line's options are about."""
    engines = settings.get("engines")
    return str(settings.get("default_engine") or next(iter(engines if isinstance(engines, dict) else ()), "default"))


def override(settings: dict[str, Any], section: str, values: dict[str, Any]) -> None:
    """Lays `values` over a section, mapping by mapping. A section that is none stays, to be refused by its name."""
    if not values:
        return
    old = settings.get(section, {})
    if isinstance(old, dict):
        settings[section] = merge(old, values)


def parse_config(settings: dict[str, Any]) -> GatewayConfig:
    """Raises `ConfigError` with a line for each wrong setting; only where none is, for a missing engine."""
    try:
        parsed = GatewayConfig.model_validate({"engines": {}, **settings})
    except ValidationError as error:
        raise ConfigError(f"these settings are wrong:\n{problems(error)}") from error
    if parsed.control_port > 65535:
        raise ConfigError(f"port: the control API takes the one after {parsed.port}, which there is not; set admin_port")
    if not parsed.engines:
        raise ConfigError("name the inference server: polar gateway --engine http://127.0.0.1:8000 (none at hand? polar engine tiny-qwen3)")
    return parsed
