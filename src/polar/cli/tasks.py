"""`polar tasks`: look at tasks, check that they can be solved and not without solving them, run one."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from polar.cli.output import out, say
from polar.errors import ConfigError

if TYPE_CHECKING:
    from polar.runtime.spec import RuntimeSpec
    from polar.tasks.request import AnyTask
    from polar.tasks.validate import Validation

app = typer.Typer(help="List, look at, validate and run tasks.", no_args_is_help=True)

Source = Annotated[
    str, typer.Argument(help="A set (demo, coding, swe, all), a bundled task, a Harbor folder, or a .jsonl, .json or .parquet file.")
]
Only = Annotated[list[str] | None, typer.Option("--only", help="Only this task of it; may be given several times.")]
SplitOf = Annotated[str | None, typer.Option("--split", help="train or held_out.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Backend = Annotated[str, typer.Option("--runtime", help="local, bubblewrap, docker, apptainer.")]
Image = Annotated[str | None, typer.Option("--image", help="Container image; {task} in it becomes the task's name.")]


@app.command("list")
def list_tasks(
    source: Annotated[str | None, typer.Argument(help="A set, a folder or a file; default: the bundled sets.")] = None,
    split: SplitOf = None,
    as_json: AsJson = False,
) -> None:
    """List the bundled task sets, or the tasks of one source."""
    from polar.tasks import SETS

    if source is None:
        sets = [(one.name, one.tasks(), one.description) for one in SETS.values()]
        if as_json:
            _print([{"set": name, "tasks": len(tasks), "description": description} for name, tasks, description in sets])
            return
        table = Table("set", "tasks", "train", "held out", "what")
        for name, tasks, description in sets:
            splits = Counter(task.split for task in tasks)
            table.add_row(name, str(len(tasks)), str(splits["train"]), str(splits["held_out"]), description)
        out.print(table)
        return
    tasks = found(source, split=split)
    if as_json:
        _print([_row(task) for task in tasks])
        return
    table = Table("task", "split", "category", "difficulty", "instruction")
    for task in tasks:
        first = task.instruction.strip().splitlines()[0].lstrip("# ")
        shown = first if len(first) <= 70 else first[:67] + "..."
        table.add_row(
            *map(escape, (task.name, task.split, *(str(task.metadata.get(key, "")) for key in ("category", "difficulty")), shown))
        )
    out.print(table)


@app.command()
def show(source: Source, only: Only = None, as_json: AsJson = False) -> None:
    """Show a task: its instruction, its files, who judges it, and what in it is not heeded."""
    tasks = found(source, only=only)
    if len(tasks) > 1:
        raise ConfigError(f"{source} has {len(tasks)} tasks: name one with --only ({', '.join(task.name for task in tasks[:5])}, ...)")
    facts = _facts(tasks[0])
    if as_json:
        _print(facts)
        return
    out.print(f"[bold]{escape(facts['task'])}[/]  {facts['split']}", highlight=False)
    for key in ("evaluator", "timeout_seconds", "solution", "folder"):
        if facts[key] is not None:
            out.print(f"{key.replace('_', ' '):16} {escape(str(facts[key]))}", highlight=False, soft_wrap=True)
    for name in facts["files"]:
        out.print(f"{'file':16} {escape(name)}", highlight=False, soft_wrap=True)
    for warning in facts["warnings"]:
        say(f"warning: {warning}", "yellow")
    out.print()
    out.print(facts["instruction"], markup=False, highlight=False)


@app.command()
def validate(
    source: Source,
    only: Only = None,
    split: SplitOf = None,
    runtime: Backend = "local",
    image: Image = None,
    jobs: Annotated[int, typer.Option(min=1, help="How many tasks at a time.")] = 2,
    repeats: Annotated[int, typer.Option(min=1, help="How often each agent runs: twice shows chance.")] = 2,
    logs: Annotated[Path | None, typer.Option(help="Keep the logs of every run in this folder.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run each task's reference solution and an agent that does nothing. Exits with 1 unless they get 1 and 0, each time."""
    from polar.tasks.validate import summary
    from polar.tasks.validate import validate as run_validation

    tasks = found(source, only=only, split=split)
    for task in tasks:
        for warning in task.warnings:
            say(f"{task.name}: {warning}", "yellow")
    done = 0

    def progress(one: Validation) -> None:
        nonlocal done
        done += 1
        said = f"[{done}/{len(tasks)}] {one.task}: {'ok' if one.ok else '; '.join(one.problems)} ({one.seconds:.1f} s)"
        say(said, "dim" if one.ok else "red")

    results = asyncio.run(run_validation(tasks, sandbox(runtime, image), jobs=jobs, repeats=repeats, folder=logs, progress=progress))
    if as_json:
        _print(summary(results))
    else:
        out.print(_table(results))
    raise typer.Exit(0 if all(one.ok for one in results) else 1)


@app.command("run")
def run_one(
    source: Source,
    harness: Annotated[str, typer.Option(help="Which harness works on it; several are separated by commas; also oracle and noop.")] = "pi",
    samples: Annotated[int, typer.Option(min=1, help="Sessions a task and harness.")] = 1,
    runtime: Backend = "local",
    image: Image = None,
    engine: Annotated[str | None, typer.Option(help="The inference server; default: the bundled model.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most so many tasks.")] = None,
    as_json: AsJson = False,
) -> None:
    """Roll tasks out once and show what came of it: `polar run` in short."""
    from polar.cli.run import Where, new_folder, run_tasks

    harnesses = [name.strip() for name in harness.split(",") if name.strip()]
    sandbox = {"backend": runtime, **({} if image is None else {"image": image})}
    where = Where(None, engine, None, 2, new_folder(None))
    raise typer.Exit(run_tasks(source, harnesses, samples, where, runtime=sandbox, limit=limit, as_json=as_json))


# --- parts ------------------------------------------------------------------------------------------------------------


def found(source: str, *, only: list[str] | None = None, split: str | None = None) -> list[AnyTask]:
    """The tasks of a source. Raises `ConfigError`."""
    from polar.tasks import find

    if split not in (None, "train", "held_out"):
        raise ConfigError("--split must be train or held_out")
    return find(source, only=only or (), split=cast("Literal['train', 'held_out'] | None", split))


def sandbox(backend: str, image: str | None) -> RuntimeSpec:
    """Agents and evaluators of a validation call no model, so nothing inside needs a network."""
    from polar.runtime import RuntimeSpec, backend_of

    spec = RuntimeSpec(backend=backend, image=image)
    return spec if backend_of(spec).shares_host_network else spec.model_copy(update={"network": "none"})


def _row(task: AnyTask) -> dict[str, Any]:
    return {
        "task": task.name,
        "split": task.split,
        "metadata": {key: value for key, value in task.metadata.items() if key != "polar"},
        "instruction": task.instruction,
        "warnings": list(task.warnings),
    }


def _facts(task: AnyTask) -> dict[str, Any]:
    """Everything that `show` tells. A task whose sandbox only an image can be is looked at as one of a docker runtime."""
    from polar.runtime import RuntimeSpec

    fields = task.fields(RuntimeSpec(backend="docker"))
    evaluator, folder = fields.get("evaluator"), fields.get("task_folder")
    strategy = evaluator.get("strategy") if isinstance(evaluator, dict) else getattr(evaluator, "strategy", None)
    environment = Path(folder) / "environment" if folder else None
    files = [] if environment is None else sorted(path for path in environment.rglob("*") if path.is_file())
    return {
        **_row(task),
        "evaluator": strategy,
        "timeout_seconds": fields.get("timeout_seconds"),
        "solution": None if task.oracle() is None else ", ".join(task.oracle() or ()),
        "folder": folder,
        "files": [path.relative_to(Path(folder)).as_posix() for path in files] if folder else [],
    }


def _table(results: list[Validation]) -> Table:
    table = Table("task", "oracle", "no-op", "seconds", "")
    for one in results:
        rewards = [_rewards(one.rewards("oracle")), _rewards(one.rewards("noop"))]
        verdict = "[green]ok[/]" if one.ok else f"[red]{escape('; '.join(one.problems))}[/]"
        table.add_row(escape(one.task), *rewards, f"{one.seconds:.1f}", verdict)
    return table


def _rewards(rewards: list[float | None]) -> str:
    return ", ".join("none" if reward is None else f"{reward:g}" for reward in rewards)


def _print(value: Any) -> None:
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode())
