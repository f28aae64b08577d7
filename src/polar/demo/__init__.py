"""`polar demo`: a real harness on bundled tasks with the bundled model, on a CPU, and what was captured of it.

`play` starts the parts and runs the sessions, `polar.trajectory` makes training rows of what was recorded, `show` prints.
"""

from __future__ import annotations

import asyncio
import importlib.util
import time
from pathlib import Path

from rich.console import Console

from polar.demo import play, show
from polar.engine.child import running_engine
from polar.errors import ConfigError
from polar.export import label_line
from polar.harness import install, named
from polar.records import Session
from polar.tokens.tokenizer import load_tokenizer
from polar.trajectory import build

ASSETS = Path(__file__).parents[1] / "assets"


def run(sessions: int = 8, output: Path | None = None, seed: int = 0, program: str = "polar") -> int:
    """Runs the demo and prints it. `seed` picks the tasks; `output` is a new or empty folder (default: one in `runs/`).
    `program` is how the user calls this command, for the hints at the end.

    Returns 0 when the machinery worked, also where tasks were failed; 1 where a session made no model call at all. Raises
    `PolarError` where engine, gateway, harness or a verifier could not do their work.
    """
    if sessions < 1:
        raise ConfigError("--sessions must be at least 1")
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"polar demo needs {' and '.join(missing)}: pip install -e '.[demo]' (in Polar's folder)")
    folder = _folder(output)
    return asyncio.run(_demo(sessions, folder, seed, program, Console()))


def _folder(output: Path | None) -> Path:
    folder = output or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder; name another with --output")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder.resolve()


async def _demo(sessions: int, folder: Path, seed: int, program: str, console: Console) -> int:
    began = time.monotonic()
    harness = named(play.HARNESS)
    tasks = play.choose(sessions, seed)
    console.print(f"[bold]polar demo[/]: {sessions} sessions of {harness.title} {harness.version} on bundled tasks, model {play.MODEL}")
    with console.status("starting") as status:

        def progress(line: str) -> None:
            status.update(line)
            console.print(f"[dim]{time.monotonic() - began:5.1f} s  {line}[/]", highlight=False)

        installing = asyncio.create_task(asyncio.to_thread(install, play.HARNESS, progress=progress))
        progress(f"starting polar engine {play.MODEL}")
        async with running_engine(play.MODEL, folder) as url, play.gateway(url, folder, progress) as gateway:
            installation = await installing
            served = gateway.models.all[0]
            progress(f"gateway at http://{gateway.config.host}:{gateway.config.port}, mode {served.mode}; running {sessions} sessions")

            def done(one: play.Played) -> None:
                verdict = "[green]passed[/]" if one.grade.passed else "[red]failed[/]"
                progress(f"{one.task.name}: {verdict}, {len(one.completions)} turns, {one.run.duration_s:.1f} s")

            played = await play.play_all(gateway, installation, tasks, folder, done)
    rewards = [label_line(one.session_id, reward=one.grade.reward, outcome="graded") for one in played]
    (folder / "rewards.jsonl").write_bytes(b"".join(rewards))
    tokenizer = load_tokenizer(ASSETS / play.MODEL)
    built = [(one, build(Session(one.session_id, b"", b"", metadata={"harness": play.HARNESS}), one.completions)) for one in played]
    show.show_all(console, built, tokenizer.decode, folder, program)
    console.print(f"[dim]{time.monotonic() - began:.0f} s in all[/]", highlight=False)
    silent = [one for one in played if not one.completions]
    for one in silent:
        console.print(f"[red]{one.session_id} made no model call[/]: {one.run.problem}; see {one.run.stderr}", highlight=False)
    return 1 if silent else 0
