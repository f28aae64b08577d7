"""The first half of `polar demo --quick`: sessions of a real harness with the bundled model, and what was captured of them.

`play` starts the parts and runs the sessions, `polar.trajectory` makes training rows of what was recorded, `show` prints.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from rich.console import Console

from polar.demo import play, show
from polar.engine.child import running_engine
from polar.export import label_line
from polar.harness import install, named
from polar.records import Session
from polar.tokens.tokenizer import load_tokenizer
from polar.trajectory import build

ASSETS = Path(__file__).parents[1] / "assets"


def capture(console: Console, sessions: int, folder: Path, seed: int, program: str) -> int:
    """Runs them and prints. Returns 0 when the machinery worked, also where tasks were failed; 1 where a session made no model call at all.
    Raises `PolarError` where engine, gateway, harness or a verifier could not do their work."""
    return asyncio.run(_capture(console, sessions, folder, seed, program))


async def _capture(console: Console, sessions: int, folder: Path, seed: int, program: str) -> int:
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
    silent = [one for one in played if not one.completions]
    for one in silent:
        console.print(f"[red]{one.session_id} made no model call[/]: {one.run.problem}; see {one.run.stderr}", highlight=False)
    return 1 if silent else 0
