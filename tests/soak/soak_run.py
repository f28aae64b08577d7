"""Carries out a plan, and checks what came of it."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from soak_check import Seen, check, nothing_runs_on
from soak_plan import Ended, Plan
from soak_world import World, world

from polar.rollout.models import Event


@dataclass(frozen=True, slots=True)
class Report:
    """Of a run that passed every check."""

    plan: Plan
    seconds: float
    table: dict[str, Ended]
    struck: Counter[str]
    attempts: int
    codes: Counter[str]
    """Why attempts failed."""
    calls: int
    acknowledged: int
    """Answers that agents received whole, in all attempts."""
    starts: dict[str, int]
    """How often each process was started."""
    events: int

    def lines(self) -> list[str]:
        outcomes = Counter(one.outcome for one in self.table.values())
        return [
            f"seed {self.plan.seed}: {self.plan.sessions} sessions in {self.seconds:.0f} s, as planned",
            f"outcomes: {_counts(outcomes)}",
            f"faults that struck: {_counts(self.struck)}",
            f"attempts: {self.attempts}; failed ones by code: {_counts(self.codes)}",
            f"engine calls: {self.calls}; answers that agents received whole, all in the stores: {self.acknowledged}",
            f"starts: {_counts(Counter(self.starts))}; events without a gap: {self.events}",
        ]


def _counts(found: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "none"


async def carry_out(
    plan: Plan, folder: Path, tokenizer_dir: Path, *, timeout_s: float, say: Callable[[str], None] = lambda line: None
) -> Report:
    """Raises `AssertionError` that says which session, or what else, is not as planned."""
    heard: list[Event] = []
    async with world(plan, folder, tokenizer_dir, say=say) as found, found.client() as client:
        listening = asyncio.create_task(_listen(found, heard))
        try:
            async with asyncio.timeout(timeout_s):
                for task in plan.tasks:
                    await client.submit(found.request(task))
                await client.wait(*(task.name for task in plan.tasks))
                await found.mended()
        except TimeoutError:
            raise AssertionError(await _standing(found, heard)) from None
        seconds = time.monotonic() - found.began
        await nothing_runs_on(found)
        seen = await Seen.of(found, client, heard)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await client.aclose()
        await found.stop()
        try:
            table = await check(found, seen)
        except AssertionError:
            await asyncio.to_thread(_keep_databases, found)
            raise
    failed = Counter(str(event.data["error_code"]) for event in seen.failures)
    processes = {one.name: one.starts for one in (found.service, *(node.process for node in found.nodes))}
    return Report(
        plan,
        seconds,
        table,
        Counter(fault.kind for _, fault, _ in found.struck),
        plan.sessions + len(seen.failures),
        failed,
        found.calls.total(),
        len(seen.witnessed),
        processes,
        len(seen.events),
    )


def _keep_databases(found: World) -> None:
    """Beside the logs: their disks are about to go."""
    for file in (found.service_disk.folder / "rollout.db", *(node.store for node in found.nodes)):
        shutil.copyfile(file, found.folder / "logs" / f"{file.parent.name}-{file.name}")


async def _listen(found: World, heard: list[Event]) -> None:
    """One stream of events over all that happens."""
    async with found.client() as client:
        async for event in client.events(after=0):
            heard.append(event)


async def _standing(found: World, heard: list[Event]) -> str:
    """What has not ended, for people."""
    lines = ["not all sessions have ended:"]
    async with found.client() as client:
        for task in found.plan.tasks:
            async for row in client.sessions(task.name):
                if row["status"] not in ("COMPLETED", "ERROR", "TIMEOUT"):
                    lines.append(f"  {task.name} ({task.agent.kind}): {row}")
    failures = Counter((event.data["error_code"], event.data["error"]) for event in heard if event.type == "session.attempt_failed")
    lines += [f"{count} attempts failed: {code}: {why}" for (code, why), count in failures.most_common(10)]
    lines += [f"{at:6.1f} s {fault}" for at, fault, _ in found.struck]
    for process in (found.service, *(node.process for node in found.nodes)):
        lines += [f"--- {process.name}:", process.tail()]
    return "\n".join(lines)
