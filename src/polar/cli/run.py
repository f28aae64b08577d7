"""`polar run`: tasks times harnesses, rolled out, graded and counted, with everything that it takes started and ended by itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import orjson
import typer

from polar.cli.output import configure_logging
from polar.errors import ConfigError

if TYPE_CHECKING:
    from polar.rollout.campaign import Campaign, Standing
    from polar.rollout.client import AsyncClient
    from polar.rollout.config import PolarConfig
    from polar.rollout.models import TaskResult

BUNDLED = "tiny-qwen3"
"""The model of a run that names no engine. Its answers are short and its tasks small, so its sessions get budgets that fit."""
BUNDLED_OUTPUT, BUNDLED_TURNS, BUNDLED_TOKENS = 256, 10, 1_500
FIRST_ANSWER_S = 5.0
"""How long the service at `--url` may take for its first answer; one that has answered may be restarted later, and is waited for longer."""


@dataclass(frozen=True, slots=True)
class Where:
    """What a run needs to be started: `url` of a running service, or else the engine of one of its own."""

    url: str | None
    engine: str | None
    model: str | None
    at_once: int
    folder: Path

    @property
    def bundled(self) -> bool:
        return self.url is None and self.engine in (None, BUNDLED)


def run(
    tasks: Annotated[
        str, typer.Option("--tasks", "-t", help="Task sets (polar tasks list), folders or files; several with commas.")
    ] = "demo",
    harness: Annotated[
        str, typer.Option("--harness", "-h", help="Harnesses, with commas; also oracle and noop, which need no model.")
    ] = "pi",
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Sessions of each task and harness: the size of a group.")] = 4,
    engine: Annotated[
        str | None, typer.Option(help="URL of an inference server, or a model that polar engine serves. Default: the bundled one.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name at the engine; default: the first that it serves.")] = None,
    runtime: Annotated[
        str | None,
        typer.Option(
            "--runtime", "-r", help="local, bubblewrap, docker (Podman too) or apptainer. Default: local; with --url what its nodes have."
        ),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image, where the task names none.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many tasks.")] = None,
    split: Annotated[Literal["train", "held_out"] | None, typer.Option(help="Only tasks of this side.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Sessions that run at the same time.")] = 2,
    timeout: Annotated[float | None, typer.Option(min=1, help="Seconds for the agent; default: what the task says.")] = None,
    max_turns: Annotated[int | None, typer.Option(min=1, help="Model calls of a session.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="The longest answer, in tokens, that a harness is told to ask for.")] = None,
    kind: Annotated[Literal["train", "eval"], typer.Option(help="train: sampling is forced; eval: the harness's own.")] = "train",
    builder: Annotated[str, typer.Option(help="prefix_merging or per_request.")] = "prefix_merging",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where stores, logs and results go; default: a new folder in runs/.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Use the rollout service there instead of starting one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    log_level: Annotated[Literal["debug", "info", "warning", "error"], typer.Option(help="debug, info, warning or error.")] = "warning",
) -> None:
    """Roll tasks out through real harnesses, grade them, and show what came of it.

    Exits with 0 if every session was graded or failed by what the model did, with 1 if the infrastructure failed one.
    """
    configure_logging(log_level)
    where = Where(url, engine, model, at_once, new_folder(output))
    fields = {"kind": kind, "builder": {"strategy": builder}, "budget": _given(max_turns=max_turns, agent_seconds=timeout)}
    raise typer.Exit(
        run_tasks(
            tasks,
            [name.strip() for name in harness.split(",") if name.strip()],
            samples,
            where,
            runtime=_given(backend=runtime if url is not None else runtime or "local", image=image),
            limit=limit,
            split=split,
            max_output=max_output,
            fields=fields,
            as_json=as_json,
        )
    )


def run_tasks(
    tasks: str,
    harnesses: list[str],
    samples: int,
    where: Where,
    *,
    runtime: dict[str, Any],
    limit: int | None = None,
    split: Literal["train", "held_out"] | None = None,
    max_output: int | None = None,
    fields: dict[str, Any] | None = None,
    as_json: bool = False,
) -> int:
    """Runs them and prints the summary; the exit code. `fields` are further fields of `TaskRequest`."""
    from polar.rollout.campaign import plan
    from polar.rollout.checks import check_task
    from polar.runtime.spec import RuntimeSpec
    from polar.tasks import find

    spec = RuntimeSpec.model_validate(runtime)
    more = {"timeout_seconds": 600.0, "budget": {}, **(fields or {})}
    if where.bundled:
        more["budget"] = {"max_turns": BUNDLED_TURNS, "max_tokens": BUNDLED_TOKENS, **more["budget"]}
        max_output = max_output or BUNDLED_OUTPUT
    agent = {} if max_output is None else {"settings": {"max_output": max_output}}
    campaign = plan(find(tasks, limit=limit, split=split), harnesses, samples=samples, runtime=spec, agent=agent, **more)
    if where.url is None:  # before anything is started; a service elsewhere checks what it knows
        for request in campaign.requests:
            check_task(request)
    return asyncio.run(_run(campaign, where, spec.backend if where.url is None else None, harnesses, as_json))


async def _run(campaign: Campaign, where: Where, backend: str | None, harnesses: list[str], as_json: bool) -> int:
    from polar.cli.run_report import Screen, report
    from polar.rollout.campaign import carry_out
    from polar.rollout.summary import exit_code

    began = time.monotonic()
    if backend is not None:
        await _ready(backend)
    where.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    async with AsyncExitStack() as stack:
        with Screen(campaign, where.folder) as screen:
            client = await stack.enter_async_context(_client(where, harnesses, screen.say))
            standing: Standing = await carry_out(client, campaign, on_event=screen.event, on_group=screen.group)
            (where.folder / "results.jsonl").write_bytes(b"".join(_lines(standing.groups)))
    report(standing, campaign, where.folder, time.monotonic() - began, as_json)
    return exit_code(standing.groups, campaign.sessions)


async def _ready(backend: str) -> None:
    """Raises `ConfigError` at once where the backend cannot work here, rather than after every session has failed."""
    from polar.runtime import named

    why = await named(backend).unavailable()
    if why is not None:
        raise ConfigError(f"--runtime {backend}: {why}")


@asynccontextmanager
async def _client(where: Where, harnesses: list[str], progress: Any) -> AsyncIterator[AsyncClient]:
    """A client of the service: the one at `where.url`, or one of our own with its engine and node."""
    from polar.rollout.client import AsyncClient

    if where.url is not None:
        async with AsyncClient(where.url, patience_s=FIRST_ANSWER_S) as first:
            await first.status()
        async with AsyncClient(where.url) as client:
            yield client
        return
    from polar.engine.child import running_engine
    from polar.harness import install, registered
    from polar.rollout.stack import serving

    installing = [
        asyncio.create_task(asyncio.to_thread(install, name, progress=progress))
        for name in harnesses
        if name in registered() and registered()[name].package is not None
    ]
    async with AsyncExitStack() as stack:
        engine_url = where.engine or BUNDLED
        if "://" not in engine_url:
            progress(f"starting polar engine {engine_url}")
            engine_url = await stack.enter_async_context(running_engine(engine_url, where.folder))
        config = _config(where, engine_url)
        running = await stack.enter_async_context(serving(config, where.folder / "node", progress=progress))
        for task in installing:
            await task
        yield await stack.enter_async_context(AsyncClient(running.url, running.token))


def _config(where: Where, engine_url: str) -> PolarConfig:
    """A service and a node of this run's own, on free ports, with everything in its folder."""
    import secrets

    from polar.gateway.config import EngineConfig
    from polar.rollout.config import NodeConfig, NodesConfig, PolarConfig, RolloutConfig

    folder = where.folder
    node = NodeConfig(
        id="local",
        port=0,
        control_port=0,
        engines={"default": EngineConfig(urls=[engine_url], model=where.model)},
        gateway={"store": str(folder / "polar.db"), "shutdown_s": 2.0},
        max_init_workers=max(2, where.at_once),
        max_run_workers=where.at_once,
        max_postrun_workers=max(2, where.at_once),
        work_dir=str(folder / "node" / "work"),
        artifacts_dir=str(folder / "artifacts"),
        token=secrets.token_urlsafe(24),
    )
    rollout = RolloutConfig(port=0, store=str(folder / "rollout.db"), save_dir=str(folder / "results"), token=secrets.token_urlsafe(24))
    return PolarConfig(rollout=rollout, gateway=NodesConfig(nodes=[node], heartbeat_interval_seconds=1.0))


def new_folder(output: Path | None) -> Path:
    """Where a run puts everything: as given (empty or not there yet), else a new one in `runs/`. It is made once the run begins."""
    folder = output or Path("runs") / time.strftime("run-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; name another with --output")
    return folder.resolve()


def _lines(groups: list[TaskResult]) -> list[bytes]:
    return [orjson.dumps(result.model_dump(mode="json")) + b"\n" for group in groups for result in group.results]


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
