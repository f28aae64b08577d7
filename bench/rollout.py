"""What the rollout service and a node cost, and what stages are worth. One run, three questions; the simulated parts are named.

    python bench/rollout.py [--sessions N] [--open N] [--arms ...] [--seed N] [--out FILE]

1. **Throughput.** Sessions a second, from submission to the last durable result, of a trivial harness (one model call) on this machine:
   in the simulated sandbox, where only Polar's own work is left, and in `local` and `bubblewrap`, where real processes run.
2. **Open sessions.** Memory of service and node for each session that waits, and for each of 1,000 that run at once: all of them in their
   tools, then all of them inside their second model call; then all go on, and the time until all are done.
3. **Stages.** How busy an engine of S slots is kept by agents whose times are drawn from `simulated/workload.py`, with Polar's stages and
   without: then one pool of workers takes each session through init, run, evaluation and teardown. Both are the same service and node;
   "without" never lets more sessions in than its pool has workers.

Service, node, engine and agent programs are processes of their own; the database is SQLite, synced at each commit, as shipped. CPU
seconds a session are the figure to compare on a busy machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from simulated.sandbox import AGENT
from simulated.stack import Running, running
from simulated.workload import STATED, Session, draw

KIB, MIB = 1 << 10, 1 << 20
GROUP = 16
SIMULATED = {"import_path": "simulated.sandbox:Sandbox"}
ONE_CALL = "[[0.0, 0.0]]"
HELD = '[[0.0, "hold"], ["hold", 0.0]]'
CURL = (
    "curl -sf -o answer.json -H 'content-type: application/json' -H \"authorization: Bearer $OPENAI_API_KEY\" "
    '-d \'{"model": "any", "messages": [{"role": "user", "content": "work 0.0"}]}\' "$OPENAI_BASE_URL/chat/completions"'
)
"""The trivial harness where processes are real: one call, and a file that changes."""
SLOTS = 16
RUN, INIT, POST = 2 * SLOTS, SLOTS // 2, SLOTS
"""An agent of the workload spends a third of its time in its tools: twice as many agents as slots keep the slots full. Init and post-run
workers are what that throughput needs by the workload's means, and a fifth more."""


def task(name: str, samples: int, instruction: str, runtime: dict[str, Any], *, command: str = AGENT, **more: Any) -> dict[str, Any]:
    return {
        "task_id": name,
        "instruction": instruction,
        "num_samples": samples,
        "agent": {"custom_shell": command},
        "runtime": runtime,
        "evaluator": {"strategy": "simulated.sandbox:Waits"},
        **more,
    }


def groups(prefix: str, sessions: int, instruction: str, runtime: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    sizes = [GROUP] * (sessions // GROUP) + ([sessions % GROUP] if sessions % GROUP else [])
    return [task(f"{prefix}-{number}", size, instruction, runtime, **more) for number, size in enumerate(sizes)]


async def submit(stack: Running, tasks: Iterable[dict[str, Any]]) -> list[str]:
    return [await stack.client.submit(one) for one in tasks]


async def ended(stack: Running, names: Sequence[str]) -> None:
    """Waits for these tasks; says so, and stops, if a session was not graded."""
    await stack.client.wait(*names, timeout_s=1200)
    outcomes: Counter[str] = Counter()
    for name in names:
        outcomes.update((await stack.client.task(name, results=False)).counts)
    outcomes = +outcomes
    if set(outcomes) != {"graded"}:
        raise SystemExit(f"not all sessions were graded: {dict(outcomes)}; see {stack.folder}")


# --- 1. throughput ---------------------------------------------------------------------------------------------------


async def throughput(folder: Path, backend: str, sessions: int, at_once: int) -> dict[str, Any]:
    runtime, command = (SIMULATED, AGENT) if backend == "simulated" else ({"backend": backend}, CURL)
    node = {"max_init_workers": at_once, "max_run_workers": at_once, "max_postrun_workers": at_once}
    async with running(folder, node=node) as stack:
        await stack.engine(slots=None)
        await ended(stack, await submit(stack, groups("warm", 2 * GROUP, ONE_CALL, runtime, command=command)))
        tasks = groups("go", sessions, ONE_CALL, runtime, command=command)
        stack.start_cpu()
        began = time.monotonic()
        names = await submit(stack, tasks)
        submitted = time.monotonic()
        await stack.client.wait(*names, timeout_s=1200)
        seconds, cpu = time.monotonic() - began, stack.cpu_s()
        await ended(stack, names)
    return {
        "sandbox": backend,
        "sessions": sessions,
        "at once": at_once,
        "sessions/s": sessions / seconds,
        "submit s": submitted - began,
        **{f"{name} ms": 1000 * cpu[name] / sessions for name in ("service", "node", "engine", "agents", "client")},
    }


# --- 2. open sessions ------------------------------------------------------------------------------------------------


async def open_at_once(folder: Path, sessions: int) -> dict[str, Any]:
    node = {"max_init_workers": 16, "max_run_workers": sessions, "max_postrun_workers": 16, "max_ready": 0}
    async with running(folder, node=node) as stack:
        await stack.engine(slots=None)
        await ended(stack, await submit(stack, groups("warm", 4 * GROUP, ONE_CALL, SIMULATED)))
        found: dict[str, Any] = {"sessions": sessions}

        service = stack.memory("service")
        parked = await submit(stack, groups("parked", sessions, ONE_CALL, {"backend": "nowhere"}))
        await asyncio.sleep(2.0)
        found["service KiB a waiting session"] = (stack.memory("service") - service) / sessions / KIB
        for name in parked:
            await stack.client.cancel(name)

        service, node_memory = stack.memory("service"), stack.memory("node")
        await stack.engine(slots=None)
        began = time.monotonic()
        names = await submit(stack, groups("open", sessions, HELD, SIMULATED))
        await reached(stack, "calls", sessions)
        found["s until all run"] = time.monotonic() - began
        await asyncio.sleep(2.0)
        found["service KiB a running session"] = (stack.memory("service") - service) / sessions / KIB
        found["node KiB, its tools at work"] = (stack.memory("node") - node_memory) / sessions / KIB
        stack.processes["agents"].send_signal(signal.SIGUSR1)
        await reached(stack, "held", sessions)
        await asyncio.sleep(2.0)
        found["node KiB, in a model call"] = (stack.memory("node") - node_memory) / sessions / KIB
        stack.start_cpu()
        await asyncio.sleep(5.0)
        cpu = stack.cpu_s()
        found["service CPU % while all wait"] = 20 * cpu["service"]
        found["node CPU % while all wait"] = 20 * cpu["node"]
        began = time.monotonic()
        await stack.engine(let_go=True)
        await ended(stack, names)
        found["s until all are done"] = time.monotonic() - began
        found |= {f"{name} peak MiB": stack.peak(name) / MIB for name in ("service", "node")}
    return found


async def reached(stack: Running, what: str, count: int) -> None:
    """Waits until that many sessions are there."""
    deadline = time.monotonic() + 600
    while (now := await stack.engine())[what] < count:
        if time.monotonic() > deadline:
            raise SystemExit(f"only {now[what]} of {count} sessions came there ({what}); see {stack.folder}")
        await asyncio.sleep(0.2)


# --- 3. stages -------------------------------------------------------------------------------------------------------


class Watch:
    """What the service's events say of an arm's sessions, and what the engine's slots had done by then."""

    def __init__(self, stack: Running, total: int, warm: int) -> None:
        self._stack = stack
        self._total, self._warm = total, warm
        self._begun: set[str] = set()
        self.ended = 0
        self.changed = asyncio.Event()
        self.marks: dict[str, dict[str, Any]] = {}

    async def listen(self) -> None:
        async for event in self._stack.client.events():
            if event.type == "session.state_changed" and event.session_id is not None:
                self._begun.add(event.session_id)
                if len(self._begun) == self._total:
                    await self._mark("last begun")
            elif event.type == "session.finished":
                self.ended += 1
                self.changed.set()
                if self.ended >= self._warm:
                    await self._mark("warm")
                if self.ended == self._total:
                    await self._mark("end")

    async def _mark(self, name: str) -> None:
        if name not in self.marks:
            self.marks[name] = await self._stack.engine()

    def busy(self, first: str, last: str) -> float:
        """The share of the slots' time that was used between two marks."""
        a, b = self.marks[first], self.marks[last]
        return float((b["busy_s"] - a["busy_s"]) / (SLOTS * (b["now"] - a["now"])))


async def arm(folder: Path, name: str, work: Sequence[Session], node: dict[str, Any], most: int | None) -> dict[str, Any]:
    """`most`: sessions that are let in at once; `None`: all of them, and the stages hold back what must wait."""
    async with running(folder, node=node) as stack:
        await stack.engine(slots=None)
        await ended(stack, await submit(stack, groups("warm", GROUP, ONE_CALL, SIMULATED)))
        await stack.engine(slots=SLOTS)
        watch = Watch(stack, len(work), RUN // 2)
        listening = asyncio.create_task(watch.listen())
        await asyncio.sleep(0.5)
        stack.start_cpu()
        watch.marks["start"] = await stack.engine()
        names = []
        for number, session in enumerate(work):
            while most is not None and number - watch.ended >= most:
                watch.changed.clear()
                await watch.changed.wait()
            names.append(await stack.client.submit(staged_task(f"stage-{number}", session)))
        await ended(stack, names)
        cpu = stack.cpu_s()
        while "end" not in watch.marks:  # noqa: ASYNC110 - the last event is on its way
            await asyncio.sleep(0.05)
        listening.cancel()
        seconds = watch.marks["end"]["now"] - watch.marks["start"]["now"]
    return {
        "arm": name,
        "sessions": len(work),
        "sessions in at once": most or sum(node[f"max_{stage}_workers"] for stage in ("init", "run", "postrun")) + node["max_ready"],
        "calls at the engine, peak": watch.marks["end"]["peak_asked"],
        "busy %": 100 * watch.busy("warm", "last begun"),
        "busy % with start and end": 100 * watch.busy("start", "end"),
        "of that the machine was late %": 100 * (1 - watch.marks["end"]["asked_s"] / watch.marks["end"]["busy_s"]),
        "s": seconds,
        "CPU cores used": sum(cpu.values()) / seconds,
    }


def staged_task(name: str, session: Session) -> dict[str, Any]:
    kwargs = {"init_s": session.init_s, "teardown_s": session.teardown_s}
    evaluator = {"strategy": "simulated.sandbox:Waits", "config": {"seconds": session.evaluation_s}}
    return {**task(name, 1, session.instruction, {**SIMULATED, "kwargs": kwargs}), "evaluator": evaluator}


async def stages(folder: Path, work: Sequence[Session]) -> list[dict[str, Any]]:
    def pool(workers: int) -> dict[str, Any]:
        return {f"max_{stage}_workers": workers for stage in ("init", "run", "postrun")} | {"max_ready": 0}

    staged = {"max_init_workers": INIT, "max_run_workers": RUN, "max_postrun_workers": POST, "max_ready": INIT}
    everyone = INIT + RUN + POST
    return [
        await arm(folder / "staged", "Polar's stages", work, staged, None),
        await arm(folder / "pool", f"one pool of {RUN}, as many as run workers", work, pool(RUN), RUN),
        await arm(folder / "large-pool", f"one pool of {everyone}, as many as all workers", work, pool(everyone), everyone),
    ]


def state_workload(work: Sequence[Session], scale: float) -> None:
    mean = {name: sum(values) / len(work) / scale for name, values in {
        "init": [one.init_s for one in work], "run": [one.run_s for one in work], "engine": [one.engine_s for one in work],
        "evaluation": [one.evaluation_s for one in work], "teardown": [one.teardown_s for one in work]}.items()}  # fmt: skip
    print(f"\n{len(work)} sessions, log-normal times in simulated seconds ({1 / scale:g} of them a real one):")
    for name, times in STATED.items():
        print(f"  {name:34} {times.text}")
    print("  drawn, mean of a session: " + ", ".join(f"{name} {value:.0f} s" for name, value in mean.items()))
    print(f"engine: {SLOTS} slots, calls beyond wait in order. Stages: {INIT} init, {INIT} ready, {RUN} run, {POST} post-run")


# --- the whole -------------------------------------------------------------------------------------------------------


def show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{title}")
    for row in rows:
        print("  " + "   ".join(f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()))
    print(flush=True)


async def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "throughput" in args.parts:
        found["throughput"] = [await throughput(folder / "simulated", "simulated", args.sessions, 48)]
        for backend in args.sandboxes:
            found["throughput"].append(await throughput(folder / backend, backend, max(GROUP, args.sessions // 10), 4))
        show("1. throughput (ms: CPU a session, by process)", found["throughput"])
    if "open" in args.parts:
        found["open"] = [await open_at_once(folder / "open", args.open)]
        show("2. sessions open at once", found["open"])
    if "stages" in args.parts:
        work = draw(args.seed, args.staged, args.scale)
        state_workload(work, args.scale)
        found["stages"] = await stages(folder / "stages", work)
        show("3. engine busy", found["stages"])
        print(
            "The reference reports, of its rollout GPUs over three training steps, 87.7 % with prefix_merging and 20.4 % with per_request\n"
            "(its figure 5b). That is another question, how long the trainer lets the engine wait, and not measured here."
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["throughput", "open", "stages"], choices=["throughput", "open", "stages"])
    parser.add_argument("--sessions", type=int, default=800, help="of the throughput in the simulated sandbox; a tenth elsewhere")
    parser.add_argument("--sandboxes", nargs="*", default=["local", "bubblewrap"], help="real ones for the throughput")
    parser.add_argument("--open", type=int, default=1000, help="sessions that run at once")
    parser.add_argument("--staged", type=int, default=200, help="sessions of each arm of the stages")
    parser.add_argument("--scale", type=float, default=1 / 25, help="real seconds that stand for a simulated one")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep stores and logs in this new folder")
    parser.add_argument("--out", type=Path, help="write the figures there as JSON")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="polar-rollout-"))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; everything in {folder}", flush=True)
    try:
        found = asyncio.run(measure(args, folder))
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
