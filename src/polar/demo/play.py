"""Starts the parts of the demo and runs its sessions: engine, gateway, harness, tasks. Prints nothing itself.

The engine is a process of its own, as in real use; the gateway runs in this one. What a session was and how it ended is a
`Played`; a harness that fails on a task is an outcome, an engine or gateway that fails is an error.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from polar.gateway.config import Budgets, EngineConfig, GatewayConfig
from polar.gateway.gateway import Gateway
from polar.gateway.serve import serving
from polar.harness import Endpoint, Installation, Options, RunResult, launch
from polar.records import Completion
from polar.tasks import Grade, Task, bundled, grade, prepare

MODEL = "tiny-qwen3"
HARNESS = "pi"
OPTIONS = Options(context=16_384, max_output=256, retries=1)
BUDGETS = Budgets(max_turns=10, max_tokens=1_500, max_seconds=120)
AT_ONCE = 2

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Played:
    """One session: its task, how the harness ended, the grade, and every completion that the store holds of it."""

    session_id: str
    task: Task
    run: RunResult
    grade: Grade
    completions: tuple[Completion, ...]
    workspace: Path


def choose(sessions: int, seed: int) -> list[Task]:
    """Tasks for the sessions: every bundled task once in random order before any comes twice."""
    rng = random.Random(seed)
    chosen: list[Task] = []
    while len(chosen) < sessions:
        tasks = bundled()
        rng.shuffle(tasks)
        chosen += tasks
    return chosen[:sessions]


@asynccontextmanager
async def gateway(engine_url: str, folder: Path, progress: Progress) -> AsyncIterator[Gateway]:
    """A gateway before that engine, on free ports, with its store in `folder/polar.db`."""
    config = GatewayConfig(
        engines={"default": EngineConfig(urls=[engine_url], mode="tokens", renderer="qwen3")},
        port=0,
        admin_port=0,
        store=str(folder / "polar.db"),
        budgets=BUDGETS,
    )
    async with serving(Gateway(config), progress=progress) as running:
        yield running


async def play(gateway: Gateway, installation: Installation, task: Task, folder: Path) -> Played:
    """One session from key to grade. `folder` gets the workspace and the harness's private home."""
    workspace = folder / "work"
    prepare(task, workspace)
    record, key = await gateway.sessions.create(metadata={"task": task.name, "harness": HARNESS, "split": task.split})
    try:
        run = await launch(
            HARNESS,
            task.instruction,
            Endpoint(gateway.base_url(key), key, "openai_chat", MODEL),
            cwd=workspace,
            home=folder / "home",
            timeout_s=task.agent_timeout_s,
            options=OPTIONS,
            installation=installation,
        )
    finally:
        await gateway.sessions.close(record.id)
    graded = await asyncio.to_thread(grade, task, workspace)
    completions = tuple([completion async for completion in gateway.store.completions(record.id)])
    return Played(record.id, task, run, graded, completions, workspace)


async def play_all(
    gateway: Gateway, installation: Installation, tasks: list[Task], folder: Path, done: Callable[[Played], None]
) -> list[Played]:
    """All sessions, `AT_ONCE` at a time; `done` is called as each ends. In the order of `tasks`."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, task: Task) -> Played:
        async with slots:
            played = await play(gateway, installation, task, folder / "sessions" / f"{number:02d}-{task.name}")
        done(played)
        return played

    return await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks)))
