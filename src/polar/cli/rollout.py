"""`polar submit|status|logs|cancel|wait`: what a user does with a running rollout service. Where it is: `--url`, else `POLAR_URL`, else
the settings file; its token: `POLAR_TOKEN`, else that file, else the state directory.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.markup import escape
from rich.table import Table

from polar.cli.output import err, out, say
from polar.errors import ConfigError

if TYPE_CHECKING:
    from rich.status import Status

    from polar.rollout.client import AsyncClient, Client
    from polar.rollout.models import TaskResult, TaskStatus

Url = Annotated[str | None, typer.Option("--url", help="The rollout service; default: POLAR_URL, polar.yaml, or http://127.0.0.1:8080.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

PATIENCE_S = 10.0
"""How long a service that does not answer is waited for."""
PROGRESS_S = 1.0


def register(app: typer.Typer) -> None:
    """Adds these commands to `polar`."""
    for command in (submit, status, logs, cancel, wait):
        app.command()(command)


def submit(
    file: Annotated[Path, typer.Argument(help="A task, or a list of tasks, as JSON or YAML; - reads standard input.")],
    wait_for: Annotated[bool, typer.Option("--wait", help="Wait for the results, as polar wait does.")] = False,
    as_json: AsJson = False,
    url: Url = None,
) -> None:
    """Submit tasks to the rollout service."""
    with connected(url) as client:
        ids = []
        for task in read_tasks(file):
            ids.append(client.submit(task))
            say(f"{ids[-1]} submitted")  # at once: the next may be refused
        if as_json and not wait_for:
            typer.echo(orjson.dumps([{"task_id": name, "status": "running"} for name in ids]).decode())
        for name in ids:
            _say_waits(name, client.task(name, results=False).waits_for)
        if not as_json and not wait_for:
            say(f"follow with: polar wait {' '.join(ids)}", style="dim")
    if wait_for:
        _wait(url, ids, as_json)


def status(
    task: Annotated[str | None, typer.Argument(help="A task; default: the whole service.")] = None, as_json: AsJson = False, url: Url = None
) -> None:
    """Show the service, or one task and its sessions."""
    with connected(url) as client:
        if task is None:
            _service(client, as_json)
        else:
            _task(client, task, as_json)


def logs(
    session: Annotated[str, typer.Argument(help="A session's id.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the harness ends.")] = False,
    url: Url = None,
) -> None:
    """Print what a session's harness printed."""
    with connected(url) as client:
        for text in client.log(session, follow=follow):
            sys.stdout.write(text)
            sys.stdout.flush()


def cancel(
    task: Annotated[str | None, typer.Argument(help="A task: all of its sessions that have not ended.")] = None,
    session: Annotated[str | None, typer.Option("--session", help="One session instead.")] = None,
    url: Url = None,
) -> None:
    """Cancel a task, or one session."""
    if (task is None) == (session is None):
        raise ConfigError("name a task, or one session with --session")
    with connected(url) as client:
        if task is not None:
            said = client.cancel(task)
            out.print(f"{task} {said['status']}: {said['cancelled_sessions']} sessions cancelled", highlight=False)
        elif session is not None:
            out.print(f"{session} {'cancelled' if client.cancel_session(session) else 'had ended already'}", highlight=False)


def wait(tasks: Annotated[list[str], typer.Argument(help="Tasks to wait for.")], as_json: AsJson = False, url: Url = None) -> None:
    """Wait for tasks, showing how they get on. Exits with 1 if a session failed by infrastructure or was cancelled."""
    _wait(url, tasks, as_json)


# --- parts ------------------------------------------------------------------------------------------------------------


def service(url: str | None) -> tuple[str, str | None]:
    """Where the service is, and its token where one was set; `None`: the client looks for what a service of this user keeps."""
    import os

    from polar.rollout import settings
    from polar.rollout.client import service_url

    token = os.environ.get("POLAR_TOKEN")
    if url is None and not os.environ.get("POLAR_URL") and settings.find(None) is not None:
        found = settings.load()
        url, token = found.rollout_url, token or found.rollout.token
    return service_url(url), token


@contextmanager
def connected(url: str | None) -> Iterator[Client]:
    """The service's client."""
    from polar.rollout.client import Client

    place, token = service(url)
    with Client(place, token, patience_s=PATIENCE_S) as client:
        yield client


def read_tasks(file: Path) -> list[dict[str, Any]]:
    """The tasks of a file. Raises `ConfigError` where it has none."""
    import yaml

    if file.is_dir():
        raise ConfigError(f"{file} is a folder; submit takes JSON or YAML. For task folders: polar run --tasks {file} --url SERVICE")
    try:
        found = yaml.safe_load(sys.stdin.read() if str(file) == "-" else file.read_text())  # JSON is YAML
    except (ValueError, yaml.YAMLError) as error:  # ValueError: no text, or no date
        raise ConfigError(f"{file} is neither JSON nor YAML: {' '.join(str(error).split())}") from error
    tasks = found if isinstance(found, list) else [found]
    if not tasks or not all(isinstance(task, dict) for task in tasks):
        raise ConfigError(f"{file} must hold a task (an object with task_id, instruction, agent), or a list of them")
    return tasks


def _service(client: Client, as_json: bool) -> None:
    told = client.status()
    if as_json:
        typer.echo(orjson.dumps(told).decode())
        return
    counted = ", ".join(f"{count} {state}" for state, count in told["tasks"].items()) or "none"
    waiting = told["pending_sessions"]
    running = told["sessions"].get("running", 0)
    out.print(f"tasks: {counted}\nsessions: {waiting} waiting, {running} running", highlight=False)
    table = Table("node", "status", "sessions", "run workers", "address")
    for node in told["nodes"]:
        table.add_row(node["node_id"], node["status"], str(node["attempts"]), str(node["max_run_workers"]), escape(node["gateway_url"]))
    out.print(table)
    shown = Table("task", "status", "harness", "done", "usable")
    for number, row in enumerate(client.tasks()):
        if number == 20:
            break
        done = f"{row['completed_sessions']}/{row['total_sessions']}"
        shown.add_row(row["task_id"], row["status"], row["harness"], done, str(row["usable_sessions"]))
        _say_waits(row["task_id"], row.get("waits_for"))
    out.print(shown)


def _task(client: Client, name: str, as_json: bool) -> None:
    task = client.task(name, results=False)
    sessions = list(client.sessions(name))
    _say_waits(name, task.waits_for)
    if as_json:
        typer.echo(orjson.dumps({**task.model_dump(exclude={"results"}), "sessions": sessions}).decode())
        return
    out.print(_line(task), highlight=False)
    table = Table("session", "sample", "status", "outcome", "reward", "turns", "tokens", "attempt", "node", "error")
    for one in sessions:
        reward = "" if one["reward"] is None else f"{one['reward']:g}"
        table.add_row(
            one["session_id"],
            str(one["sample"]),
            one["status"],
            one["outcome"] or "",
            reward,
            str(one["turns"]),
            str(one["sampled_tokens"]),
            str(one["attempt"]),
            one["node_id"] or "",
            one["error_code"] or "",
        )
    out.print(table)


def _line(task: TaskStatus) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in task.counts.items() if count)
    return f"{task.task_id} {task.status}: {task.completed_sessions}/{task.total_sessions} sessions ({counts})"


def _wait(url: str | None, ids: list[str], as_json: bool) -> None:
    """Follows tasks to their end and leaves with a code by outcome."""
    from polar.rollout.summary import exit_code

    with err.status("waiting") as shown:
        groups, expected = asyncio.run(_followed(url, ids, as_json, shown))
    raise typer.Exit(exit_code(groups, expected))


async def _followed(url: str | None, ids: list[str], as_json: bool, shown: Status) -> tuple[list[TaskResult], int]:
    """The tasks' results, each told as it comes, and how many sessions there were to be."""
    from polar.rollout.client import AsyncClient

    place, token = service(url)
    groups: list[TaskResult] = []
    async with AsyncClient(place, token, patience_s=PATIENCE_S) as client:
        open_tasks = {name: await client.task(name, results=False) for name in ids}
        for name, task in open_tasks.items():
            _say_waits(name, task.waits_for)
        expected = sum(task.total_sessions for task in open_tasks.values())
        progress = asyncio.create_task(_progress(client, open_tasks, shown))
        try:
            async for group in client.groups(ids):
                groups.append(group)
                open_tasks[group.task_id] = await client.task(group.task_id, results=False)
                if as_json:
                    typer.echo(group.model_dump_json())
                else:
                    out.print(_ended(group), highlight=False)
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
    return groups, expected


async def _progress(client: AsyncClient, tasks: dict[str, TaskStatus], shown: Status) -> None:
    """Keeps the line under the output true, until it is cancelled."""
    while True:
        for name in [name for name, task in tasks.items() if task.status == "running"]:
            before, tasks[name] = tasks[name].waits_for, await client.task(name, results=False)
            if tasks[name].waits_for != before:
                _say_waits(name, tasks[name].waits_for)
        done = sum(task.completed_sessions for task in tasks.values())
        total = sum(task.total_sessions for task in tasks.values())
        ended = sum(task.status != "running" for task in tasks.values())
        shown.update(f"{done}/{total} sessions, {ended}/{len(tasks)} tasks have ended")
        await asyncio.sleep(PROGRESS_S)


def _say_waits(task: str, why: str | None) -> None:
    """On stderr: a misspelled backend, a node that is still to come."""
    if why is not None:
        say(f"{task} waits: {why}", style="yellow")


def _ended(group: TaskResult) -> str:
    rewards = [one.reward for one in group.results if one.reward is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)}" if rewards else "no reward"
    return f"{group.task_id} {group.status}: {len(group.results)} sessions, {mean}"
